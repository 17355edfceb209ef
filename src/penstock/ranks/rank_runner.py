"""RankRunner: runs one model over several ranks. Each rank has its own process; this process is
rank 0. Implements `schedule.step.Runner`.

    launch(plan)   sends the plan to every other rank, then runs rank 0's share; all meet in the
                   layers' collectives
    fetch()        rank 0's tokens, the same on every rank

Values that must be equal on all ranks are sent, not computed by each: limits and graph sizes at
start, all others in the plan. Knows plans and ranks; no tensors.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.config import Config
from penstock.errors import EngineError, PenstockError, UsageError
from penstock.execute.cpu_threads import settle_threads
from penstock.execute.executor import StreamExecutor, open_executor
from penstock.execute.first_step import StartClock
from penstock.execute.limits import Limits, agreed
from penstock.execute.open_runner import end_start, find_device, find_dtype, open_runner, open_share
from penstock.execute.runner import TorchRunner
from penstock.models.build_model import build_model
from penstock.models.read_config import read_model_config
from penstock.parallel.collectives import Collectives
from penstock.parallel.layout import Layout
from penstock.quant.choose import choose_schemes
from penstock.ranks.open_collectives import open_collectives
from penstock.ranks.rank_channel import (
    LATE_MASKS,
    PLANS,
    RankOrder,
    RankStart,
    encode,
    encode_order,
)
from penstock.ranks.rank_gpus import check_own_gpu, check_visible_gpus
from penstock.ranks.remote_rank import RemoteRank
from penstock.schedule.step import Flight, LateMasks, StepPlan, StepTokens
from penstock.shared_weights import WeightsSource
from penstock.weights.drafter import drafter_of

_SECONDS = 30.0  # seconds a rank waits for another within a step
_TELLING = 0.3  # seconds that a step gets to end by itself after another rank has gone
_LOOK = 5e-5
_REASON = 1.0  # seconds to wait for another rank's error when this rank's share fails


class RankRunner(TorchRunner):
    """Rank 0's runner, which also drives the other ranks. threads: torch's number of threads
    before, restored at close. seconds: timeout of a step."""

    def __init__(
        self,
        others: list[RemoteRank],
        collectives: Collectives,
        threads: int,
        seconds: float,
        *share: Any,
    ) -> None:
        super().__init__(*share)
        self.others, self.collectives, self._threads, self._seconds = (
            others,
            collectives,
            threads,
            seconds,
        )
        self._number = -1  # number of the last launched step

    def launch(self, plan: StepPlan) -> Flight:
        """Starts a step on all ranks and returns at once; takes ownership of the plan's arrays."""
        self._number = plan.number
        own = self._on_all(PLANS.encode(plan), lambda: super(RankRunner, self).launch(plan))
        return own if plan.draws_late else RankFlight(plan.number, own, self)

    def draw(self, late: LateMasks) -> Flight:
        """Launches, on all ranks, the draw of the last launched step, a late one;
        returns at once."""
        here = np.arange(late.places.size, dtype=np.int32)
        sent = replace(late, words=late.words.take(late.places, axis=0), places=here)
        own = self._on_all(LATE_MASKS.encode(sent), lambda: super(RankRunner, self).draw(late))
        return RankFlight(self._number, own, self)

    def _on_all(self, data: bytes | bytearray, own: Callable[[], Flight]) -> Flight:
        for other in self.others:
            other.send(data)
        try:
            return own()
        except EngineError as error:
            raise self.reason(error) from error

    def update_weights(self, source: WeightsSource) -> None:
        """Has each rank load its part of new weights; once all have, each swaps it in. Raises
        execute.reload's errors, of any rank; then the old weights stay."""
        self._order(RankOrder.load(source))
        refused: list[PenstockError] = []
        try:
            self.load_beside(source)
        except PenstockError as error:
            refused.append(error)
        refused += self._done()
        self._order(RankOrder("forget" if refused else "take"))
        if refused:
            self.forget_beside()
        else:
            self.take_beside()
        refused += self._done()
        if refused:
            raise refused[0]

    def sleep(self, level: int) -> None:
        """Raises UsageError: sleep is not supported over several ranks."""
        rule = (
            "memory is given back where one GPU holds the model: where several ranks do make a new"
            " engine"
        )
        raise UsageError(rule, param="tensor_parallel_size")

    def _order(self, order: RankOrder) -> None:
        for other in self.others:
            other.send(encode_order(order))

    def _done(self) -> list[PenstockError]:
        """Waits for all ranks; returns the errors of ranks that refused the order."""
        return [error for other in self.others if (error := other.done()) is not None]

    @property
    def rows_on_gpu(self) -> bool:
        """True if steps run on a GPU, where reading a step polls a CUDA event. On the CPU a share
        fails by itself if another rank does not take part."""
        return isinstance(self._executor, StreamExecutor)

    def counts(self) -> dict[str, int]:
        """Returns the sum of all ranks' counts, by name."""
        theirs = [other.counts for other in self.others]
        return {
            name: own + sum(each.get(name, 0) for each in theirs)
            for name, own in super().counts().items()
        }

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "ranks": len(self.others) + 1,
            "all_reduce": self.collectives.describe(),
        }

    def close(self) -> None:
        """Ends the other ranks' processes and closes this rank's share. Waiting flights fail.
        Idempotent."""
        if not self._closed:
            _close(self.others)
            self.collectives.abort()
            super().close()
            self.collectives.close()
            torch.set_num_threads(self._threads)

    def wait(self, own: Flight) -> None:
        """Waits until rank 0's share of a step is done. Raises EngineError if another rank ends
        meanwhile, or after the timeout: a GPU may be in an all-reduce that never ends."""
        begun = time.monotonic()
        while not own.ready():
            waited = time.monotonic() - begun
            if waited > self._seconds or (
                waited > _TELLING and any(other.silent for other in self.others)
            ):
                self.collectives.abort()
                raise EngineError(
                    f"rank 0 lost the others: a step was not done after {waited:.1f} s"
                )
            time.sleep(_LOOK)

    def reason(self, error: EngineError, seconds: float = _REASON) -> PenstockError:
        """Returns the error to raise for a failed share: another rank's, if one ends within
        `seconds`, else `error`."""
        ended = [other for other in self.others if other.wait(seconds / len(self.others))]
        # Prefer the error of a rank that died without a message: it is the cause; others only
        # report its loss.
        told = sorted(
            (other.failure() for other in ended),
            key=lambda failure: "lost the others" in str(failure),
        )
        return told[0] if told else error


@dataclass(slots=True)
class RankFlight:
    """A step launched on all ranks. Implements schedule.step.Flight."""

    number: int
    own: Flight
    runner: RankRunner
    tokens: StepTokens | None = None

    def ready(self) -> bool:
        return self.own.ready()

    def fetch(self) -> StepTokens:
        if self.tokens is None:
            try:
                if self.runner.rows_on_gpu:
                    self.runner.wait(self.own)
                tokens = self.own.fetch()
            except EngineError as error:
                raise self.runner.reason(error) from error
            try:
                self.runner.collectives.check()
            except (
                EngineError
                # the GPU has already waited for the other ranks, so it is known which have ended
            ) as error:
                raise self.runner.reason(error, seconds=0.0) from error
            for other in self.runner.others:
                other.compare(self.number, tokens)
            self.tokens = tokens
        return self.tokens


def open_parallel(config: Config, folder: Path) -> TorchRunner:
    """Opens the model in `folder` over the config's number of ranks: `open_runner` for one, else
    `open_ranks`."""
    ranks = config.parallel.tensor_parallel_size
    return open_runner(config, folder) if ranks == 1 else open_ranks(config, folder, ranks)


def open_ranks(config: Config, folder: Path, ranks: int, seconds: float = _SECONDS) -> RankRunner:
    """Starts the other ranks' processes; each loads its share of the model in `folder`, as does
    this one, rank 0.

    seconds: timeout of a rank waiting for another in a step. Raises any rank's errors, after
    cleaning up.
    """
    device = find_device(config.model.device, 0)
    settle_threads(device)
    threads = torch.get_num_threads()
    dtype = find_dtype(config.model.dtype, device)
    knobs = config.told() | {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    # refuse a model that cannot be divided before starting processes
    model_config = read_model_config(folder)
    schemes = choose_schemes(config.model.quantization, model_config.quantization)
    meta, share = torch.device("meta"), Layout(0, ranks)
    drafter = drafter_of(config, model_config)
    build_model(model_config, dtype, meta, 1, share, schemes, drafter=drafter)
    if device.type == "cuda":
        check_visible_gpus(ranks)
        check_own_gpu(device, config.memory.gpu_memory_utilization)
    executor, others, clock = open_executor(device), list[RemoteRank](), StartClock()
    with tempfile.TemporaryDirectory(prefix="penstock-") as private:
        meeting = Path(private) / "meeting"
        start = RankStart(
            0,
            ranks,
            str(folder),
            knobs,
            str(meeting),
            max(1, threads // ranks),
            seconds,
            config.tuned,
            config.kv_scales,
            config.end_of_text,
        )
        collectives = open_collectives(meeting, 0, ranks, seconds, device)

        def agree(own: Limits) -> Limits:
            found = agreed([own, *(other.limits() for other in others)])
            clock.end("waiting for other ranks")
            for other in others:
                other.send(encode(found))
            collectives.connect()
            clock.end("meeting")
            return found

        def opened() -> TorchRunner:
            torch.set_num_threads(start.threads)
            layout = Layout(0, ranks, collectives.all_reduce, collectives.all_gather)
            met = collectives.check
            runner = open_share(
                start.config(), folder, device, executor, layout, agree, make, met, clock
            )
            collectives.ready()
            return runner

        make = partial(RankRunner, others, collectives, threads, seconds)
        try:
            for rank in range(1, ranks):
                others.append(RemoteRank(msgspec.structs.replace(start, rank=rank)))
            runner = executor.call(opened)
        except BaseException:
            _close(others)
            executor.close()
            torch.set_num_threads(threads)
            raise
    assert isinstance(runner, RankRunner)
    end_start(runner, clock)
    print(f"penstock: {ranks} ranks are ready: {clock}", file=sys.stderr)
    return runner


def _close(others: list[RemoteRank]) -> None:
    for other in others:
        other.hang_up()
    for other in others:
        other.close()
