"""Norms, activations, embedding: one read and one write of each row."""
