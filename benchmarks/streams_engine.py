"""The engine's process of streams.py: real loop, scheduler and channel over a runner without a
model.

The runner keeps a pace: step k is ready 1 / rate seconds after step k - 1, and each of its rows
draws token k modulo the number of tokens. The time at which a step became ready is written to a
file that the benchmark reads, so that any event can be matched with its step. Knows the engine; no
server, no text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from penstock.config import Config
from penstock.engine.build_engine import EngineFacts
from penstock.engine.engine import Engine
from penstock.engine.process import main
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import StepPlan, StepTokens

MAX_STEPS = 1_000_000


class Pace(msgspec.Struct):
    """The runner's pace. rate: steps a second. rows: rows that run at once. longest: tokens of a
    sequence. words: the token ids, drawn in turn. log: a file of MAX_STEPS float64, seconds of the
    monotonic clock by step.
    """

    rate: float
    rows: int
    longest: int
    vocab_size: int
    words: list[int]
    log: str


class PacedFlight:
    """A step that becomes ready at its time."""

    def __init__(self, runner: PacedRunner, number: int, rows: int, due: float) -> None:
        self._runner, self._number, self._rows, self._due = runner, number, rows, due

    def ready(self) -> bool:
        return time.monotonic() >= self._due

    def fetch(self) -> StepTokens:
        time.sleep(max(0.0, self._due - time.monotonic()))
        words = self._runner.words
        tokens = np.full(self._rows, words[self._number % len(words)], np.int32)
        self._runner.log[self._number] = time.monotonic()
        return StepTokens(tokens)


class PacedRunner:
    """A device that is always as fast as its pace."""

    def __init__(self, pace: Pace) -> None:
        self.num_blocks = pace.rows * (pace.longest // 16 + 2) + 1
        self.words = pace.words
        self.log = np.memmap(pace.log, np.float64, "r+", shape=(MAX_STEPS,))
        self._period, self._due = 1.0 / pace.rate, 0.0

    def launch(self, plan: StepPlan) -> PacedFlight:
        now = time.monotonic()
        # A host that is late by less than a step catches up, as a device that was launched ahead
        # does.
        self._due = (
            self._due + self._period if self._due > now - self._period else now + self._period
        )
        return PacedFlight(self, plan.number, plan.rows.size, self._due)

    def watch(self, goes_on: Callable[[], None]) -> None:
        """Ignores `goes_on`: a step computes no layers between which it could be called."""

    def counts(self) -> dict[str, int]:
        return {"jit_compiles": 0, "jit_loads": 0}

    def close(self) -> None:
        self.log.flush()


def open_paced(config: Config) -> tuple[Engine, EngineFacts]:
    """Opens an engine with the pace in pace.json, beside the tokenizer."""
    folder = Path(config.model.model)
    pace = msgspec.json.decode((folder / "pace.json").read_bytes(), type=Pace)
    runner = PacedRunner(pace)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=runner.num_blocks,
            max_rows=pace.rows,
            max_model_len=pace.longest,
            max_batched_tokens=max(16_384, 2 * pace.rows),
            vocab_size=pace.vocab_size,
        )
    )
    facts = EngineFacts(
        model=config.model.model,
        folder=str(folder),
        max_model_len=pace.longest,
        max_num_seqs=pace.rows,
        vocab_size=pace.vocab_size,
        eos_token_ids=(),
    )
    return Engine(scheduler, runner, config.schedule.steps_ahead), facts


if __name__ == "__main__":
    sys.exit(main(open_paced))
