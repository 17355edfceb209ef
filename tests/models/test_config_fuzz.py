"""Drawn config.json, generation_config.json and tokenizer_config.json: a config, or one
CheckpointError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzz_inputs import examples, sometimes_mangled
from fuzz_model_files import CONFIGS, configs, generation_configs, tokenizer_configs
from fuzz_targets import config, generation_config, tokenizer_config
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from service import make_folder

LONG = settings(suppress_health_check=list(HealthCheck))
LLAMA, QWEN, MISTRAL = CONFIGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_folder(made)
    return made


@pytest.mark.parametrize("base", CONFIGS, ids=lambda base: base["model_type"])
def test_what_is_bent_is_sound_before(folder: Path, base: dict[str, Any]) -> None:
    assert config(folder, json.dumps(base).encode())


@settings(LONG, max_examples=examples(500))
@given(data=sometimes_mangled(configs()) | st.binary(max_size=40))
def test_a_config_is_one_or_a_checkpoint_error(folder: Path, data: bytes) -> None:
    event(str(config(folder, data)))


@settings(LONG, max_examples=examples(150))
@given(data=sometimes_mangled(generation_configs()) | st.binary(max_size=40))
def test_so_is_a_generation_config(folder: Path, data: bytes) -> None:
    event(str(generation_config(folder, data)))


@settings(LONG, max_examples=examples(150))
@given(data=sometimes_mangled(tokenizer_configs()) | st.binary(max_size=40))
def test_so_is_a_tokenizer_config(folder: Path, data: bytes) -> None:
    event(str(tokenizer_config(folder, data)))
    (folder / "tokenizer_config.json").unlink()


YARN = {"rope_type": "yarn", "factor": 4.0}
FAR = YARN | {"factor": 9e299, "original_max_position_embeddings": 2**31 - 1}
FOUND: dict[str, dict[str, Any]] = {
    "two billion layers": LLAMA | {"num_hidden_layers": 2**31 - 1},
    "a head of a billion": LLAMA | {"head_dim": 10**9},
    "a head of all a giant's width": LLAMA
    | {"hidden_size": 2**20, "num_attention_heads": 1, "num_key_value_heads": 1},
    "a vocabulary of two billion": LLAMA | {"vocab_size": 2**31 - 1},
    "heads without a width": MISTRAL | {"head_dim": None, "hidden_size": 2},
    "a context beyond any float": LLAMA
    | {"rope_scaling": FAR, "max_position_embeddings": 2**31 - 1},
    "a context beyond any position": LLAMA | {"rope_scaling": YARN | {"factor": 1e12}},
    "a base whose logarithm is 0": LLAMA | {"rope_scaling": YARN, "rope_theta": 1.0},
    "half a surrogate pair": LLAMA | {"dtype": "\ud800", "torch_dtype": "float16"},
    "a value of a megabyte": LLAMA | {"hidden_act": "x" * 1_000_000},
}


@pytest.mark.parametrize("name", FOUND)
def test_configs_that_were_no_checkpoint_error_once(folder: Path, name: str) -> None:
    assert not config(folder, json.dumps(FOUND[name]).encode())


def test_nesting_as_deep_as_can_be_read(folder: Path) -> None:
    """Where reading it just comes back, writing it into an error, or comparing it, might not."""
    for depth in (31, 33, *range(880, 1_010)):
        for name in ("auto_map", "hidden_size", "architectures", "rope_scaling"):
            deep = b"[" * depth + b"]" * depth
            data = (
                json.dumps(LLAMA | {name: 7, "rope_parameters": 7})
                .encode()
                .replace(b": 7", b": " + deep)
            )
            assert not config(folder, data)


@pytest.mark.parametrize(
    "raw",
    [
        {"additional_special_tokens": 5},
        {"additional_special_tokens": "abc"},
        {"bos_token": "\ud800"},
        {"added_tokens_decoder": {"0": {"content": "\udc00"}}},
        {"added_tokens_decoder": 5},
        {"chat_template": 5},
    ],
)
def test_tokenizer_configs_that_are_none(folder: Path, raw: dict[str, Any]) -> None:
    assert not tokenizer_config(folder, json.dumps(raw).encode())
