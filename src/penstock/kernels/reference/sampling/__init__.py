"""Sampling: penalties, filters, the draw, log probabilities, rows' columns."""
