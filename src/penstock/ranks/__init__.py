"""ranks: runs one model over several processes. Rank 0 is the engine's process, which schedules;
the other ranks are child processes.

Knows runners, plans and the collectives of tensor parallelism; no requests, no text.
"""
