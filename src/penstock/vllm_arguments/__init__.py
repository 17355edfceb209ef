"""vLLM's arguments, and how Penstock treats each. There is one table for each place where arguments
are given, and the code that checks them.
"""
