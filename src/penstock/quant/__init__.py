"""Quant: how a weight's numbers are named and stored on disk, cut for ranks, and made ready to be
multiplied by."""
