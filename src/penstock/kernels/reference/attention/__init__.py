"""Attention and its inputs: paged KV, latents, shared prefixes, rotary embedding."""
