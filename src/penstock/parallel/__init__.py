"""Parallel: how one model is laid over several ranks, and how they sum what each has computed.
Nothing at size 1."""
