"""ranks: one model over several processes: rank 0 in the engine's, which schedules, the others as
its children.

It knows runners, plans and how GPUs add up (tensor parallelism); no requests, no text.
"""
