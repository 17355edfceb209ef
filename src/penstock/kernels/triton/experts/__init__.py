"""Mixture of experts: routing, products of each expert's rows, one token alone."""
