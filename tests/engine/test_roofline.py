"""The gauge of the hardware's limit: against a twin that counts bytes row by row, with a clock that
the test turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from alike_sizes import alike_sizes
from fake_device import FakeDevice

from penstock.engine.engine import Engine
from penstock.engine.roofline import RooflineGauge, Steps, limit_seconds
from penstock.execute.gpu_specs import DATA_SHEETS, GpuSpecs
from penstock.kernels.latent import LatentSizes
from penstock.layers.block import RoutedNumbers
from penstock.models.sizes import Attending, ModelSizes
from penstock.request import Request, SamplingParams
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import Chunks, Moves, StepPlan, StepTokens

pytestmark = pytest.mark.torch  # a layer's experts are described beside it

MODEL = alike_sizes(
    layers=2, hidden=10, heads=4, head_dim=8, vocab=50, layer_weights=1000, kv_numbers=64
)
# products cost nothing but the reading of their weights
MEMORY = GpuSpecs(item=2, copy=1e6, flops=1e18)
LIMITS = SchedulerConfig(
    num_blocks=400, max_rows=16, max_model_len=512, max_batched_tokens=64, vocab_size=50
)


def bytes_of(plan: StepPlan) -> float:
    """What a step reads and writes at least, in bytes of 2 a number."""
    rows = plan.rows.size
    # layers, of which the last is for rows; head, logits
    numbers = 1000 + (1000 + 50 * 10 if rows else 0) + 50 * rows
    # each row sees its own new token too
    tokens: list[float] = [int(length) + 1 for length in plan.lengths]
    for group, prefix in enumerate(plan.group_length.tolist()):
        members = range(plan.group_start[group], plan.group_start[group + 1])
        tokens += [-prefix for _ in members] + [prefix]
    tokens += [1 for _ in plan.rows]  # written
    if plan.chunks is not None:
        for chunk, before in enumerate(plan.chunks.context.tolist()):
            size = int(plan.chunks.start[chunk + 1] - plan.chunks.start[chunk])
            tokens += [(before + size) / 2, size]  # the last layer of two only writes them
    return 2 * (numbers + 64 * sum(tokens))


@dataclass
class Clock:
    now: float = 5.0

    def __call__(self) -> float:
        return self.now


class Device:
    """Steps run one after the other, each for `times` its least time. The host's clock moves on
    only while it waits."""

    num_blocks = LIMITS.num_blocks

    def __init__(self, clock: Clock, times: float) -> None:
        self.clock, self.times, self.due = clock, times, 0.0
        self.fake = FakeDevice(LIMITS.num_blocks, LIMITS.max_rows, 32, LIMITS.vocab_size, set())
        self.chunks = 0

    def launch(self, plan: StepPlan) -> Flight:
        self.chunks += plan.chunks is not None
        self.fake.launch(plan)
        self.due = max(self.due, self.clock.now) + self.times * bytes_of(plan) / 1e6
        return Flight(self.fake.results.popleft()[1], self.clock, self.due)

    def counts(self) -> dict[str, int]:
        return {"jit_compiles": 0, "jit_loads": 0}

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing to give back."""


@dataclass
class Flight:
    result: StepTokens
    clock: Clock
    due: float

    def ready(self) -> bool:
        return self.clock.now >= self.due

    def fetch(self) -> StepTokens:
        self.clock.now = max(self.clock.now, self.due)
        return self.result


def engine(clock: Clock, times: float, ahead: int = 1) -> Engine:
    return Engine(
        Scheduler(LIMITS), Device(clock, times), ahead, RooflineGauge(MODEL, MEMORY, clock)
    )


def ask(made: Engine, number: int, prompt: int, n: int, tokens: int) -> None:
    params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, seed=1)
    ids = (np.arange(prompt, dtype=np.int32) + number) % 50
    assert made.submit(Request(request_id=number, prompt=ids.tobytes(), sampling=params)) is None


def run(made: Engine, clock: Clock, host: float = 0.0) -> list[float]:
    """The gauge after each step, the host having been busy for so long beside it."""
    seen = []
    while made.has_work:
        made.step()
        clock.now += host
        seen.append(made.stats()["hardware_limit"])
    return seen


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_it_is_the_least_time_over_the_time_taken(ahead: int) -> None:
    clock = Clock()
    made = engine(clock, 2.0, ahead)
    ask(made, 0, prompt=150, n=4, tokens=120)  # in chunks, then in a prefix group
    ask(made, 1, prompt=3, n=1, tokens=200)  # alone
    began = clock.now
    seen = run(made, clock)
    assert made.runner.chunks > 2 and made.runner.fake.grouped > 300  # type: ignore[attr-defined]
    assert clock.now - began > 3
    assert seen[0] == 0.0 and seen[-1] == 0.0  # nothing is known yet; at rest
    assert {round(value, 6) for value in seen[:-1]} == {0.0, 0.5}
    assert seen.index(0.0, 1) == 1 and seen[-2] > 0


def test_products_count_where_they_take_longer_than_their_weights() -> None:
    machine = GpuSpecs(item=2, copy=1e6, flops=1e6)
    assert machine.layer_seconds(np.array([0.0, 1.0, 100.0]), 1000).tolist() == [0.0, 2e-3, 0.2]
    names = ("own", "shared", "shared_pairs", "chunk", "chunk_pairs", "chunk_context")
    steps = dict.fromkeys(names, np.zeros(1)) | {"rows": np.array([100.0])}
    stored = 100 * (64 + 50) * 2 / 1e6
    assert limit_seconds(steps, MODEL, machine) == pytest.approx(2 * 0.2 + 0.1 + stored)
    pairs = steps | {"chunk_pairs": np.array([1000.0])}
    gained = limit_seconds(pairs, MODEL, machine) - limit_seconds(steps, MODEL, machine)
    # of one layer: the last attends for rows alone
    assert gained == pytest.approx(1000 * 4 * 4 * 8 / 1e6)


def test_experts_are_read_as_far_as_tokens_meet_them() -> None:
    """Four of 64 each: one token reads four, many read all;
    past that their products take longer."""
    names = ("own", "shared", "shared_pairs", "chunk", "chunk_pairs", "chunk_context")
    experts = RoutedNumbers(experts=64, top_k=4, numbers=1000, bytes=500)  # in four bits
    routed, machine = replace(MODEL, routed=((experts, 2),)), GpuSpecs(item=2, copy=1e6, flops=1e9)
    for rows, met in ((0, 0.0), (1, 4.0), (2, 4 + 60 / 16), (10_000, 64.0)):
        steps = dict.fromkeys(names, np.zeros(1)) | {"rows": np.array([float(rows)])}
        gained = limit_seconds(steps, routed, machine) - limit_seconds(steps, MODEL, machine)
        products = 2 * 2 * 4 * 1000 * rows / 1e9
        assert gained == pytest.approx(max(2 * met * 500 / 1e6, products)) and (
            products > gained / 2
        ) is (rows > 2)


def test_each_kind_of_layer_reads_what_it_sees_and_a_token_its_row_of_the_table() -> None:
    near = Attending(layers=3, window=32, numbers=6, read=10)
    whole = Attending(layers=1, window=None, numbers=20, read=70)
    model = ModelSizes(
        layers=4,
        hidden=10,
        vocab=50,
        layer_weights=1000,
        attending=(near, whole),
        stored=80,
        ahead=500,
        row_bytes=9,
    )
    plan, none = _plan(5), np.zeros(0, np.int32)
    plan.lengths[:] = 99
    plan.chunks = Chunks(
        tokens=np.zeros(8, np.int32),
        start=np.array([0, 8], np.int32),
        context=np.array([0], np.int32),
        blocks=none.reshape(1, 0),
        prompt_logprobs=none,
        next_token=none,
    )
    steps = Steps(model.windows)
    steps.note(plan)
    rows, tokens, chunk, below = 5, 13, 8, 3 / 4
    read = 3 * 10 * (rows * 32 + chunk * below) + 70 * (rows * 100 + chunk * below)
    # layers, head, ahead of them
    moved = 2 * (4 * 1000 + 500 + 500) + read + tokens * (80 + 9) + rows * 50 * 2
    assert limit_seconds(
        steps.columns(), model, GpuSpecs(item=2, copy=1.0, flops=1e18)
    ) == pytest.approx(moved)
    slow = limit_seconds(steps.columns(), model, GpuSpecs(item=2, copy=1e18, flops=1.0))
    pairs = chunk * (chunk + 1) / 2 * below * (3 * 6 + 20)
    assert slow == pytest.approx(2 * (tokens * (3000 + 500) + rows * (1000 + 500) + pairs))


@pytest.mark.parametrize(
    ("rows", "own", "groups", "prefix", "ms", "share"),
    [(8192, 96, 8, 656, 43.4, 0.63), (1000, 640, 0, 0, 9.2, 0.75), (1, 640, 0, 0, 0.789, 0.66)],
)
def test_steps_that_an_h200_was_measured_at_stay_below_its_data_sheet(
    rows: int, own: int, groups: int, prefix: int, ms: float, share: float
) -> None:
    """Llama-3.2-1B's shape in bf16; the times are docs/execute.md's."""
    model = alike_sizes(
        layers=16,
        hidden=2048,
        heads=32,
        head_dim=64,
        vocab=128_256,
        layer_weights=60_817_408,
        kv_numbers=16_384,
    )
    copy, flops = DATA_SHEETS["NVIDIA H200"]
    plan = _plan(rows)
    if groups:
        plan.group_start = np.arange(0, rows + 1, rows // groups, dtype=np.int32)
        plan.group_length = np.full(groups, prefix, np.int32)
    plan.lengths[:] = own + (prefix if groups else 0)
    steps = Steps()
    steps.note(plan)
    least = limit_seconds(steps.columns(), model, GpuSpecs(item=2, copy=copy, flops=flops))
    assert 1e3 * least / ms == pytest.approx(share, abs=0.01)


def test_a_chunks_tokens_each_see_what_is_before_them_and_themselves() -> None:
    plan, none = _plan(0), np.zeros(0, np.int32)
    plan.chunks = Chunks(
        tokens=np.zeros(7, np.int32),
        start=np.array([0, 3, 7], np.int32),
        context=np.array([0, 16], np.int32),
        blocks=none.reshape(2, 0),
        prompt_logprobs=none,
        next_token=none,
    )
    steps = Steps()
    steps.note(plan)
    seen = steps.columns()
    assert (seen["chunk"], seen["chunk_context"]) == ([7], [3 + 20])
    assert seen["chunk_pairs"] == [1 + 2 + 3 + 17 + 18 + 19 + 20]


@pytest.mark.parametrize(
    ("tokens", "before", "multiplied"),
    [
        (300, 0, 320 * 45_150),
        (1024, 7168, 131_072 * 7168 + 320 * 7_864_832),
        (100, 9000, 1088 * 905_050),
    ],
)
def test_prompts_over_latent_vectors_multiply_in_the_form_that_is_less(
    tokens: int, before: int, multiplied: float
) -> None:
    """Keys and values made of all that is seen, or what is seen absorbed; of the two layers the
    first attends."""
    plan, none = _plan(0), np.zeros(0, np.int32)
    plan.chunks = Chunks(
        tokens=np.zeros(tokens, np.int32),
        start=np.array([0, tokens], np.int32),
        context=np.array([before], np.int32),
        blocks=none.reshape(1, 0),
        prompt_logprobs=none,
        next_token=none,
    )
    steps = Steps()
    steps.note(plan)
    deepseek = LatentSizes(rank=512, turning=64, still=128, value=128)
    attending = Attending(
        layers=2, window=None, numbers=16 * (576 + 512), read=2 * 576, latent=deepseek
    )
    model = replace(MODEL, layer_weights=0, attending=(attending,))
    least = limit_seconds(steps.columns(), model, GpuSpecs(item=2, copy=1e30, flops=1e12))
    assert least == pytest.approx(2 * 16 * multiplied / 1e12)


def _plan(rows: int) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(
        number=0,
        rows=np.arange(rows, dtype=np.int32),
        lengths=np.full(rows, 7, np.int32),
        wants=0,
        group_start=np.zeros(1, np.int32),
        group_blocks=none.reshape(0, 0),
        group_length=none,
        moves=Moves.none(),
        new_blocks=none.reshape(0, 3),
        joins=None,
        chunks=None,
    )
