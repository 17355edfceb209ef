"""Parallel: how one model is cut over several ranks, and how the ranks sum their results. With one
rank all of it does nothing."""
