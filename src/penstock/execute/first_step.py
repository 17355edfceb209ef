"""First step of an engine, run before it reports ready. On every rank it prefills a prompt and
draws a token. Knows a runner and plans of its own; no scheduler, no requests.
"""

from __future__ import annotations

import time

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.errors import CheckpointError, EngineError
from penstock.execute.runner import TorchRunner
from penstock.schedule.step import BAD_LOGITS, JOIN_RECORD, Chunks, Int32, Joins, plain_step

_NOTHING = np.zeros(0, np.int32)


class StartClock:
    """Seconds of an engine's start, by phase. A phase ends where the next one begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def end(self, phase: str) -> None:
        """Ends this phase: it gets the seconds since the phase before it ended."""
        now = time.monotonic()
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + now - self._began, 2)
        self._began = now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())


def take_first_step(runner: TorchRunner) -> None:
    """Prefills a prompt in block 1 and draws one token of row 0, which then ends; row and block are
    free afterwards. Raises a step's errors, and CheckpointError if the logits were not finite."""
    length = max(0, min(BLOCK_SIZE - 2, runner.max_model_len - 2, runner.max_batched_tokens))
    blocks = np.ones((1, 1), np.int32)
    # Ranks compare tokens by step number; these are below the engine's own step numbers.
    chunk = _chunk(length, runner.vocab_size, blocks) if length else None
    prompt = runner.launch(plain_step(-2, _NOTHING, _NOTHING, chunks=chunk))
    rows, lengths = np.zeros(1, np.int32), np.full(1, length, np.int32)
    drawn = runner.launch(
        plain_step(-1, rows, lengths, joins=lasting_rows(blocks, length, limit=length + 2))
    )
    prompt.fetch()
    token = int(drawn.fetch().tokens[0])
    if token == BAD_LOGITS:
        raise CheckpointError(
            "the model's first step gave logits that are not finite: try another dtype; where none"
            " helps, its weights have NaN or inf"
        )
    if not 0 <= token < runner.vocab_size:
        raise EngineError(f"the first step drew {token}, which is no token: start the engine anew")


def lasting_rows(blocks: Int32, length: int | Int32, **columns: float) -> Joins:
    """Returns joining rows that never end. blocks: block tables [rows, width]. length: tokens
    stored for each. columns: fields of JOIN_RECORD with other values than plain sampling has."""
    rows = len(blocks)
    records = np.zeros(rows, JOIN_RECORD)
    for name in ("row", "sample", "last_token", "seed"):
        records[name] = np.arange(rows)
    records["length"], records["limit"] = length, length + 10_000
    records["prompt_length"] = records["min_length"] = length + 1
    records["temperature"] = records["top_p"] = records["repetition"] = 1.0
    records["ignore_eos"], records["stop_ids"], records["logprobs"] = 1, -1, -1
    for name, value in columns.items():
        records[name] = value
    return Joins(records, blocks, np.zeros(rows + 1, np.int32), _NOTHING, np.zeros(0, np.float32))


def _chunk(length: int, vocabulary: int, blocks: Int32) -> Chunks:
    return Chunks(
        tokens=np.arange(length, dtype=np.int32) % vocabulary,
        start=np.array([0, length], np.int32),
        context=np.zeros(1, np.int32),
        blocks=blocks,
        prompt_logprobs=np.full(1, -1, np.int32),
        next_token=np.full(length, -1, np.int32),
        slots=np.zeros(1, np.int32),
    )
