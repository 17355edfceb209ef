"""Layers: parts of a decoder, each a few lines over the Ops it is given. Know no model and no
checkpoint file."""
