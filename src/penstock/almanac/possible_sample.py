"""What a point's joint sample cannot say without contradicting its figures.

Chance has a part in 500 rows of 10,000 requests: five standard deviations are left to it. It knows a point's form and
the definitions (docs/metrics.md); consistency.py asks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.almanac.intervals import Floats
from penstock.almanac.record import SAMPLE_ROWS, Point, Record
from penstock.almanac.summaries import QUANTILES

COLUMNS = {"first": "first_token", "per_token": "per_token", "end_to_end": "end_to_end"}  # of the sample: its figure
DEVIATIONS = 5.0
NEAR = 2e-4  # two roundings to 5 digits


def _columns(point: Point) -> dict[str, Floats]:
    return {name: np.array(getattr(point.sample, name), np.float64) for name in COLUMNS}


def joint_rows(point: Point, record: Record) -> Iterator[str]:
    columns = _columns(point)
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1 or max(lengths) > min(point.requests, SAMPLE_ROWS) or (point.requests and not max(lengths)):
        yield f"sample: columns of {sorted(lengths)} rows, for {point.requests} requests"
        return
    first, per_token, end = columns["first"], columns["per_token"], columns["end_to_end"]
    for name, column in columns.items():
        if ((column < 0) & (column != -1)).any():
            yield f"sample.{name}: a time below 0 that is not -1"
    failed = end < 0
    if (failed & ((first >= 0) | (per_token >= 0))).any():
        yield f"sample: row {int(np.argmax(failed & ((first >= 0) | (per_token >= 0))))} failed, yet it has times"
    late = ~failed & (first > end * (1 + NEAR))
    if late.any():
        yield f"sample: row {int(np.argmax(late))} has its first token after its end"
    if record.shape.kind == "exact" and record.shape.n == 1:
        whole = first + per_token * max(record.shape.output - 1, 1)
        off = (first >= 0) & (per_token >= 0) & (np.abs(whole - end) > 5 * NEAR * end)
        if off.any():
            yield f"sample: row {int(np.argmax(off))}: first, per token and end do not add up"


def joint_shares(point: Point, record: Record) -> Iterator[str]:
    """The sample against the figures: as many rows below a quantile as there should be, give or take chance."""
    columns = _columns(point)
    rows = len(columns["first"])
    if not rows:
        return
    complete = columns["end_to_end"] >= 0
    for fault in _beside(int(complete.sum()), rows, point.complete / point.requests, point):
        yield f"sample: {fault} complete"
    for name, figure in COLUMNS.items():
        column, spread = columns[name][columns[name] >= 0], getattr(point.figures, figure)
        if (spread is None) != (not len(column)) and complete.any() and point.complete >= rows:
            yield f"sample.{name}: {len(column)} rows, but figures.{figure} is {'not ' if spread is None else ''}there"
        for key, level in QUANTILES.items() if spread is not None else ():
            below = int((column <= getattr(spread, key).value * (1 + NEAR)).sum())
            above = int((column >= getattr(spread, key).value * (1 - NEAR)).sum())
            for number, share in ((below, level), (above, 1 - level)):
                for fault in _beside(number, len(column), share, point, at_least=True):
                    yield f"sample.{name}: {fault} on that side of figures.{figure}.{key}"
    for number, goal in enumerate(point.goals):
        for near, least in ((1 + NEAR, True), (1 - NEAR, False)):
            met = int(((columns["first"] >= 0) & (columns["first"] <= goal.seconds * near)).sum())
            if list(_beside(met, rows, goal.share, point, at_least=least, at_most=not least)):
                yield f"sample.first: {met} of {rows} rows met goals.{number}, but its share is {goal.share}"
                break


def _beside(
    number: int, of: int, share: float, point: Point, *, at_least: bool = False, at_most: bool = False
) -> Iterator[str]:
    """Whether `number` of `of` rows may come of a share; a sample of everything has no chance in it."""
    left = max(1 - of / max(point.complete, of, 1), 0.0)  # what was drawn without replacement varies less
    spread = DEVIATIONS * (of * share * (1 - share) * left) ** 0.5 + 2
    short, long = number < of * share - spread, number > of * share + spread
    if (short and not at_most) or (long and not at_least):
        yield f"{number} of {of} rows, where {of * share:.4g} are to be expected,"
