"""structured_output: processes that compute, step by step, the allowed next tokens of structured
outputs.

Knows grammars, samples' places on a board, and time; no scheduler, no device.
"""
