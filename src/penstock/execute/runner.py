"""TorchRunner: runs step plans on one device. Implements `schedule.step.Runner`.

Joins rows, KV, batch, model and sampler; knows no sequences, no text, no requests. A step needs
only its plan from the host, so several may be launched before one is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import CapacityError, FaultError, PenstockError
from penstock.execute.block_proposer import BlockProposer
from penstock.execute.chain_proposer import ChainProposer
from penstock.execute.device_step import DeviceStep
from penstock.execute.executor import Executor, Outcome
from penstock.execute.gpu_specs import rated
from penstock.execute.kv_cache import KvCache, kv_words
from penstock.execute.layer_pages import LayerPages, pages_of
from penstock.execute.limits import BatchLimits, Limits, graph_bytes
from penstock.execute.ngram_proposer import NgramProposer
from penstock.execute.prompt_scorer import PromptScorer
from penstock.execute.reload import take_weights
from penstock.execute.sampling_mirror import SamplingMirror
from penstock.execute.sleep import RestingWeights, give_back
from penstock.execute.staging_buffer import MappedMasks
from penstock.execute.warm import warm
from penstock.execute.window_tables import WindowTables
from penstock.kernels.binaries import BinaryCounts
from penstock.kernels.choose import choose_rows, widens_fp4, widens_fp8
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.ops import Ops
from penstock.kernels.prefix_cost import prefix_cost_times
from penstock.kernels.row_state import RowState
from penstock.models.decoder import Decoder
from penstock.models.sizes import ModelSizes
from penstock.quant.fp4 import E4m3Scales, in_fp4
from penstock.schedule.group_texts import SLOTS, WIDTH
from penstock.schedule.prefix_groups import SharingCosts
from penstock.schedule.state_slots import first_snapshot
from penstock.schedule.step import KV_CACHE, WEIGHTS, Flight, LateMasks, StepPlan
from penstock.shared_weights import WeightsSource

log = logging.getLogger(__name__)

SLICE_LOGITS_CPU = 1 << 25  # number of logits in memory at once on a CPU; 67 MB in bf16
SLICE_LOGITS_CUDA = 1 << 27
MAX_SLICE = 1024  # most rows whose logits are in memory at once
SLOW_FP8 = "float8 weights are widened for each product here: less memory, and slower than without"
SLOW_FP4 = (
    "weights in four-bit floats are widened for each product here: less memory, and slower than"
    " without"
)


class TorchRunner:
    """A model, its rows and its KV cache on a device. Release it with close()."""

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
        self.max_rows, self.max_queries = limits.max_rows, limits.max_queries
        self.snapshots = range(first_snapshot(limits.max_rows), limits.state_slots)
        self._graph_sizes, self._plain_graphs = limits.graph_sizes, limits.plain_graphs
        self.grouping = grouping  # True if steps may have prefix groups
        self.max_model_len = limits.max_model_len
        self.max_batched_tokens = limits.max_batched_tokens
        self.mask_slots = limits.mask_slots
        self._masks = masks = MappedMasks(device)
        self.vocab_size = config.vocab_size
        self.eos_token_ids = end_ids
        self.sampling_defaults = sampling_defaults
        self.model_sizes = ModelSizes.of(model)
        kind = next((kind for kind in model.kinds if kind.window is None), next(iter(model.kinds)))
        # a latent vector is key and value at once, so attention reads it only once
        read = model.kv_share / (1 if kind.latent is None else 2)
        times = prefix_cost_times(
            ops, kind.heads, kind.kv_heads, kind.width, model.dtype, device, read
        )
        # costs by which the scheduler decides when a prefix group is faster
        self.sharing = SharingCosts(**asdict(times))
        self.ridge_rows = 0 if self.rated is None else self.model_sizes.ridge_rows(self.rated.ridge)
        self._about = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": _device_name(device),
            "kernels": {op: f"{column}: {reason}" for op, (column, reason) in ops.why.items()},
            "kv_cache_dtype": kv_words(model.paged_forms),
            "kv_tokens": limits.kv_tokens,
            "weights_bytes": model.weights_bytes,
        }
        if model.table_in_host:
            self._about["host_bytes"] = model.table_bytes
        if widens_fp4(ops) and in_fp4(model.weights()):
            self._about["slow"] = SLOW_FP4
        elif widens_fp8(ops) and any(
            weight.dtype == E4M3 and not isinstance(weight, E4m3Scales)
            for weight in model.weights()
        ):
            self._about["slow"] = SLOW_FP8
        self.layer_pages = pages_of(model, limits.max_model_len)
        self.kv_pages = limits.num_blocks  # pages of the pool, the scratch block included
        if self.layer_pages is not None:
            self.kv_pages *= 1 + self.layer_pages.tables
            far = limits.kv_tokens * (1 + self.layer_pages.tables)
            self._about["kv_tokens_at_most"] = far  # tokens that fit if all are outside the windows
        places = None if self.layer_pages is None else self.layer_pages.place

        def made() -> DeviceStep:
            kv = KvCache(model.keepers, self.kv_pages + 1, device, places, limits.state_slots)
            return _step(model, ops, limits, end_ids, kv, masks, self.layer_pages)

        self._model, self._made = model, made
        self._state: DeviceStep | None = made()  # None while the engine sleeps
        self._about["kv_bytes"] = self._state.kv.bytes()
        self._resting: RestingWeights | None = None
        self._kv_sleeps = self._closed = False
        self._binaries, self._at_ready = ops.binaries, BinaryCounts(0, 0)
        self.beside: Callable[[WeightsSource], Decoder] | None = (
            None  # function that loads new weights; set by open_share
        )
        self._beside: Decoder | None = None
        self.at_close: Callable[[], object] = lambda: None

    def capture(self, *, agreed: bool = False) -> None:
        """Captures CUDA graphs, on CUDA; then the runner is ready. Call it once before the first
        launch, by Executor.call.

        agreed: True: other ranks capture the same sizes, so none is left out."""
        self._capture(agreed)
        if self._binaries is not None:
            self._at_ready = self._binaries.counts()

    def opened_in(self, seconds: Mapping[str, float]) -> None:
        """Stores the seconds of the start's phases, for `describe`."""
        self._about["start_seconds"] = dict(seconds)

    def watch(self, goes_on: Callable[[], None]) -> None:
        """Registers `goes_on`. The thread that waits for a step calls it now and then while the
        step's layers run, so that a long step is not taken for a hanging one: on a CPU a step of a
        large model may take minutes."""
        before = self._model.blocks_run

        def look() -> None:
            nonlocal before
            if (now := self._model.blocks_run) != before:
                before = now
                goes_on()

        self._executor.watch(look)

    def launch(self, plan: StepPlan) -> Flight:
        """Starts a step and returns at once; takes ownership of the plan's arrays."""
        return self._executor.launch(lambda: self._run(plan))

    def draw(self, late: LateMasks) -> Flight:
        """Launches the draw of the last launched step, a late one; returns at once."""
        return self._executor.launch(lambda: self._end(late))

    def map_masks(self, words: NDArray[np.int32]) -> None:
        """Makes a board of token masks [places, words] readable by the GPU, so that a step's masks
        need no copy by the host. Masks of other boards work too, by copy."""
        self._executor.call(lambda: self._masks.open(words))

    def counts(self) -> dict[str, int]:
        """Returns how many kernels were compiled (`jit_compiles`, launch stubs included) and loaded
        from disk (`jit_loads`) since the runner became ready. All runners of the process count
        together."""
        now = self._at_ready if self._binaries is None else self._binaries.counts()
        names = ("jit_compiles", "jit_loads")
        return {
            name: end - begin for name, begin, end in zip(names, self._at_ready, now, strict=True)
        }

    def update_weights(self, source: WeightsSource) -> None:
        """Replaces the model's weights; no step may be in flight. If it raises (see
        reload.load_beside), the old weights stay."""
        self.load_beside(source)
        self.take_beside()

    def load_beside(self, source: WeightsSource) -> None:
        """Loads weights beside the model's, for `take_beside`. Raises the errors of
        reload.load_beside, and FaultError for unexpected ones; the old weights are not changed."""
        beside = self.beside
        assert beside is not None, "who opens a runner says how weights are loaded"
        try:
            self._beside = self._executor.call(lambda: beside(source))
        except PenstockError:
            raise
        except Exception as error:
            log.exception("weights could not be loaded")
            raise FaultError(
                f"the engine failed at these weights ({type(error).__name__}: {error})"
            ) from error

    def take_beside(self) -> None:
        """Replaces the model's weights by the loaded ones and wakes them up."""
        new, self._beside = self._beside, None
        assert new is not None, "weights are loaded before they are taken"
        self._executor.call(lambda: take_weights(self._model, new, captured=self._captured))
        self._resting = None

    def forget_beside(self) -> None:
        """Drops the weights that `load_beside` loaded."""
        self._beside = None

    @property
    def asleep(self) -> tuple[str, ...]:
        """Returns the parts whose memory is freed: WEIGHTS, KV_CACHE, both or none."""
        return (WEIGHTS,) * (self._resting is not None) + (KV_CACHE,) * self._kv_sleeps

    def sleep(self, level: int) -> None:
        """Frees the memory of KV cache, rows and graphs, and of the weights: level 1 keeps them in
        host memory, 2 drops them. No row may be live."""
        self._executor.call(lambda: self._rest(level))

    def wake_up(self, tags: Collection[str]) -> None:
        """Wakes up the parts named by tags; dropped weights wait for `update_weights`. All other
        memory is allocated once nothing sleeps. Raises CapacityError if there is too little; then
        call it again for the parts still asleep."""
        self._executor.call(lambda: self._wake(tags))

    def describe(self) -> dict[str, Any]:
        return dict(self._about)

    def close(self) -> None:
        """Ends the device's thread and frees weights, KV and rows, for the next runner of this
        process. Waiting flights fail. Idempotent."""
        if not self._closed:
            device = self._model.device
            self._closed = True
            self._executor.close()
            self._masks.close()
            self._state = self._resting = self.beside = self._beside = None
            del self._model, self._made
            if device.type == "cuda":
                give_back(device)
            self.at_close()

    @property
    def _captured(self) -> bool:
        return self._state is not None and self._state.graphs is not None

    def _capture(self, agreed: bool) -> None:
        if (
            self._state is not None
            and self._state.ops.compiled
            and self._state.rows.device.type == "cuda"
        ):
            room = None if agreed else graph_bytes(self._state.rows.device)
            every = not self._plain_graphs
            self._about["graphs"] = self._state.capture(
                self._graph_sizes, self.grouping and every, every, room
            )

    def _rest(self, level: int) -> None:
        if self._model.device.type == "cuda":
            # wait for the last steps, whether read or not
            torch.cuda.synchronize(self._model.device)
        self._state, self._kv_sleeps = None, True
        self._model.handed = {}
        if self._resting is None:
            self._resting = RestingWeights(self._model, level)
        elif level == 2:
            self._resting.drop()
        give_back(self._model.device)

    def _wake(self, tags: Collection[str]) -> None:
        with _named_shortage(self._model.device):
            if WEIGHTS in tags and self._resting is not None and not self._resting.gone:
                self._resting.bring_back()
                self._resting = None
        if KV_CACHE in tags:
            self._kv_sleeps = False
        self._rise()

    def _rise(self) -> None:
        """Allocates the rest of the memory, once nothing sleeps."""
        if self._state is None and not self.asleep:
            try:
                with _named_shortage(self._model.device):
                    self._state = self._made()
                    self._capture(agreed=False)
            except BaseException:
                self._state, self._kv_sleeps = None, True
                raise

    def _run(self, plan: StepPlan) -> Outcome:
        assert self._state is not None
        return self._state.step(plan)

    def _end(self, late: LateMasks) -> Outcome:
        assert self._state is not None
        return self._state.end(late)


def _step(
    model: Decoder,
    ops: Ops,
    limits: BatchLimits,
    end_ids: tuple[int, ...],
    kv: KvCache,
    masks: MappedMasks,
    pages: LayerPages | None,
) -> DeviceStep:
    device, vocabulary = model.device, model.config.vocab_size
    asked, drafts = limits.speculative, limits.most_drafts
    texts = (SLOTS, WIDTH) if limits.group_texts else (0, 0)
    rows = RowState(
        limits.max_rows, limits.max_model_len, end_ids, vocabulary, device, drafts, texts
    )
    slice_logits = SLICE_LOGITS_CUDA if device.type == "cuda" else SLICE_LOGITS_CPU
    # must be equal on all ranks, because they exchange results after each slice
    slice_rows = max(16, min(MAX_SLICE, slice_logits * model.ranks // vocabulary) // 16 * 16)
    scorer, mirror = PromptScorer(model, ops, slice_rows), SamplingMirror(limits.max_rows)
    row_ops, tokens = choose_rows(ops), limits.max_batched_tokens
    windows = None if pages is None else WindowTables(pages, rows, kv.dump_block + 1)
    step = DeviceStep(
        model,
        row_ops,
        rows,
        mirror,
        kv,
        scorer,
        slice_rows,
        tokens,
        limits.mask_slots,
        masks,
        windows,
        limits.max_queries,
    )
    if asked is not None:
        step.draw.proposer = (
            NgramProposer(row_ops, rows, step.staging, kv.slot_token, asked)
            if asked.method == "ngram"
            else (BlockProposer if asked.method == "dflash" else ChainProposer)(
                model, rows, kv, step.staging, step.launches, asked.num_speculative_tokens
            )
        )
    return step


def run_worst_steps(model: Decoder, ops: Ops, limits: BatchLimits, grouping: bool) -> None:
    """Runs the largest steps, to compile kernels and let torch allocate the memory of steps, before
    the KV cache takes the rest of a GPU."""
    if not choose_rows(ops).compiled:
        return
    pages = pages_of(model, limits.max_model_len)
    places = None if pages is None else pages.place
    kv = KvCache(model.keepers, 3, model.device, places, limits.max_rows + 2, shared=True)
    warm(_step(model, ops, limits, (), kv, MappedMasks(model.device), pages), limits, grouping)
    model.handed = {}
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


@contextmanager
def _named_shortage(device: torch.device) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        told = (
            f"there is no memory on {device} to wake up in: end what else took it meanwhile, and"
            " wake it up again"
        )
        raise CapacityError(told) from error


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
