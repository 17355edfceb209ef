"""Durable files and batches. The state folder (--state-dir) keeps them through restarts; batches
run with lower priority than online requests."""
