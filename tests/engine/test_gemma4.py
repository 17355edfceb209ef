"""Samples of a Gemma 4, whose late layers read an earlier layer's keys and values, are what each is
alone: forked, chunked, preempted, found in the cache, by ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from execute_drive import CONFIG, tiny_model, tiny_runner
from paged_cache import PagedCache
from ranks_together import Together, met
from safetensors.torch import save_file
from sample_drive import Samples, drive, drive_each_alone, over, requests

from penstock.engine.engine import Engine
from penstock.errors import CheckpointError
from penstock.layers.reading_attention import ReadingAttention
from penstock.models.build_model import build_model
from penstock.models.read_config import model_config_of
from penstock.parallel.layout import Layout
from penstock.weights.place import find_weights

pytestmark = pytest.mark.torch

MODEL: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 5,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 12,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
    ],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": CONFIG["vocab_size"],
}


HALF = MODEL | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
TWICE = MODEL | {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "num_key_value_heads": 1,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")
    ],
}
# What a layer that sees everything stores, over one with a window: as much, half as in 26B-A4B,
# twice as in E4B.
MODELS: dict[str, dict[str, Any]] = {
    "as much": MODEL,
    "half": HALF,
    "twice": TWICE,
    "half, eight bits": HALF | {"kv_dtype": "fp8", "enable_moe_block": False},
}


@pytest.fixture(scope="module")
def each_alone() -> Callable[[str], Samples]:
    """Drives a model's requests once, whatever order its tests come in."""
    return cache(lambda name: drive_each_alone(tiny_runner(**MODELS[name])))


@pytest.fixture
def alone(name: str, each_alone: Callable[[str], Samples]) -> Samples:
    """What each request gives by itself, nothing of it cached."""
    return each_alone(name)


@pytest.mark.parametrize(
    ("name", "ahead", "tight"),
    [("half", 1, True), ("as much", 0, False), ("half, eight bits", 2, True), ("twice", 2, True)],
)
def test_samples_are_what_they_are_alone(
    alone: Samples, name: str, ahead: int, tight: bool
) -> None:
    """Few blocks and tokens a step; rows are preempted all the time. Layers share pages, whatever
    they store."""
    runner = tiny_runner(
        **MODELS[name], **({"blocks": 60, "max_batched_tokens": 24} if tight else {})
    )
    assert runner.layer_pages is not None
    engine, threads = over(runner, steps_ahead=ahead, preempt_every=5 if tight else 0)
    assert drive(engine, requests(), threads, together=4) == alone
    stats = engine.scheduler.stats()
    assert stats["prefix_hit_tokens"] > 0 and (stats["preemptions"] > 5 or not tight)
    runner.close()


@pytest.mark.parametrize("name", ["half"])
def test_two_ranks_give_the_samples_of_one(alone: Samples, name: str, tmp_path: Path) -> None:
    layouts = [
        Layout(rank, 2, end.all_reduce, end.all_gather) for rank, end in enumerate(met(tmp_path, 2))
    ]
    runners = [tiny_runner(**MODELS[name], layout=layout, blocks=120) for layout in layouts]
    assert all(runner.layer_pages is not None for runner in runners)
    one, threads = over(runners[0], preempt_every=7)
    engine = Engine(one.scheduler, Together(runners), steps_ahead=1)  # type: ignore[arg-type]
    found = drive(engine, requests()[:7], threads, together=5)  # one of them is constrained
    assert found == {key: alone[key] for key in alone if key[0] < 7}
    for runner in runners:
        runner.close()


def test_late_layers_read_the_last_of_their_kind_and_store_nothing() -> None:
    model = tiny_model(**MODEL)
    mixers = [keeper for (keeper,) in model.keepers]
    assert [isinstance(mixer, ReadingAttention) for mixer in mixers] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert mixers[3].source is mixers[2] and mixers[4].source is mixers[1]
    assert len(model.paged_forms) == 3
    assert [form.block_bytes // (2 * 16 * 4) for form in model.paged_forms] == [
        2 * 8,
        1 * 16,
        2 * 8,
    ]


def test_streams_of_layers_can_be_handed_out() -> None:
    """Layers leave no residual: what is handed out is the whole stream."""
    model, ids = tiny_model(**MODEL), [5, 9, 11, 7]
    model.hand_out([4], 8)
    logits = PagedCache(model, 1, 2).step([], [(0, ids)])
    stream = model.handed[4][: len(ids)]
    assert torch.equal(model.logits(model.norm.last(model.ops, stream, None)), logits)


def test_a_table_of_another_vocabulary_is_named(tmp_path: Path) -> None:
    """Its config says as many tokens as the model's; the tensor has fewer."""
    shape = build_model(
        model_config_of(CONFIG | MODEL, "tiny"), torch.float32, torch.device("meta")
    )
    tensors = {
        part.name: torch.zeros(part.shape) for weight in shape.weights() for part in weight.parts
    }
    name = "model.embed_tokens_per_layer.weight"
    save_file(tensors | {name: torch.zeros(100, 5 * 6)}, tmp_path / "model.safetensors")
    told = rf"tensor '{name}' has shape \[100, 30\], config.json asks for \[160, 30\]"
    with pytest.raises(CheckpointError, match=told):
        find_weights(shape, tmp_path)
