"""Mistral: no biases, and one sliding window for all layers (null: none)."""

from __future__ import annotations

from penstock.models.family import Differences, Family, given_window
from penstock.models.keys import Keys


def read(keys: Keys, num_layers: int) -> Differences:
    return Differences(windows=(given_window(keys, 4096),) * num_layers)


FAMILY = Family(model_type="mistral", architecture="MistralForCausalLM", read=read)
