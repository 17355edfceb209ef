"""Durable batches and files: what is uploaded, run behind online requests,
and outlives the server."""
