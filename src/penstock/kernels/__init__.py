"""Kernels: a model's operations by family, each in plain torch and in fast forms, and which of them
runs.

Knows tensors and shapes; no layers, no requests."""
