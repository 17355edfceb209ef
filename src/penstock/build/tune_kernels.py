"""Tunes kernel parameters on the model's own layers. A tunable is a kernel parameter, a tile size
for instance. Tunables of decode kernels are timed in a decode step (forward and output head) in a
CUDA graph, at the workload's row counts; tunables of prompt kernels in prompt steps without rows,
without a graph.

One model is loaded. Each candidate value is set in the model's operations, and the step is captured
and replayed, in turn with the default value. Knows a model and step inputs; no rows, no engine. A
device without compiled kernels has nothing to time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.artifact.manifest import Decision, Value
from penstock.build.decide import decide, measure
from penstock.build.model_linears import linears
from penstock.build.trial import give_back
from penstock.build.work_sample import WorkSample
from penstock.config import BLOCK_SIZE, Config
from penstock.execute.kv_cache import KvCache
from penstock.execute.kv_dtype import whole_prompts
from penstock.execute.open_runner import find_device, load_for, settle_kv
from penstock.execute.padding import padded
from penstock.kernels.inputs import DecodeInputs, StateInputs, StepInputs
from penstock.kernels.ops import Ops
from penstock.kernels.tunables import TUNABLES, Tunable, with_values
from penstock.models.decoder import Decoder
from penstock.models.read_config import read_model_config

FULL_ROWS = 1024  # steps of more rows do not depend on decode tunables
REPLAYS = 20
PROMPTS = (64, 128, 256, 512, 1024)  # prompt lengths to time, up to the workload's longest
OF_PROMPTS = "latent_attention"  # the operation whose tunables affect prompt steps
Step = tuple[Tensor, StepInputs]


def tune_kernels(
    config: Config,
    folder: Path,
    works: Sequence[WorkSample],
    deadline: float,
    tell: Callable[[Decision], None],
) -> list[Decision]:
    """Returns a decision for each tunable of this model's kernels; none on a CPU. deadline:
    time.monotonic() at which timing ends. tell: called with each decision."""
    device = find_device(config.model.device)
    if device.type == "cpu":
        return []
    rows = sorted({1, *(padded(min(work.concurrency, FULL_ROWS)) for work in works)})
    context = round(
        statistics.fmean(
            f.prompt_tokens + f.output_tokens / 2 for f in (work.facts() for work in works)
        )
    )
    with torch.inference_mode():
        trial = _Trial(config, folder, rows, context)
        found: list[Decision] = []
        waiting = [each for each in TUNABLES if trial.has(each)]
        for place, tunable in enumerate(waiting):
            end = time.monotonic() + (deadline - time.monotonic()) / (len(waiting) - place)
            candidates: list[Value] = [
                tunable.default,
                *(n for n in tunable.candidates if n != tunable.default),
            ]
            by_value = {value: trial.ready(tunable, value) for value in candidates}
            measured = measure(candidates, partial(_ms_of, by_value), end)
            found.append(decide(tunable.name, candidates, measured, "ms a step", more=False))
            trial.keep(tunable, found[-1].chosen)
            tell(found[-1])
            by_value.clear()
        del trial
    give_back()
    return found


class _Trial:
    """A loaded model and the steps to time, for several row counts. The model's operations can be
    replaced by ones with other tunables."""

    def __init__(self, config: Config, folder: Path, rows: Sequence[int], context: int) -> None:
        model_config = read_model_config(folder)
        context = min(context, model_config.context - 1)
        device = find_device(config.model.device)
        self._model, self._ops = load_for(config, folder, model_config, device, context + 1)
        settle_kv(config, folder, self._model, self._ops)
        each = -(-(context + 1) // BLOCK_SIZE)
        self._kv = KvCache(
            self._model.keepers, max(rows) * each + 2, device, slots=max(rows)
        ).layers
        self._steps = [decode_step(count, context, each, device) for count in rows]
        lengths = [tokens for tokens in PROMPTS if tokens < context] or [context]
        self._prompts = [_prompt_step(tokens, each, device) for tokens in lengths]
        self._own = {linear: linear.product for linear in [*linears(self._model), self._model.head]}

    def has(self, tunable: Tunable) -> bool:
        """Returns True if the model runs the tunable's operation with the Triton kernel."""
        if self._ops.why[tunable.op][0] != "triton":
            return False
        operation = getattr(self._ops, tunable.op)
        if tunable.op in ("attention", OF_PROMPTS):
            return any(
                (kind.latent is not None) == (tunable.op == OF_PROMPTS)
                for kind in self._model.kinds
            )
        return any(
            product is not None and _is(product.multiply, operation)
            for product in self._own.values()
        )

    def ready(self, tunable: Tunable, value: Value) -> list[Callable[[], object]]:
        """Returns functions that launch the steps with this value."""
        ops = self._set(tunable, value)
        if tunable.op == OF_PROMPTS:
            return [partial(_run, self._model, step, self._kv, ops) for step in self._prompts]
        graphs = list[Callable[[], object]]()
        for step in self._steps:
            _run(self._model, step, self._kv, ops)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                _run(self._model, step, self._kv, ops)
            graphs.append(graph.replay)
        self._set(tunable, tunable.default)
        return graphs

    def keep(self, tunable: Tunable, value: Value) -> None:
        """Sets this value for the tunables that are tried later."""
        if value != tunable.default:
            self._ops = self._set(tunable, value)
            self._own = {linear: linear.product for linear in self._own}

    def _set(self, tunable: Tunable, value: Value) -> Ops:
        operation = getattr(self._ops, tunable.op)
        tuned = with_values(tunable.op, "triton", operation, {tunable.name: value})
        for linear, product in self._own.items():
            if product is not None and _is(product.multiply, operation):
                linear.product = replace(product, multiply=tuned)
        changed: dict[str, Any] = {tunable.op: tuned}
        return replace(self._ops, **changed)


def decode_step(rows: int, context: int, each: int, device: torch.device) -> Step:
    """Returns ids [rows] and step inputs of `rows` independent rows, with `context` stored tokens
    each, in `each` blocks."""
    at = torch.full((rows,), context, dtype=torch.int64, device=device)
    table = torch.arange(1, rows * each + 1, dtype=torch.int32, device=device).view(rows, each)
    decode = DecodeInputs(
        rows=torch.arange(rows, dtype=torch.int32, device=device),
        position=at,
        table=table,
        length=at.to(torch.int32),
        skip=torch.zeros(rows, dtype=torch.int32, device=device),
        max_own=context + 1,
        groups=None,
    )
    slots = table[:, context // BLOCK_SIZE].long() * BLOCK_SIZE + context % BLOCK_SIZE
    every = torch.arange(rows, device=device)
    states = StateInputs(every, at.to(torch.int32), decode.skip, every[:0])
    return torch.zeros(rows, dtype=torch.int64, device=device), StepInputs(
        at, slots, rows, decode, None, states=states
    )


def _prompt_step(tokens: int, each: int, device: torch.device) -> Step:
    """Returns ids [tokens] and step inputs of one prompt, in the first of `each` blocks."""
    table = torch.arange(1, each + 1, device=device)[None]
    return torch.zeros(tokens, dtype=torch.int64, device=device), whole_prompts(1, tokens, table)


def _run(model: Decoder, step: Step, kv: list[tuple[Any, ...]], ops: Ops) -> Tensor:
    ids, inputs = step
    hidden = model.forward(ids, replace(inputs, plans={}), kv, ops)
    return model.logits(hidden[: max(1, inputs.rows)])


def _ms_of(steps: dict[Value, list[Callable[[], object]]], value: Value) -> float:
    """Returns the milliseconds of one step of each size, summed."""
    total = 0.0
    for launch in steps[value]:
        launch()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(REPLAYS):
            launch()
        torch.cuda.synchronize()
        total += 1e3 * (time.perf_counter() - begun) / REPLAYS
    return total


def _is(multiply: Callable[..., object], operation: Callable[..., object]) -> bool:
    """Returns True if the function `multiply` is `operation`, possibly as a functools.partial of
    it."""
    return getattr(multiply, "func", multiply) is getattr(operation, "func", operation)
