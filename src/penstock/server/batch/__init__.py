"""Durable files and batches. The state folder keeps them through restarts; batches run with lower
priority than online requests."""
