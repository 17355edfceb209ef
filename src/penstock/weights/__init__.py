"""Weights: loading of a model folder or hub id. Reads safetensors only and never opens a pickle."""
