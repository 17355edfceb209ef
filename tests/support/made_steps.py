"""A table of steps as a machine would measure it whose steps take exactly what `step_seconds` says.
It knows tables; no simulator."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.artifact.manifest import USUAL_PROMPT, BuiltOn, StepSeconds, TimedEngine
from penstock.artifact.step_file import MeasuredSteps, write_steps
from penstock.schedule.prefix_groups import SharingCosts

BASE, ROW, TOKEN, PROMPT, PAIR = 1e-3, 1e-5, 1e-8, 5e-6, 1e-9
MEMBER, SHARED = 2e-7, 1e-9
ROWS, CONTEXTS, LENGTH = (1, 4, 16, 64), (64, 512, 1900), USUAL_PROMPT


def step_seconds(rows: int, context: float = 0.0, prompts: int = 0, pairs: float = 0.0) -> float:
    """Seconds of a step: `context` is the mean of its rows; pairs of prompt tokens, beyond those of
    LENGTH."""
    whole = BASE + rows * (ROW + TOKEN * context)
    return (
        whole
        + prompts * PROMPT
        + PAIR * (pairs - prompts * (min(LENGTH, prompts or 1) + 1) / 2 if prompts else 0)
    )


def made_table(*, groups: bool = True, **engine: Any) -> StepSeconds:
    """engine: of TimedEngine, other than usual."""
    entries = [
        ((rows, context, 0, 0, 0, 0), step_seconds(rows, context))
        for rows in ROWS
        for context in CONTEXTS
    ]
    for rows in (0, *ROWS):
        for prompts in (1, 128, 512 - rows):
            took = step_seconds(rows, 64.0, prompts, prompts * (min(LENGTH, prompts) + 1) / 2)
            entries.append(((rows, 64 if rows else 0, prompts, min(LENGTH, prompts), 0, 0), took))
    entries.append(((0, 0, 512, 512, 0, 0), step_seconds(0, 0, 512, 512 * 513 / 2)))
    for shared in (256, 1024) if groups else ():
        for members in (2, 8, 64):
            took = step_seconds(64, 64) + 64 * (MEMBER + SHARED * shared)
            entries.append(((64, 64, 0, 0, shared, members), took))
    columns = [list(column) for column in zip(*(entry for entry, _ in entries), strict=True)]
    rows, context, prompts, length, shared_tokens, members_ = columns
    held = {
        "num_blocks": 4096,
        "max_rows": 64,
        "max_model_len": 2048,
        "max_batched_tokens": 512,
        "grouping": groups,
        "sharing": asdict(SharingCosts()),
        **engine,
    }
    return StepSeconds(
        rows=rows,
        context=context,
        prompt_tokens=prompts,
        prompt_length=length,
        shared=shared_tokens,
        members=members_,
        seconds=[took for _, took in entries],
        engine=TimedEngine(**held),
    )


def made_steps(table: StepSeconds | None = None, **told: Any) -> MeasuredSteps:
    """told: of MeasuredSteps, other than usual."""
    machine = BuiltOn(device="a made device", memory_bytes=1, processor="none", torch="2.11")
    usual: dict[str, Any] = {"penstock": "0.1.0", "model": "made", "built_on": machine}
    return MeasuredSteps(**{**usual, "step_seconds": table or made_table(), **told})


def made_file(folder: Path, name: str = "steps.json", **told: Any) -> Path:
    """Writes a table's file."""
    write_steps(folder / name, made_steps(**told))
    return folder / name
