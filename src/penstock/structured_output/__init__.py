"""masks: the processes that say, step by step, which tokens a structured answer may go on with.

It knows grammars, samples' places on a board, and time; no scheduler, no device.
"""
