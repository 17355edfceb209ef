"""Durable files and batches: kept in the state folder through restarts, and run behind online
requests."""
