"""Qwen2 and Qwen2.5: biases on q, k and v alone; a sliding window on some layers, rarely switched on."""

from __future__ import annotations

from penstock.models.family import Differences, Family, qwen_windows
from penstock.models.keys import Keys


def read(keys: Keys, num_layers: int) -> Differences:
    return Differences(windows=qwen_windows(keys, num_layers), qkv_bias=True)


FAMILY = Family(model_type="qwen2", architecture="Qwen2ForCausalLM", read=read)
