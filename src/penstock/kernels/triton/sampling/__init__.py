"""Sampling of tokens, and the per-row arrays that it reads."""
