"""Attention over paged KV and latents, and rotary embedding."""
