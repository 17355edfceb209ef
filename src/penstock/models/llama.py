"""Llama (1 to 3.x): the plain decoder, with biases where the config asks for them."""

from __future__ import annotations

from penstock.models.family import Differences, Family
from penstock.models.keys import Keys


def read(keys: Keys, num_layers: int) -> Differences:
    bias = keys.flag("attention_bias")
    return Differences(windows=(None,) * num_layers, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"))


FAMILY = Family(model_type="llama", architecture="LlamaForCausalLM", read=read, kv_heads_default_to_heads=True)
