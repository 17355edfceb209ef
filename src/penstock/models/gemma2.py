"""Gemma 2 (arXiv:2408.00118): attention scores and logits are capped. The order of norms is that of
Gemma 3. Every second layer has a sliding window, all layers have the same rotary table, and q and k
are not normed."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.gemma3_text import GemmaConfig, build, read_gemma
from penstock.models.rope_keys import read_rope

__all__ = ["ARCHITECTURE", "build", "read"]

ARCHITECTURE = "Gemma2ForCausalLM"
SCORE_CAP, LOGITS_CAP, PATTERN, CONTEXT = 50.0, 30.0, 2, 8192


def read(keys: Keys, named: dict[str, Any]) -> GemmaConfig:
    """Returns the model's config, read from the keys of config.json."""
    # published configs repeat hidden_activation, which is read, as hidden_act
    keys.take("hidden_act", None)
    caps = {
        field: keys.positive(name, None if name in keys.rest else absent)
        for field, name, absent in (
            ("score_cap", "attn_logit_softcapping", SCORE_CAP),
            ("logits_cap", "final_logit_softcapping", LOGITS_CAP),
        )
    }

    def ropes(keys: Keys, positions: int, width: int) -> dict[str, Any]:
        rope = read_rope(keys, positions, width)
        return {"rope": rope, "local_rope": rope}

    return read_gemma(keys, named | caps, ropes, context=CONTEXT, pattern=PATTERN, qk_norm=False)
