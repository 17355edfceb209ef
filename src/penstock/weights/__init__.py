"""Weights: from a model folder or hub id to a loaded Decoder. Safetensors only: no pickle is ever
opened."""
