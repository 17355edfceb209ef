"""Of every model type of the installed transformers: it is served, or its text is, or why not is
said in a line."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.errors import CheckpointError
from penstock.models.families import families
from penstock.models.model_list import CATALOG
from penstock.models.read_config import model_config_of
from penstock.models.text_part import TEXT_PARTS
from penstock.models.unserved import PARTS, WHY, nearest, why

pytestmark = pytest.mark.torch

SERVED = sorted([*families(), *TEXT_PARTS])
# Published with code of their own, and not in transformers: served, and not.
OF_CODE, REFUSED_OF_CODE = {"kimi_k2"}, {"kimi_vl"}


def test_every_model_type_is_served_or_told_why_not() -> None:
    installed = set(CONFIG_MAPPING)
    assert len(installed) > 500
    silent = sorted(name for name in installed - CATALOG.keys() if why(name, SERVED) is None)
    assert not silent, "say in models/unserved.py why"
    named = {name for names in WHY.values() for name in names}
    assert not named & CATALOG.keys(), "what is served is not refused"
    assert named - installed == REFUSED_OF_CODE, "no model type of transformers is called so"
    assert sum(map(len, WHY.values())) == len(named), "each has one reason"


def test_what_is_served_has_a_name_that_transformers_knows() -> None:
    assert CATALOG.keys() - set(CONFIG_MAPPING) == OF_CODE


def test_every_word_for_parts_is_used() -> None:
    words = {word for name in CONFIG_MAPPING for word in name.replace("-", "_").split("_")[1:]}
    assert not PARTS - words


@pytest.mark.parametrize(
    ("name", "reason", "take"),
    [
        ("qwen3_vl_text", "it is a part of qwen3_vl", "qwen3_vl"),
        ("qwen3_5_vision", "it is a part of qwen3_5", "qwen3_5"),
        (
            "kosmos_2_5_text_model",
            "it is a part of kosmos-2.5, which has images",
            "Qwen3 (qwen3, qwen3_moe)",
        ),
        (
            "gemma3n_text",
            "it is a part of gemma3n, which has an order of layers",
            "Gemma 3 (gemma3, gemma3_text)",
        ),
        (
            "glm_moe_dsa",
            "it has attention to keys that an indexer picks",
            "GLM-4.5 to 4.7 (glm4_moe)",
        ),
        ("qwen2_audio", "it has images, sound or video", "Qwen3 (qwen3, qwen3_moe)"),
        ("bert", "it has an encoder", None),
        ("muse_glimmer_assistant", "it has layers that draft tokens for another model", None),
        ("lama", None, "llama"),
        ("x" + "_text" * 9999, None, None),
        ("text_vision_model", None, None),
        ("_", None, None),
    ],
)
def test_why_and_what_to_take(name: str, reason: str | None, take: str | None) -> None:
    told = why(name, SERVED)
    assert told is None if reason is None else str(told).startswith(reason)
    assert nearest(name, SERVED) == take
    with pytest.raises(CheckpointError) as caught:
        model_config_of({"model_type": name}, "config.json")
    assert "\n" not in str(caught.value) and (reason or "") in str(caught.value)
    assert str(caught.value).endswith("`penstock models` lists what is")
