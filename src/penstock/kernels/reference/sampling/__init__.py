"""Sampling: penalties, filters, the draw, log probabilities, columns of rows."""
