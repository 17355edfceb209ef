"""Layers: parts of a decoder, each a few lines over the Ops it is handed. They know no model and no
checkpoint file."""
