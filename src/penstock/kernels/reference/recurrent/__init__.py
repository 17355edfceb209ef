"""Layers with a recurrent state: gated delta rule, Mamba2, short convolutions."""
