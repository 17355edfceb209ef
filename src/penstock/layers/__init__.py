"""Layers: the parts of a decoder, as calls of operations. Shapes in comments: T tokens of a step, S
of them whose output is needed, d the hidden size, H query heads, Hkv KV heads, D numbers of a head.
Layers know no model and no checkpoint file."""
