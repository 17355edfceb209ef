"""Recurrent layers: gated delta rule, Mamba2 and short convolutions."""
