"""Weights: from a model folder or hub id to a filled Decoder. Safetensors only: no pickle is ever
opened."""
