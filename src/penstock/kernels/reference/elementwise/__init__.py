"""Norms, activations and embedding: operations on single rows."""
