"""Norms, activations and embedding, which read and write each row once."""
