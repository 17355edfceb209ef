"""Simulates engines in virtual time. The real scheduler and router run over a modelled device
(docs/scale.md)."""
