"""Qwen3: q and k are normed head by head, heads are 128 wide by default, biases only where the config asks."""

from __future__ import annotations

from penstock.models.family import Differences, Family, qwen_windows
from penstock.models.keys import Keys


def read(keys: Keys, num_layers: int) -> Differences:
    bias = keys.flag("attention_bias")
    return Differences(windows=qwen_windows(keys, num_layers), qkv_bias=bias, o_bias=bias, qk_norm=True)


FAMILY = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", read=read, head_dim=128)
