"""Samples of models with recurrent state are what each is alone: forked, chunked, preempted, from
the prefix cache, by two ranks. One is a toy that keeps state in every form that there is. Hidden
states can be handed out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from execute_drive import Ask, Host, tiny_model, tiny_runner
from hybrid_models import MODELS, REPEATED, TOY
from ranks_together import Together, met
from sample_drive import HEAD, Samples, drive, drive_each_alone, over, requests

from penstock.engine.engine import Engine
from penstock.errors import UsageError
from penstock.execute.kv_cache import KvCache
from penstock.execute.kv_dtype import fit_states, whole_prompts
from penstock.models.sizes import ModelSizes
from penstock.parallel.layout import Layout
from penstock.request import Request, SamplingParams

pytestmark = pytest.mark.torch

NEW = 12  # tokens of a chat's turn


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a runner of a model is made with."""
    return MODELS[request.param]


@pytest.fixture(scope="module")
def each_alone() -> Callable[[str], Samples]:
    """Drives a model's requests once, whatever order its tests come in."""
    return cache(lambda name: drive_each_alone(tiny_runner(**MODELS[name])))


@pytest.fixture
def alone(model: dict[str, Any], each_alone: Callable[[str], Samples]) -> Samples:
    """What each request gives by itself, nothing of it cached."""
    return each_alone(next(name for name, each in MODELS.items() if each is model))


@pytest.mark.parametrize(
    ("model", "ahead", "tight"),
    [("toy", 0, False), ("toy", 1, True), ("lfm2", 3, False)]
    + [(name, 3, True) for name in MODELS if name != "toy"],
    indirect=["model"],
)
def test_samples_are_what_they_are_alone(
    model: dict[str, Any], alone: Samples, ahead: int, tight: bool
) -> None:
    """Few blocks, slots and tokens a step; rows are preempted all the time."""
    limits = {"blocks": 24, "snapshots": 2, "max_batched_tokens": 24} if tight else {"snapshots": 3}
    runner = tiny_runner(**model, **limits)
    engine, threads = over(runner, steps_ahead=ahead, preempt_every=5 if tight else 0)
    assert drive(engine, requests(), threads, together=4) == alone
    stats, slots = engine.scheduler.stats(), engine.scheduler.slots
    assert stats["late_masks"] > 0, "no row ever sat a draw out"
    assert stats["prefix_hit_tokens"] > 0 and slots.hits > 0
    assert (stats["preemptions"] > 5 and slots.evictions > 0) or not tight
    runner.close()


def test_a_state_that_is_not_moved_is_seen(
    model: dict[str, Any], alone: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its number of tokens is."""
    runner = tiny_runner(**model)
    state = runner._state
    assert state is not None

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        state.kv._folded[target.long()] = state.kv._folded[source.long()]

    monkeypatch.setattr(state._slot_copier, "copy", copy)
    engine, threads = over(runner)
    assert drive(engine, requests(), threads) != alone
    runner.close()


def test_two_ranks_give_the_samples_of_one(
    model: dict[str, Any], alone: Samples, tmp_path: Path
) -> None:
    layouts = [
        Layout(rank, 2, end.all_reduce, end.all_gather) for rank, end in enumerate(met(tmp_path, 2))
    ]
    runners = [tiny_runner(**model, layout=layout, blocks=30) for layout in layouts]
    twice = runners[0]._model.slot_bytes * 2 - REPEATED.get(model.get("model_type", "toy"), 0)
    assert twice == tiny_model(**model).slot_bytes
    one, threads = over(runners[0], preempt_every=7)
    engine = Engine(one.scheduler, Together(runners), steps_ahead=1)  # type: ignore[arg-type]
    found = drive(engine, requests()[:7], threads, together=5)  # one of them is constrained
    assert found == {key: alone[key] for key in alone if key[0] < 7}
    for runner in runners:
        runner.close()


def test_after_a_sleep_prompts_are_computed_again(model: dict[str, Any], alone: Samples) -> None:
    runner = tiny_runner(**model)
    engine, threads = over(runner)
    some = requests()[:3]
    assert drive(engine, some, threads).items() <= alone.items()
    engine.sleep()
    engine.wake_up()
    again = [replace(each, request_id=3 + number) for number, each in enumerate(some)]
    found = {
        (number - 3, sample): tokens
        for (number, sample), tokens in drive(engine, again, threads).items()
    }
    assert found == {key: alone[key] for key in alone if key[0] < 3}
    runner.close()


def test_what_prompts_begin_with_is_kept_from_the_second_one_on(model: dict[str, Any]) -> None:
    """One after the other: the second shows that they share two blocks, the third computes the rest
    alone."""
    runner = tiny_runner(**model, snapshots=8)
    engine, threads = over(runner)
    cached = []
    for number in range(4):
        prompt = np.array([*HEAD[:37], 10 + number, *HEAD[:40]], np.int32)
        request = Request(
            request_id=number,
            prompt=prompt.tobytes(),
            sampling=SamplingParams(n=2, max_tokens=3, seed=1),
        )
        before = engine.scheduler.stats()["prefix_hit_tokens"]
        drive(engine, [request], threads)
        cached.append(engine.scheduler.stats()["prefix_hit_tokens"] - before)
    assert cached == [0, 0, 32, 32]
    runner.close()


def test_the_next_turn_of_a_chat_computes_what_is_new(model: dict[str, Any]) -> None:
    """Each turn ends with a generation prompt of 15 tokens, which the next one doesn't have: its
    state lies before it, and of what was computed once no more is computed again than a block and
    one."""
    runner = tiny_runner(**model, snapshots=8)
    engine, threads = over(runner)
    draw, again, told = np.random.default_rng(3), [], [*HEAD]
    for turn in range(5):
        prompt = np.array([*told, *range(100, 115)], np.int32)
        params = SamplingParams(max_tokens=3, seed=turn)
        before = engine.scheduler.stats()["prefix_hit_tokens"]
        drive(engine, [Request(request_id=turn, prompt=prompt.tobytes(), sampling=params)], threads)
        again.append(len(told) - engine.scheduler.stats()["prefix_hit_tokens"] + before)
        told += draw.integers(8, 150, NEW).tolist()
    assert again[0] == len(HEAD) and all(count - NEW <= 17 for count in again[1:]), again
    stats = engine.scheduler.stats()
    assert (stats["state_hits"], stats["state_evictions"]) == (4, 0)
    assert stats["state_misses"] == 1, (
        "where the block before the last 16 tokens is whole, but for its last token"
    )
    runner.close()


def test_memory_counts_every_form() -> None:
    """Two layers of keys and values, one of latent vectors, none for the layer that reads
    another's; two sums."""
    model = tiny_model(**TOY)
    heads, latent = (2 * 2 * 8 * 4) * 16, 12 * 4 * 16
    assert [form.block_bytes for form in model.paged_forms] == [heads, latent, heads]
    assert model.slot_bytes == 2 * 32 * 4
    runner = tiny_runner(max_rows=8, blocks=50, **TOY)
    tokens, slots = 51 * 16 * 4, (8 + 2 + 4) * (model.slot_bytes + 16)
    assert runner.describe()["kv_bytes"] == 51 * (2 * heads + latent) + tokens + slots
    runner.close()
    sizes = ModelSizes.of(model)
    assert (
        sum(each.layers for each in sizes.attending) == 4 and sizes.slot_bytes == model.slot_bytes
    )
    assert sizes.stored * 16 == 2 * heads + latent


def test_states_that_add_up_are_of_the_dtype_that_is_asked_for() -> None:
    model = tiny_model(**MODELS["qwen3_5"])
    matrices, windows = 2 * 4 * 16 * 24, 2 * 4 * (2 * 2 * 16 + 4 * 24) * 4
    assert model.slot_bytes == matrices * 4 + windows
    fit_states(model, "auto")
    fit_states(model, "bfloat16")
    assert model.slot_bytes == matrices * 2 + windows
    views = KvCache(model.keepers, 2, model.device, slots=3).layers[0][0]
    assert views["matrix"].dtype == torch.bfloat16 and views["window"].dtype == torch.float32
    for other in ("toy", "lfm2"):
        with pytest.raises(
            UsageError,
            match=r"mamba_ssm_cache_dtype float16 is for recurrent states .* leave it auto",
        ):
            fit_states(tiny_model(**MODELS[other]), "float16")


@pytest.mark.parametrize("model", ["qwen3_5"], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_states_say_nearly_the_same(
    dtype: str, alone: Samples, model: dict[str, Any]
) -> None:
    """Most of the first tokens, before what was rounded leads elsewhere."""
    runner = tiny_runner(**model, mamba_ssm_dtype=dtype)
    engine, threads = over(runner)
    found = drive(engine, requests(), threads)
    assert len(alone) // 2 < sum(found[key][:8] == alone[key][:8] for key in alone)
    assert runner._state is not None
    matrix = runner._state.kv.layers[0][0]["matrix"]
    assert matrix.dtype == getattr(torch, dtype) and matrix.any(), "they are what is computed with"
    runner.close()


def test_hidden_states_of_layers_are_handed_out() -> None:
    """What layer 3 leaves is the same for a token in a chunk, in a row, and in a step of whole
    prompts."""
    model = tiny_model()
    model.hand_out([0], 64)
    cache = KvCache(model.keepers, 8, torch.device("cpu"))
    ids = torch.tensor(HEAD[:20])
    with torch.inference_mode():
        model.forward(ids, whole_prompts(1, 20, torch.tensor([[1, 2]])), cache.layers)
    whole = model.handed[0][:20].clone()
    runner = tiny_runner()
    runner._model.hand_out([0], 64)
    host = Host(runner)
    row = host.row(0, HEAD[:20], 10, ask=Ask(), pieces=3)
    in_pieces = runner._model.handed[0]
    host.run([row], 1)
    torch.testing.assert_close(in_pieces[0], whole[19])
    assert not torch.equal(whole[18], whole[19])
    runner.close()
