"""MeasuredSteps: a table of measured step seconds. It comes from a built engine, or from a file
written by `penstock simulate --measure`. Knows files and numbers; the simulator estimates other
steps from the table.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.artifact.manifest import LARGEST, BuiltOn, StepSeconds, find_manifest
from penstock.disk import read_plain, write_whole
from penstock.errors import CheckpointError

STEPS_SCHEMA = 1


class MeasuredSteps(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Measured seconds of a model's steps on one machine."""

    schema: int = STEPS_SCHEMA
    penstock: str  # version of Penstock
    model: str
    built_on: BuiltOn
    tensor_parallel_size: int = 1  # GPUs of a replica
    steps_ahead: int = 1
    price: float | None = None  # dollars an hour of one GPU; None: unknown
    step_seconds: StepSeconds


def write_steps(path: Path, steps: MeasuredSteps) -> None:
    """Writes a table's file whole or not at all. Raises as `disk.write_whole` does."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(steps), indent=1) + b"\n")


def read_steps(path: Path) -> MeasuredSteps:
    """Returns the table of a built engine's folder or of a file. Raises CheckpointError, one line
    that also says what to do, if there is no table of this version."""
    steps = _of_artifact(path) if path.is_dir() else _of_file(path)
    table = steps.step_seconds
    counts = {
        len(column) for column in (table.rows, table.context, table.prompt_tokens, table.seconds)
    }
    more = {len(column) for column in (table.prompt_length, table.shared, table.members)}
    if len(counts) > 1 or more - counts - {0}:
        raise CheckpointError(
            f"{path}: the columns of its table of steps differ in length: measure it again"
        )
    if table.engine is None:
        made = (
            f"penstock build --retune {path}"
            if path.is_dir()
            else f"penstock simulate --measure MODEL --out {path}"
        )
        has = "a table of an older penstock" if table.rows else "no table of step seconds"
        raise CheckpointError(f"{path} has {has}: make one by {made}")
    return steps


def _of_artifact(folder: Path) -> MeasuredSteps:
    manifest = find_manifest(folder)
    if manifest is None:
        raise CheckpointError(
            f"{folder} is no artifact: penstock build makes one; a file with a table of steps is"
            " --table"
        )
    told = (manifest.engine.get(name, 1) for name in ("tensor_parallel_size", "steps_ahead"))
    ranks, ahead = (number if isinstance(number, int) else 1 for number in told)
    return MeasuredSteps(
        penstock=manifest.penstock,
        model=manifest.model,
        built_on=manifest.built_on,
        tensor_parallel_size=ranks,
        steps_ahead=ahead,
        price=None if manifest.price is None else manifest.price / ranks,
        step_seconds=manifest.step_seconds,
    )


def _of_file(path: Path) -> MeasuredSteps:
    try:
        steps = msgspec.json.decode(read_plain(path, LARGEST), type=MeasuredSteps)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): name an artifact's folder, or a file that"
            " penstock simulate --measure wrote"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no table of step seconds ({error}): measure one anew"
        ) from error
    if steps.schema != STEPS_SCHEMA:
        raise CheckpointError(
            f"{path} is of schema {steps.schema}, and this penstock reads {STEPS_SCHEMA}"
        )
    return steps
