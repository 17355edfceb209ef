"""ranks: one model over several processes: rank 0 in the engine's process, which schedules, the
others in child processes.

Knows runners, plans and the collectives of tensor parallelism; no requests, no text.
"""
