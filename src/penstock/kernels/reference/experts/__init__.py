"""Mixture of experts: routing, products of each expert's rows, a single token."""
