"""Quant: quantized weights, on disk and in memory. Knows how the numbers of a weight are named and
stored on disk, cut for ranks, and prepared for matrix products."""
