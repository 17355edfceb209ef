"""Quant: quantized weights, on disk and in memory. Knows how quantized checkpoints name and store a
matrix, how tensor parallel ranks split it, and how it is prepared for matrix products. A Part is a
checkpoint tensor with its tensor parallel split; a Weight loads Parts (both in
parallel/sharded_weight.py)."""
