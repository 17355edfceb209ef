"""Checks a benchmark record. The checks are its format (parse_record.py), its consistency
(consistency.py), and, if the raw data is given, every number, derived again. Without the raw data a
consistent forgery passes. The first fault raises RecordError, one line: file, field, what is wrong.
Writes nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.almanac.board_power import Reading, read_board
from penstock.almanac.consistency import faults
from penstock.almanac.figures import point_of
from penstock.almanac.parse_record import one_line, read_record
from penstock.almanac.record import Point, Record
from penstock.almanac.samples import OK, Samples, read_parquet
from penstock.almanac.throughput import issued
from penstock.disk import open_plain
from penstock.errors import RecordError

CLOCK = 1e-3  # tolerance in seconds for time stamps of one request that are out of order
NEAR = 1e-5  # relative tolerance between a record's number and the one derived from its raw data
AT_ONCE = 1e-6  # most seconds between intended send times that count as equal
CLOCKED, IN_TURN, TOGETHER = "by a clock", "each when another had ended", "all at once"
SENT = {"open": CLOCKED, "closed": IN_TURN, "single": IN_TURN, "saturation": TOGETHER}


def validate(path: Path, raw: Path | None = None) -> Record:
    """Returns the record. Raises RecordError when something is wrong with it. raw: the Parquet file
    of its samples."""
    record = read_record(path)
    _first(path.name, faults(record))
    if raw is not None:
        _first(path.name, derived_anew(path, raw)[1])
    return record


def derived_anew(path: Path, raw: Path) -> tuple[Record, list[str]]:
    """Returns a benchmark record with its load levels derived again from its raw data, and a list
    of the differences. Used for records that another version derived: corrections of the
    definitions must not make an honest run invalid. Marks are kept, because only the measuring
    client could set some of them. Raises RecordError when the raw data is not the record's, or
    gives an impossible record.
    """
    record = read_record(path)
    if record.raw is None:
        raise RecordError(f"{path.name}: raw: names no raw data, but {raw.name} was given")
    if (told := _checksum(raw)) != record.raw.sha256:
        why = (
            f"is {record.raw.sha256[:12]}…, {raw.name} has {told[:12]}…: another file, or a"
            " changed one"
        )
        raise RecordError(f"{path.name}: raw.sha256: {why}")
    samples, board = read_parquet(raw), read_board(raw)
    _first(path.name, _unfit(record, samples, raw.name))
    points: list[Point] = []
    otherwise: list[str] = []
    for number, point in enumerate(record.points):
        where = f"points.{number} ({point.name})"
        try:
            points.append(_again(record, samples, point, board))
        except (RecordError, ValueError) as error:
            told = f"cannot be derived from the raw data: {one_line(str(error), 300)}"
            raise RecordError(f"{path.name}: {where}: {told}") from error
        otherwise += _differences(point.model_dump(), points[-1].model_dump(), where, NEAR)
    record = record.model_copy(update={"points": points})
    _first(path.name, faults(record))
    return record, otherwise


def _first(name: str, found: Iterable[str]) -> None:
    for fault in found:
        raise RecordError(f"{name}: {fault}")


# --- a record against its raw data


def _unfit(record: Record, samples: Samples, name: str) -> Iterator[str]:
    """Yields a line for each impossible value in the samples, and for samples of load levels that
    the record lacks."""
    if record.raw is not None and len(samples) != record.raw.rows:
        yield f"raw.rows: {record.raw.rows}, {name} has {len(samples)}"
    for fault in sense(samples):
        yield f"{name}: {fault}"
    if missing := sorted(set(samples.point.astype(str)) - {point.name for point in record.points}):
        yield f"points: {one_line(missing[0])} is in {name}, but no point of the record"
    for number, point in enumerate(record.points):
        own, where = samples.of(samples.point == point.name), f"points.{number} ({point.name})"
        for fault in (*_loop(point, own), *_window(point, own)):
            yield f"{where}.{fault}"


def _loop(point: Point, own: Samples) -> Iterator[str]:
    """Checks the load level's kind by its requests' intended send times: in a closed loop each
    equals the end of another request. An imported run has no intended times, so its kind cannot be
    checked."""
    known = own.of(~np.isnan(own.intended))
    if point.kind == "open" and len(known) < len(own) and not point.client.short:
        yield "client.short: is false, but nobody knows when its requests were to be sent"
    if len(known) > 1 and (told := _sent(known)) != SENT[point.kind]:
        yield (
            f"kind: {point.kind}, where requests are sent {SENT[point.kind]}, but these were sent"
            f" {told}"
        )


def _sent(known: Samples) -> str:
    later = follows = 0
    for start in np.unique(known.start):
        own = known.of(known.start == start)
        after = own.intended[own.intended > own.intended.min() + AT_ONCE]
        later, follows = later + len(after), follows + int(np.isin(after, own.end).sum())
    if not later:
        return TOGETHER
    return IN_TURN if 2 * follows > later else CLOCKED


def _window(point: Point, own: Samples) -> Iterator[str]:
    """Checks that a steady window holds exactly the requests that the samples count."""
    if point.opens is None or not own.window.any():
        return
    length = point.seconds / len(np.unique(own.start[own.window]))
    when, near = issued(own), NEAR * (point.opens + length)
    inside = (when >= point.opens + near) & (when < point.opens + length - near)
    beyond = (when < point.opens - near) | (when >= point.opens + length + near)
    if wrong := int(((inside & ~own.window) | (beyond & own.window)).sum()):
        yield (
            f"opens: a window of {length:g} s from {point.opens:g} s on, but {wrong} requests were "
            "counted outside of it, or not counted in it"
        )


def _checksum(raw: Path) -> str:
    try:
        with open_plain(raw) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RecordError(f"{raw.name}: cannot be read: {error.strerror or error}") from error


def _again(record: Record, samples: Samples, point: Point, board: Sequence[Reading]) -> Point:
    """Derives the load level's figures from the samples again. Raises RecordError or ValueError
    when that fails."""
    return point_of(
        samples,
        name=point.name,
        kind=point.kind,
        rate=point.rate,
        concurrency=point.concurrency,
        seconds=None if point.opens is None else point.seconds,
        opens=point.opens,
        goals=[goal.seconds for goal in point.goals],
        look=point.client,
        marks=point.marks,
        sharing=record.shape.kind != "exact",
        edition=record.method.edition,
        board=board,
        accepted_drafts=point.accepted_drafts,
    )


def _differences(told: Any, derived: Any, where: str, near: float) -> Iterator[str]:
    if where.endswith(".sample"):
        near = 1e-4  # times in the benchmark record's sample have one digit less
    if isinstance(told, dict) and isinstance(derived, dict):
        for key in sorted({*told, *derived}):
            yield from _differences(told.get(key), derived.get(key), f"{where}.{key}", near)
    elif isinstance(told, list) and isinstance(derived, list) and len(told) == len(derived):
        for number, (one, other) in enumerate(zip(told, derived, strict=True)):
            yield from _differences(one, other, f"{where}.{number}", near)
    elif not _same(told, derived, near):
        yield f"{where}: {_word(told)}, but the raw data gives {_word(derived)}"


def _same(told: Any, derived: Any, near: float) -> bool:
    if isinstance(told, float) and isinstance(derived, float):
        return math.isclose(told, derived, rel_tol=near, abs_tol=1e-12)
    return bool(told == derived)


def _word(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, list) else one_line(repr(value))


# --- whether the raw data's values are possible


def sense(samples: Samples) -> Iterator[str]:
    """Yields a line for each kind of impossible value in the samples, with the first row that has
    it."""
    ok, streamed = samples.outcome == OK, ~np.isnan(samples.first)
    spans = np.array([float(np.sum(gaps, dtype=np.float64)) for gaps in samples.gaps])
    counts = np.array([len(gaps) for gaps in samples.gaps], np.int64)
    least = np.array([float(np.min(gaps)) if len(gaps) else 0.0 for gaps in samples.gaps])
    exact, prompt = ok & (samples.asked_output >= 0), np.maximum(samples.prompt_tokens, 0)
    with np.errstate(invalid="ignore"):
        rules = {
            "end: an infinite time": (
                np.isinf(samples.end) | np.isinf(samples.first) | np.isinf(samples.actual)
            ),
            "end: a complete request without one": (
                ok & (np.isnan(samples.end) | np.isnan(samples.actual))
            ),
            "actual: sent before it was planned": samples.actual < samples.intended - CLOCK,
            "first: before the request was sent": samples.first < samples.actual - CLOCK,
            "end: before the first token": samples.end < samples.first - CLOCK,
            "gaps: below 0, or not finite": (least < -CLOCK) | ~np.isfinite(spans),
            "gaps: beyond the request's end": (
                streamed & (samples.first + spans > samples.end + CLOCK + 1e-5 * spans)
            ),
            "events: another number than of gaps": streamed & (samples.events != counts + 1),
            "output_tokens: not as many as asked, yet ok": (
                exact & (samples.output_tokens != samples.asked_output)
            ),
            "cached_tokens: more than the prompt has": ok & (samples.cached_tokens > prompt),
            "start: below 0": samples.start < 0,
        }
    for fault, broken in rules.items():
        if broken.any():
            at = int(np.argmax(broken))
            more = f" (and {int(broken.sum()) - 1} more)" if broken.sum() > 1 else ""
            yield f"row {at}: {fault}{more}"
