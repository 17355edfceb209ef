"""vLLM's arguments, and how Penstock treats each: one table for each place they are given, and the
code that checks them.
"""
