"""Several ranks as threads of a test's process, over gloo: each gets every plan as bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock.execute.runner import TorchRunner
from penstock.parallel.collectives import Gloo
from penstock.ranks.rank_channel import LATE_MASKS, PLANS
from penstock.schedule.step import Flight, LateMasks, StepPlan, StepTokens


def met(folder: Path, ranks: int) -> list[Gloo]:
    ends = [Gloo(folder / f"meeting{ranks}", rank, ranks, 20.0) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(Gloo.connect, ends))
    return ends


@dataclass
class Together:
    """Ranks as threads."""

    runners: list[TorchRunner]

    def __post_init__(self) -> None:
        self.num_blocks = self.runners[0].num_blocks

    def launch(self, plan: StepPlan) -> Flight:
        data = PLANS.encode(plan)
        return AllFlights([runner.launch(PLANS.decode(data)) for runner in self.runners])

    def draw(self, late: LateMasks) -> Flight:
        data = LATE_MASKS.encode(late)
        return AllFlights([runner.draw(LATE_MASKS.decode(data)) for runner in self.runners])


@dataclass
class AllFlights:
    flights: list[Flight]

    def ready(self) -> bool:
        return all(flight.ready() for flight in self.flights)

    def fetch(self) -> StepTokens:
        first, *others = [flight.fetch() for flight in self.flights]
        assert all((first.tokens == other.tokens).all() for other in others), (
            "ranks drew different tokens"
        )
        return first
