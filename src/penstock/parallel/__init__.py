"""Parallel: one model divided over several ranks, and their sums. With one rank nothing is divided
and nothing is summed."""
