"""Readings of the GPUs' power and use, beside a run's samples. They lie in the metadata of the
samples' Parquet file, so that the record's checksum covers them, and files without them stay valid.
Knows readings and windows; not who read them (bench).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from penstock.almanac.parse_record import faults_in_a_line
from penstock.almanac.record import BoardPower, Interval
from penstock.almanac.summaries import short
from penstock.almanac.throughput import RateWindow
from penstock.disk import open_plain
from penstock.errors import RecordError

KEY = b"penstock-board"
LARGEST = 16 << 20  # bytes of all readings
FEWEST = 3  # least readings in a window, for a mean


class Reading(NamedTuple):
    """One reading: its load level and server start, the seconds since the load level began, the
    power of all boards together, and the mean share of the time in which kernels ran."""

    point: Annotated[str, Field(max_length=120)]
    start: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(allow_inf_nan=False)]
    watts: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
    busy: Annotated[float, Field(ge=0, le=1)]


_READINGS = TypeAdapter(list[Reading])


def encoded(readings: Sequence[Reading]) -> dict[bytes, bytes]:
    """Returns the metadata that holds the readings; empty without any."""
    return {KEY: json.dumps(readings, separators=(",", ":")).encode()} if readings else {}


def read_board(path: Path) -> list[Reading]:
    """Reads the readings in a Parquet file of samples; empty where it has none. Raises RecordError
    for others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_plain(path) as file:
            told = (pq.ParquetFile(file).schema_arrow.metadata or {}).get(KEY, b"[]")
        if len(told) > LARGEST:
            raise RecordError(f"{path.name}: readings of power take over {LARGEST} bytes")
        return _READINGS.validate_json(told)
    except ValidationError as error:
        raise RecordError(
            f"{path.name}: is no list of readings of power: {faults_in_a_line(error)}"
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise RecordError(f"{path.name}: cannot be read: {str(error)[:200]}") from error


def board_of(
    readings: Sequence[Reading], window: RateWindow, output_rate: Interval | None
) -> BoardPower | None:
    """Returns the boards' mean power in the windows, and the joules of an output token. None where
    a window has fewer than FEWEST readings, or fewer than one in two seconds."""
    watts, busy = [], []
    count = 0
    for start, begin, length in zip(window.starts, window.begins, window.lengths, strict=True):
        own = [
            each
            for each in readings
            if each.start == start and begin <= each.seconds <= begin + length
        ]
        if len(own) < max(FEWEST, length / 2):
            return None
        watts.append(float(np.mean([each.watts for each in own])))
        busy.append(float(np.mean([each.busy for each in own])))
        count += len(own)
    if not count:
        return None
    power = float(np.average(watts, weights=window.lengths))
    return BoardPower(
        watts=short(power),
        busy=short(float(np.average(busy, weights=window.lengths))),
        joules_per_token=_over(power, output_rate),
        readings=count,
    )


def _over(power: float, rate: Interval | None) -> Interval | None:
    """Returns power over a rate: the rate's low end gives the high one."""
    if rate is None or not rate.value:
        return None
    return Interval(
        value=short(power / rate.value),
        low=short(power / rate.high) if rate.high else None,
        high=short(power / rate.low) if rate.low else None,
    )
