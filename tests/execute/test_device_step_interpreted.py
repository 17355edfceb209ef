"""DeviceStep on a machine without a GPU: its packing, kernels and order, in Triton's interpreter,
in float32.

What it gives is held against the plain step, read late. Only graphs and streams are left to the GPU
tests. Two layers show what one leaves the next; where that is not what a test is about the model
has one: a program takes milliseconds.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import family_cases
import numpy as np
import pytest
import torch
import triton_interpreter  # before the kernels
from execute_drive import TINY_LATENT, Ask, Host, Row, chunk_of, late_steps, tiny_runner
from hybrid_models import MODELS
from toy_proposer import Repeats

from penstock.execute import executor as executor_file
from penstock.execute import step_kinds, warm
from penstock.execute.device_step import DeviceStep
from penstock.execute.runner import TorchRunner
from penstock.kernels import choose
from penstock.kernels.latent import LatentSizes
from penstock.kernels.triton.attention import latent
from penstock.kernels.triton.linear import linear_four
from penstock.kernels.triton.linear.linear_four import Band
from penstock.layers.one_row import OneRowLayer
from penstock.parallel.collectives import Gloo
from penstock.parallel.layout import Layout
from penstock.schedule.step import BAD_LOGITS, NO_TOKEN, Drafts, StepTokens
from penstock.speculative import SpeculativeConfig

pytestmark = pytest.mark.torch

ONE_LAYER = {"num_hidden_layers": 1}
ASKS = [
    Ask(),
    Ask(temperature=0.8, seed=11, logprobs=3),
    Ask(temperature=1.5, seed=-3, top_p=0.7, logprobs=0),
    Ask(temperature=1.0, seed=2, top_k=9, repetition=1.3, frequency=0.3),
    Ask(
        temperature=0.7,
        seed=5,
        presence=1.0,
        bias={9: 4.0, 30: -5.0},
        min_tokens=3,
        logprobs=2,
        labels=[30, 8],
    ),
    Ask(temperature=0.9, seed=8, top_k=20, top_p=0.9, allowed=[*range(3, 100, 9), 159]),
    Ask(allowed=[158], logprobs=0),
]


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton column is picked on the CPU too, products of one row among it, and what a step
    leaves is copied behind it, as a stream does: the next step writes to the same place."""
    for op, candidates in choose.CANDIDATES.items():
        there = tuple(
            replace(c, devices=("cpu", "cuda"), dtypes=(torch.float32,)) for c in candidates
        )
        monkeypatch.setitem(choose.CANDIDATES, op, there)
    monkeypatch.setattr(executor_file, "_to_host", lambda x, pinned: x.clone())


def _steps(runner: TorchRunner, asks: list[Ask], steps: int) -> list[StepTokens]:
    host = Host(runner, runner.vocab_size)
    rows = [host.row(i, list(range(8, 14 + 3 * i)), 40, ask) for i, ask in enumerate(asks)]
    out = [host.launch(rows, **({"joins": rows} if step == 0 else {})) for step in range(steps)]
    return [flight.fetch() for flight in out]


def _plain(asks: list[Ask], steps: int, **config: Any) -> list[StepTokens]:
    runner = tiny_runner(**config)
    try:
        assert runner._state is not None and not runner._state.ops.compiled
        return _steps(runner, asks, steps)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("asks", "shape"), [(ASKS[:1], {}), (ASKS, ONE_LAYER)], ids=["one row", "every"]
)
def test_tokens_and_logprobs_are_the_plain_steps(
    asks: list[Ask], shape: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    want = _plain(asks, 2, **shape)
    request.getfixturevalue("by_triton")
    runner = tiny_runner(**shape)
    assert (
        runner._state is not None
        and runner._state.ops.compiled
        and runner._state.model.ops.one_row is not None
    )
    found = _steps(runner, asks, 2)
    runner.close()
    _same(want, found)
    if len(asks) > 1:
        assert found[0].logprobs is not None
        at = found[0].logprobs.where.tolist().index(4)
        assert found[0].logprobs.top_ids[at].tolist() == [30, 8, -1], (
            "ids that were named stand in for the most likely"
        )


def test_one_row_of_four_bits_is_the_plain_step(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through two layers, whose products take the row in fixed point."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "numbers": "int4"}
    want = _plain(ASKS[1:2], 2, **shape)
    request.getfixturevalue("by_triton")
    # few programs: each takes 0.1 s
    monkeypatch.setattr(linear_four, "band_of", lambda *_: Band(128, 8, 4, 2))
    runner = tiny_runner(**shape)
    try:
        layer = runner._state.model.blocks[0]  # type: ignore[union-attr]
        assert isinstance(layer, OneRowLayer)
        assert {layer.mlp.gate_up.form(1), layer.mlp.down.form(1), layer.attention.out.form(1)} == {
            "fixed"
        }
        _same(want, _steps(runner, ASKS[1:2], 2), within=2e-2)
    finally:
        runner.close()


def _same(want: list[StepTokens], found: list[StepTokens], within: float = 1e-4) -> None:
    for here, there in zip(want, found, strict=True):
        assert here.tokens.tolist() == there.tokens.tolist()
        assert (here.logprobs is None) == (there.logprobs is None)
        if here.logprobs is not None and there.logprobs is not None:
            for name in ("where", "rank", "top_ids"):
                assert (getattr(here.logprobs, name) == getattr(there.logprobs, name)).all(), name
            np.testing.assert_allclose(here.logprobs.chosen, there.logprobs.chosen, atol=within)
            np.testing.assert_allclose(here.logprobs.top, there.logprobs.top, atol=within)


def test_a_late_draw_is_the_plain_steps(request: pytest.FixtureRequest) -> None:
    """In the place of a row that sits out stands the dead one, as where a step is padded."""
    plain = tiny_runner(**ONE_LAYER)
    want = late_steps(plain)
    plain.close()
    request.getfixturevalue("by_triton")
    runner = tiny_runner(**ONE_LAYER)
    assert late_steps(runner) == want and want[0][2] == NO_TOKEN
    runner.close()


def _drafted_by_device(runner: TorchRunner) -> list[list[int]]:
    """Tokens of three rows, of which two are offered what the device guesses."""
    assert runner._state is not None
    runner._state.draw.proposer = Repeats(runner._state, 1)
    host, told = Host(runner), list[list[int]]()
    asks = [
        Ask(allowed=[40]),
        Ask(temperature=1.0, seed=1, allowed=[50, 51]),
        Ask(temperature=1.0, seed=2),
    ]
    # prompts of one token, so that rows begin with an empty state
    rows = [host.row(i, [8 + i], 40, ask) for i, ask in enumerate(asks)]
    for step in range(3):
        plan = host.plan(rows, **({"joins": rows} if step == 0 else {}))
        plan.proposes = 2
        if step:
            plan.drafts = Drafts(np.array([0, 2, 2 + step, 2 + step], np.int32), None)
        told.append(runner.launch(plan).fetch().tokens.tolist())
    runner.close()
    return told


@pytest.mark.parametrize(
    "shape",
    [ONE_LAYER, MODELS["qwen3_5"] | {"speculative": SpeculativeConfig()}],
    ids=["plain", "recurrent"],
)
def test_drafts_that_the_device_made_are_the_plain_steps(
    shape: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    want = _drafted_by_device(tiny_runner(**shape))
    assert [line[:3] for line in want[1:]] == [[40] * 3] * 2 and [len(line) for line in want] == [
        3,
        6,
        7,
    ]
    request.getfixturevalue("by_triton")
    assert _drafted_by_device(tiny_runner(**shape)) == want


def _tagged(runner: TorchRunner) -> list[list[int]]:
    """Tokens of two rows of unlike tags; the second's prompt, with embeddings handed in, comes
    beside the first."""
    host = Host(runner)
    first = host.row(0, [8, 9, 10], 40, Ask(tag=1))
    prompt, blocks = list(range(20, 40)), host.take(2)
    handed = {at: np.linspace(-1, at / 9, 32, dtype=np.float32) for at in (0, 2, 18)}
    second = Row(1, prompt, 20, 60, blocks, Ask(tag=3), 0, 19)
    flights = [
        host.launch(
            [first], joins=[first], chunks=chunk_of(prompt, 0, 19, blocks, tag=3, handed=handed)
        )
    ]
    flights += [host.launch([first, second], joins=[second])]
    told = [flight.fetch().tokens.tolist() for flight in flights]
    runner.close()
    return told


def test_tags_and_handed_embeddings_are_the_plain_steps(request: pytest.FixtureRequest) -> None:
    want, plain = _tagged(tiny_runner(tagged=True, **ONE_LAYER)), _tagged(tiny_runner(**ONE_LAYER))
    request.getfixturevalue("by_triton")
    assert _tagged(tiny_runner(tagged=True, **ONE_LAYER)) == want != plain


def test_two_ranks_are_the_plain_step(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In threads, each with a stretch of the vocabulary; the interpreter is one, and takes a launch
    at a time."""
    shape, asks = {"vocab_size": 300, **ONE_LAYER}, [ASKS[1], ASKS[4], ASKS[5]]
    want = _plain(asks, 2, **shape)
    request.getfixturevalue("by_triton")
    turn, launch = threading.Lock(), triton_interpreter.interpreter.GridExecutor.__call__

    def one_at_a_time(*args: Any, **kwargs: Any) -> None:
        with turn:
            launch(*args, **kwargs)

    monkeypatch.setattr(triton_interpreter.interpreter.GridExecutor, "__call__", one_at_a_time)

    def run(rank: int) -> list[StepTokens]:
        end = Gloo(tmp_path / "meeting", rank, 2, 60.0)
        end.connect()
        runner = tiny_runner(layout=Layout(rank, 2, end.all_reduce, end.all_gather), **shape)
        assert (
            runner._state is not None
            and runner._state.ops.compiled
            and runner._state.model.head_rows < 300
        )
        try:
            return _steps(runner, asks, 2)
        finally:
            runner.close()

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(run, range(2)):
            _same(want, found)


def _tails(runner: TorchRunner, prefix: int) -> list[list[int]]:
    """Three tails of a prompt of 40 tokens, its last block copied for each,
    its first two shared."""
    host = Host(runner)
    prompt = [9 + i % 20 for i in range(40)]
    blocks = host.take(3)
    host.prefill(prompt, blocks, pieces=2)
    ask, rows, copies = Ask(temperature=1.0, seed=4, repetition=1.2), [], []
    for sample in range(3):
        mine = host.take(1)
        copies.append((blocks[2], mine[0]))
        rows.append(Row(sample, prompt, 40, 100, blocks[:2] + mine, ask, sample, 39))
    steps = [host.launch(rows, joins=rows, copies=copies, prefix=prefix)]
    steps += [host.launch(rows, prefix=prefix) for _ in range(1)]
    return [flight.fetch().tokens.tolist() for flight in steps]


def test_groups_and_copied_blocks_are_the_plain_steps(request: pytest.FixtureRequest) -> None:
    plain = tiny_runner()
    want = _tails(plain, 0)
    plain.close()
    request.getfixturevalue("by_triton")
    runner = tiny_runner()
    assert _tails(runner, 2) == want
    runner.close()


def test_groups_whose_prefix_is_expanded_are_the_plain_steps(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention makes keys and values of the shared prefix, in both steps and both layers."""
    shape = TINY_LATENT | {"first_k_dense_replace": 2}
    plain = tiny_runner(**shape)
    want = _tails(plain, 0)
    plain.close()
    request.getfixturevalue("by_triton")
    monkeypatch.setattr(LatentSizes, "expands_prefixes", lambda *_: True)
    monkeypatch.setattr(step_kinds, "PREFIX_ROWS", 1)
    made, real = [], latent.attend_expanded
    monkeypatch.setattr(latent, "attend_expanded", lambda *args: made.append(real(*args)))
    runner = tiny_runner(**shape)
    assert _tails(runner, 2) == want and len(made) == 4
    runner.close()


def test_kv_in_eight_bits_is_the_plain_steps(request: pytest.FixtureRequest) -> None:
    """Prompts, rows with a shared prefix and copied blocks,
    then one row in the fused operations."""

    def driven() -> tuple[list[list[int]], list[list[int]]]:
        runner = tiny_runner(kv_dtype="fp8", **ONE_LAYER)
        try:
            assert runner.describe()["kv_cache_dtype"] == "float8_e4m3fn"
            prefix = 2 if runner._state is not None and runner._state.ops.compiled else 0
            return _tails(runner, prefix), [
                step.tokens.tolist() for step in _steps(runner, ASKS[:1], 2)
            ]
        finally:
            runner.close()

    want = driven()
    request.getfixturevalue("by_triton")
    assert driven() == want


def test_groups_past_the_capacity_go_alone(by_triton: None) -> None:
    """Of two groups a step of four rows has room for one: the others' rows are attended each by
    itself."""
    tokens = []
    for groups in (0, 2):
        runner = tiny_runner(**ONE_LAYER)
        host = Host(runner)
        rows = []
        for group in range(2):
            prompt = [9 + group + i % 20 for i in range(17)]
            shared = host.take(1)
            host.prefill(prompt, shared)
            for i in range(2):
                ask, blocks = Ask(temperature=1.0, seed=i), shared + host.take(1)
                rows.append(Row(2 * group + i, prompt, 17, 60, blocks, ask, planned=16))
        plan = host.plan(rows, joins=rows)
        if groups:
            plan.group_start = np.array([0, 2, 4], np.int32)
            plan.group_blocks = np.array([rows[0].blocks[:1], rows[2].blocks[:1]], np.int32)
            plan.group_length = np.array([16, 16], np.int32)
        tokens.append(runner.launch(plan).fetch().tokens.tolist())
        assert plan.group_length.size == min(groups, 1)
        runner.close()
    assert tokens[0] == tokens[1]


def test_prompt_logprobs_are_the_plain_steps(request: pytest.FixtureRequest) -> None:
    prompt, scored = [9 + i * 7 % 100 for i in range(50)], []
    for fixture in (None, "by_triton"):
        if fixture:
            request.getfixturevalue(fixture)
        runner = tiny_runner(**ONE_LAYER)
        host = Host(runner)
        scored.append(
            [
                f.fetch().prompt_logprobs
                for f in host.prefill(prompt, host.take(4), 3, prompt_logprobs=2)
            ]
        )
        runner.close()
    for here, there in zip(*scored, strict=True):
        assert here is not None and there is not None and (here.top_ids == there.top_ids).all()
        np.testing.assert_allclose(here.chosen, there.chosen, atol=1e-4)


def test_a_row_that_is_not_finite_ends_alone_and_its_blocks_are_as_good_as_new(
    by_triton: None,
) -> None:
    told = {}
    for poison in (None, 100):
        runner = tiny_runner(poison=poison, **ONE_LAYER)
        host = Host(runner)
        ask = Ask(bias={100: -100.0})
        bad = host.row(0, [*range(8, 20), 100], 40, ask)
        rows = [host.row(1, list(range(9, 21)), 40, ask)]
        first = host.run([bad, *rows], 2, ahead=1).tolist()
        host.next_block = 1  # all of them are handed out again
        told[poison] = first, host.run([host.row(0, [8] * 5, 40, ask)], 2).tolist()
        assert isinstance(runner._state, DeviceStep) and host.clears is (poison is not None)
        assert all(
            layer.worth(torch.tensor(bad.blocks)).isfinite().all()
            for (layer,) in runner._state.kv.layers
        )
        runner.close()
    assert told[100][0][0] == [BAD_LOGITS, NO_TOKEN]
    assert told[100][0][1:] == told[None][0][1:] and told[100][1] == told[None][1]


class _AtOnce:
    """Of ThreadPoolExecutor: what is submitted is done by whoever submits it. The interpreter
    serves one thread."""

    def __init__(self, threads: int, name: str) -> None:
        pass

    def __enter__(self) -> _AtOnce:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, work: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done


def test_a_model_with_a_window_starts_and_says_what_transformers_says(
    tmp_path: Path, by_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the worst steps of the start on. Prefix groups are asked for, and its rows are attended
    each by itself.

    What a step launches at work was launched at the start: it is compiled there.
    """
    launched: set[str] = set()
    started: set[str] = set()
    guessed: list[int] = []  # queries of the steps whose drafts were warmed
    launch = triton_interpreter.interpreter.GridExecutor.__call__

    def noted(kernel: Any, *arguments: Any, **more: Any) -> None:
        launched.add(kernel.fn.__name__)
        launch(kernel, *arguments, **more)

    def warmed(step: DeviceStep, *arguments: Any) -> None:
        step.draw.proposer = proposer = Repeats(step, 1)
        warm.warm(step, *arguments)
        guessed.extend(proposer.warmed)
        step.draw.proposer = None
        started.update(launched)

    monkeypatch.setattr(triton_interpreter.interpreter.GridExecutor, "__call__", noted)
    monkeypatch.setattr("penstock.execute.runner.warm", warmed)
    monkeypatch.setattr(warm, "ThreadPoolExecutor", _AtOnce)
    tiny = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "sliding_window": 7,
    }
    case = ("Mistral", tiny | family_cases.heads(2, 1, 16))
    work = family_cases.Work(
        alone=(5,), together=(9,), shared=17, forks=(3,), n=2, tokens=2, vocabulary=40
    )
    limits = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 32,
        "kv_cache_tokens": 256,
    }
    judged = family_cases.judge(case, tmp_path, work, device="cpu", dtype="float32", **limits)
    assert judged.is_right() and judged.logprobs == 26 and judged.windowed and not judged.grouped
    assert {"_prepare", "_own", "_join", "_grow", "_copy_blocks"} <= launched == started
    assert guessed, "a proposer was warmed"
