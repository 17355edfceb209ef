"""TorchRunner: runs step plans on one device, in the order of their launch. `schedule.step.Runner` is its contract.

It joins rows, KV, batch, model and sampler; it knows no sequences, no text, no requests. A step asks nothing of the
host but its plan, so several may be launched before one is read.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from penstock.execute.asked import Asked
from penstock.execute.batch import build_batch
from penstock.execute.device_rows import DeviceRows
from penstock.execute.device_step import DeviceStep
from penstock.execute.executor import Executor, Outcome, StepFlight
from penstock.execute.gpu_specs import rated
from penstock.execute.kv_cache import KvCache
from penstock.execute.limits import BatchLimits, Limits
from penstock.execute.sampler import Sampler
from penstock.execute.warm import warm
from penstock.kernels.choose import choose_rows
from penstock.kernels.ops import Ops
from penstock.kernels.prefix_cost import prefix_cost_times
from penstock.models.decoder import Decoder
from penstock.models.sizes import ModelSizes
from penstock.schedule.prefix_groups import SharingCosts
from penstock.schedule.step import BAD_LOGITS, StepPlan, StepTokens

SLICE_LOGITS_CPU = 1 << 25  # logits at once: 67 MB in bf16
SLICE_LOGITS_CUDA = 1 << 27


class TorchRunner:
    """A model, its rows and its KV on a device. Give it back with close()."""

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        limits: Limits,
        end_ids: tuple[int, ...],
        sampling_defaults: dict[str, float | int],
        executor: Executor,
        grouping: bool = True,
    ) -> None:
        self._executor = executor
        config, device = model.config, model.device
        self.rated = rated(device, model.dtype)
        self.num_blocks = limits.num_blocks
        self.max_rows = limits.max_rows
        self.grouping = grouping  # whether steps may have prefix groups
        self.max_model_len = limits.max_model_len
        self.max_batched_tokens = limits.max_batched_tokens
        self.vocab_size = config.vocab_size
        self.eos_token_ids = end_ids
        self.sampling_defaults = sampling_defaults
        self.model_sizes = ModelSizes.of(model)
        kind = next((kind for kind in model.kinds if kind.window is None), next(iter(model.kinds)))
        times = prefix_cost_times(ops, kind.heads, kind.kv_heads, kind.width, model.dtype, device)
        self.sharing = SharingCosts(**asdict(times))  # when a prefix group pays
        self._about = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": _device_name(device),
            "kernels": {op: f"{column}: {reason}" for op, (column, reason) in ops.why.items()},
            "kv_tokens": limits.kv_tokens,
            "weights_bytes": model.weights_bytes,
        }
        kv = KvCache(model.kv_shapes(limits.num_blocks + 1), model.dtype, device, ops)
        self._about["kv_bytes"] = kv.bytes()
        self._state: _State | DeviceStep | None = _state(model, ops, limits, end_ids, kv)

    def capture(self) -> None:
        """On CUDA, once, before the first launch, in an executor's call: captures the steps that graphs are for."""
        if isinstance(self._state, DeviceStep) and self._state.rows.device.type == "cuda":
            self._about["graphs"] = self._state.capture(self.grouping)

    def launch(self, plan: StepPlan) -> StepFlight:
        """Starts a step and returns at once. The plan's arrays are the runner's from now on."""
        return self._executor.launch(lambda: self._run(plan), self._look)

    def describe(self) -> dict[str, Any]:
        return dict(self._about)

    def close(self) -> None:
        """Ends the device's thread and lets go of weights, KV and rows. Flights that wait fail. Twice is once."""
        if self._state is not None:
            self._executor.close()
            self._state = None

    def _look(self, tokens: StepTokens) -> None:
        if self._state is not None and (tokens.tokens == BAD_LOGITS).any():
            self._state.kv.poisoned = True

    def _run(self, plan: StepPlan) -> Outcome:
        assert self._state is not None
        return self._state.step(plan)


def _state(model: Decoder, ops: Ops, limits: BatchLimits, end_ids: tuple[int, ...], kv: KvCache) -> _State | DeviceStep:
    device = model.device
    rows = DeviceRows(limits.max_rows, limits.max_model_len, end_ids, model.config.vocab_size, device)
    slice_logits = SLICE_LOGITS_CUDA if device.type == "cuda" else SLICE_LOGITS_CPU
    sampler = Sampler(model, ops, rows, kv.slot_token, slice_logits)
    asked, row_ops = Asked(limits.max_rows), choose_rows(ops)
    if row_ops is None:
        return _State(model, rows, asked, kv, sampler)
    return DeviceStep(model, row_ops, rows, asked, kv, sampler, limits.max_batched_tokens)


def run_worst_steps(model: Decoder, ops: Ops, limits: BatchLimits, grouping: bool) -> None:
    """Before the KV cache takes what is left of a GPU: compiles kernels, and lets torch take what steps need."""
    if choose_rows(ops) is None:
        return
    kv = KvCache(model.kv_shapes(3), model.dtype, model.device, ops)
    state = _state(model, ops, limits, (), kv)
    assert isinstance(state, DeviceStep)
    warm(state, limits, grouping)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


class _State:
    """What a step changes, and the order in which it does."""

    def __init__(self, model: Decoder, rows: DeviceRows, asked: Asked, kv: KvCache, sampler: Sampler) -> None:
        self.model, self.rows, self.asked, self.kv, self.sampler = model, rows, asked, kv, sampler

    def step(self, plan: StepPlan) -> Outcome:
        """The order is schedule.step's."""
        self.kv.clear_handed_out(plan)
        if plan.copies.size:
            self.kv.copy(plan.copies)
        if plan.joins is not None and plan.joins.rows.size:
            self.rows.join(plan.joins)
            self.asked.join(plan.joins)
        if plan.new_blocks.size:
            self.rows.grow(plan.new_blocks)
        batch = build_batch(plan, self.rows, self.kv.dump_block)
        if not batch.token_ids.shape[0]:
            return Outcome(torch.empty(0, dtype=torch.int32))
        self.kv.store_tokens(batch.inputs.slots, batch.token_ids)
        hidden = self.model.forward(batch.token_ids, batch.inputs, self.kv.layers)
        count = plan.rows.size
        outcome = Outcome(torch.empty(0, dtype=torch.int32))
        if count:
            drawn, outcome.logprobs = self.sampler.draw(hidden[:count], plan, batch, self.asked)
            outcome.tokens = self.rows.advance(batch.rows, batch.length, batch.done, drawn)
        if plan.chunks is not None:
            outcome.prompt_logprobs = self.sampler.prompt_logprobs(hidden[count:], plan.chunks)
        return outcome


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
