"""Kernels: the operations of a model, in several implementations. Each operation is in plain torch
(`reference`), and most are in Triton too (`triton`); `choose` selects one for a device. A package
of implementations is called a column. Knows tensors and shapes; no layers, no requests."""
