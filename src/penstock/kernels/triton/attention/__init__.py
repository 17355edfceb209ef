"""Attention and what it reads: paged KV, latent vectors, shared prefixes, rotary embedding."""
