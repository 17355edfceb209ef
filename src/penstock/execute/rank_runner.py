"""RankRunner: one model over several ranks, each a process; this one is rank 0. `schedule.step.Runner` is its contract.

    launch(plan)   its bytes to every other rank, then rank 0's own share; all meet in the layers' sums
    fetch()        rank 0's tokens, which are every rank's

What ranks must agree on is said, never found out twice: limits and sizes of graphs when they start, everything else in
the plan. It knows plans and ranks; no tensors.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.config import Config
from penstock.errors import EngineError, PenstockError, UsageError
from penstock.execute.executor import open_executor
from penstock.execute.limits import Limits, agreed
from penstock.execute.open_runner import find_device, find_dtype, open_share
from penstock.execute.rank_channel import PLANS, RankStart, encode
from penstock.execute.remote_rank import RemoteRank
from penstock.execute.runner import TorchRunner
from penstock.models.build_model import build_model
from penstock.models.read_config import read_model_config
from penstock.parallel.collectives import Collectives
from penstock.parallel.layout import Layout
from penstock.schedule.step import Flight, StepPlan, StepTokens

_SECONDS = 30.0  # that a rank waits for another in the middle of a step
_REASON = 1.0  # that rank 0 waits for another's last word, where its own share has failed


class RankRunner(TorchRunner):
    """Rank 0's runner, and the other ranks. threads: torch's, to be given back."""

    def __init__(self, others: list[RemoteRank], threads: int, *share: Any) -> None:
        super().__init__(*share)
        self.others, self._threads = others, threads

    def launch(self, plan: StepPlan) -> Flight:
        """Starts a step on all ranks and returns at once. The plan's arrays are the runner's from now on."""
        data = PLANS.encode(plan)
        for other in self.others:
            other.send(data)
        try:
            own = super().launch(plan)
        except EngineError as error:
            raise self.reason(error) from error
        return RankFlight(plan.number, own, self)

    def counts(self) -> dict[str, int]:
        """Those of all ranks together."""
        theirs = [other.counts for other in self.others]
        return {name: own + sum(each.get(name, 0) for each in theirs) for name, own in super().counts().items()}

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"ranks": len(self.others) + 1}

    def close(self) -> None:
        """Ends the other ranks' processes and lets go of this one's share. Flights that wait fail. Twice is once."""
        if self._state is not None:
            _close(self.others)
            super().close()
            torch.set_num_threads(self._threads)

    def reason(self, error: EngineError) -> PenstockError:
        """Returns what is told of a share that failed: the end of another rank, where there is one."""
        ended = [other for other in self.others if other.wait(_REASON / len(self.others))]
        # A rank that died without a word is the cause; the words of others may be what they saw of it.
        told = sorted((other.failure() for other in ended), key=lambda failure: "lost the others" in str(failure))
        return told[0] if told else error


@dataclass(slots=True)
class RankFlight:
    """A step on all ranks. Serves as schedule.step.Flight."""

    number: int
    own: Flight
    runner: RankRunner
    tokens: StepTokens | None = None

    def ready(self) -> bool:
        return self.own.ready()

    def fetch(self) -> StepTokens:
        if self.tokens is None:
            try:
                tokens = self.own.fetch()
            except EngineError as error:
                raise self.runner.reason(error) from error
            for other in self.runner.others:
                other.compare(self.number, tokens)
            self.tokens = tokens
        return self.tokens


def open_ranks(config: Config, folder: Path, ranks: int, seconds: float = _SECONDS) -> RankRunner:
    """Starts the other ranks' processes; each loads its share of `folder`'s model, as does this one, rank 0.

    seconds: the longest that a rank waits for another in a step. Raises what any rank raises, before anything is left
    behind.
    """
    device = find_device(config.model.device)
    if device.type != "cpu":
        raise UsageError("several ranks add up their tensors on the CPU alone as yet: --device cpu", param="device")
    threads = torch.get_num_threads()
    dtype = str(find_dtype(config.model.dtype, device)).removeprefix("torch.")
    knobs = config.told() | {"device": "cpu", "dtype": dtype}
    # What cannot be divided is refused before anything is started.
    build_model(read_model_config(folder), torch.float32, torch.device("meta"), 1, Layout(0, ranks))
    executor, others = open_executor(device), list[RemoteRank]()
    with tempfile.TemporaryDirectory(prefix="penstock-") as private:
        meeting = Path(private) / "meeting"
        start = RankStart(0, ranks, str(folder), knobs, str(meeting), max(1, threads // ranks), seconds)
        collectives = Collectives(meeting, 0, ranks, seconds)

        def agree(own: Limits) -> Limits:
            found = agreed([own, *(other.limits() for other in others)])
            for other in others:
                other.send(encode(found))
            collectives.connect()
            return found

        def opened() -> TorchRunner:
            torch.set_num_threads(start.threads)
            layout = Layout(0, ranks, collectives.all_reduce)
            return open_share(Config.of(**knobs), folder, device, executor, layout, agree, make)

        make = partial(RankRunner, others, threads)
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
    return runner


def _close(others: list[RemoteRank]) -> None:
    for other in others:
        other.hang_up()
    for other in others:
        other.close()
