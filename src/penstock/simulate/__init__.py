"""Runs the real scheduler and router over a modelled device, in virtual time.
docs/scale.md is the user's guide."""
