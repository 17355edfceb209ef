"""Finds contradictions within a benchmark record. They are such as a careless edit by hand leaves,
in counts, marks, intervals and quantiles.

Each rule yields lines `field: what is wrong`, and none for an honest record. Numbers that only the
raw data can prove are checked in validate.py. Knows the benchmark record's format and the
definitions in docs/metrics.md; no file, no raw data.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from penstock.almanac.figures import FAILED_SHARE, FEW, SHORT_WINDOW
from penstock.almanac.record import (
    BUSY,
    EDITION_STARTS,
    EDITION_WINDOW,
    FULL,
    HEADROOM,
    LAG,
    LATE,
    LATE_SHARE,
    SAMPLE_ROWS,
    WRONG_KL,
    Figures,
    Point,
    Record,
    Spread,
)
from penstock.almanac.samples import OK, OUTCOMES
from penstock.almanac.summaries import QUANTILES

AHEAD = datetime.timedelta(days=1)  # allowed lead of another machine's clock
SPREADS = [name for name in Figures.model_fields if not name.endswith("_rate")]
ROUNDED = 1 + 1e-5  # factor by which a figure rounded to 6 digits may exceed the exact one


def faults(record: Record, now: datetime.datetime | None = None) -> Iterator[str]:
    """Yields a line for each impossible value in the benchmark record, most basic faults first.
    now: the time that the record's date is compared with; None: the clock's."""
    yield from _head(record, now or datetime.datetime.now(datetime.UTC))
    for number, point in enumerate(record.points):
        where = f"points.{number} ({point.name})"
        for rule in RULES:
            for fault in rule(point, record):
                yield f"{where}.{fault}"


# --- fields of the whole benchmark record


def _head(record: Record, now: datetime.datetime) -> Iterator[str]:
    try:
        when = datetime.datetime.strptime(record.when, "%Y-%m-%dT%H:%M:%SZ").replace(
            tzinfo=datetime.UTC
        )
    except ValueError:
        yield f"when: {record.when} is no day of the calendar"
        return
    if when > now + AHEAD:
        yield f"when: {record.when} lies in the future"
    if record.raw is not None and record.raw.rows < (
        issued := sum(point.requests for point in record.points)
    ):
        yield f"raw.rows: {record.raw.rows}, but the points have {issued} requests"
    if not record.points and not record.failures:
        yield "points: none, and no failure either: the record says nothing"
    if not 0 < record.method.quantile < 1:
        yield f"method.quantile: {record.method.quantile} is none: a share between 0 and 1"
    for name, whole in FULL.items() if not record.method.short else ():
        if (told := getattr(record.method, name)) * ROUNDED < whole:
            yield f"method.short: is false, at {name} {told:g} where the whole method has {whole:g}"
    method = record.method
    if method.edition is not None:
        if method.starts < EDITION_STARTS or method.window * ROUNDED < EDITION_WINDOW:
            yield (
                f"method.edition: {method.starts} starts and windows of {method.window:g} s, where"
                f" an edition has {EDITION_STARTS} and {EDITION_WINDOW:g} s"
            )
        if not method.short:
            yield "method.short: is false, but an edition is below the whole method"
    told = record.answers
    if told is not None and told.wrong != (told.kl > WRONG_KL):
        yield f"answers.wrong: {told.wrong}, at a divergence of {told.kl} where {WRONG_KL} is wrong"
    names = [point.name for point in record.points]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"points: {twice[0]} stands there twice"


# --- one load level (a point): counts of requests, marks of doubtful results, the client


def _counts(point: Point, record: Record) -> Iterator[str]:
    if point.complete > point.requests:
        yield f"complete: {point.complete} of {point.requests} requests"
    if sum(point.outcomes.values()) != point.requests - point.complete:
        yield (
            f"outcomes: {sum(point.outcomes.values())} in all, but"
            f" {point.requests - point.complete} did not complete"
        )
    if strange := [name for name in point.outcomes if name not in OUTCOMES or name == OK]:
        yield f"outcomes: {strange[0]!r} is none: {', '.join(OUTCOMES[1:])}"
    if point.kind == "open" and not point.rate:
        yield "rate: an open loop has one, above 0"
    if point.kind != "open" and point.rate is not None:
        yield f"rate: {point.rate} a second, but only an open loop has one"
    if point.kind == "closed" and not point.concurrency:
        yield "concurrency: a closed loop has one, above 0"
    if point.kind in ("saturation", "single") and point.opens is not None:
        yield f"opens: {point.opens}, but only an open or a closed loop has a steady window"
    if point.kind in ("open", "closed") and point.opens is None and not point.client.short:
        yield "opens: is missing: only an import has none, and its client counts as short"
    if point.complete and point.seconds <= 0:
        yield "seconds: 0, with complete requests"
    if (point.effective or 0) > point.requests * ROUNDED:
        yield f"effective: {point.effective}, more than the {point.requests} requests"
    if point.cached_tokens > point.prompt_tokens:
        yield f"cached_tokens: {point.cached_tokens}, of {point.prompt_tokens} prompt tokens"


def _marks(point: Point, record: Record) -> Iterator[str]:
    """Yields a line for each missing mark, if the benchmark record's own numbers require it. (Some
    short windows are not found here: the record does not say how many server starts a load level
    had, among which its seconds are divided.)
    """
    end = point.figures.end_to_end
    longest = end.p95.value if end is not None and point.opens is not None else 0.0
    wanted = {
        "few requests": point.effective is not None and point.effective < FEW,
        "failed requests": (
            (point.requests - point.complete) / max(point.requests, 1) > FAILED_SHARE
        ),
        "short window": point.seconds < max(SHORT_WINDOW, 2 * longest),
        "cached prompts": record.shape.kind == "exact" and point.cached_tokens > 0,
        "client short": point.client.short,
        "text prompts": record.shape.prompts == "text" and record.shape.kind == "exact",
        "usage disagreed": bool({"usage", "length"} & point.outcomes.keys()),
    }
    for mark, holds in wanted.items():
        if holds and mark not in point.marks:
            yield f"marks: {mark!r} is missing"


def _client(point: Point, record: Record) -> Iterator[str]:
    """Yields a line for each reason to mark the client short (a possible bottleneck), if it is not
    marked. The allowed lateness depends on the median wait of all the load level's requests, which
    the record lacks. Twice the p99 within the window is used instead: it is above that median if
    most requests were complete.
    """
    look, waited = point.client, point.figures.first_token or point.figures.end_to_end
    if look.short:
        return
    if look.lag_p99 > LAG:
        yield f"client.short: is false, at a loop lag of {look.lag_p99} s where {LAG} are the limit"
    if look.headroom is not None and look.headroom < HEADROOM:
        yield (
            f"client.short: is false, at a headroom of {look.headroom} where {HEADROOM} are the"
            " least"
        )
    if look.headroom is None and look.busy > BUSY:
        yield (
            f"client.short: is false, at {look.busy} of a core where {BUSY} are the limit of one"
            " not calibrated"
        )
    if waited is not None and 2 * point.complete > point.requests:
        most = max(LATE, LATE_SHARE * 2 * waited.p99.value)
        if look.late_p99 > most:
            yield (
                f"client.short: is false, at requests taken up {look.late_p99} s late where"
                f" {most:.4g} are the most"
            )


# --- one load level: rates and latencies


def _figures(point: Point, record: Record) -> Iterator[str]:
    """Checks that values lie in their intervals, that quantiles rise, and that figures are present
    when requests were complete."""
    for name, figure in point.figures:
        spread = dict(figure) if isinstance(figure, Spread) else {}
        for key, interval in spread.items() or ([("rate", figure)] if figure is not None else []):
            low, value, high = interval.low or 0.0, interval.value, interval.high
            if not low <= value <= (value if high is None else high):
                yield (
                    f"figures.{name}: the {key} of {value} lies outside of its interval, {low} to"
                    f" {high}"
                )
        values = [spread[key].value for key in QUANTILES if spread]
        if values != sorted(values):
            yield f"figures.{name}: {', '.join(QUANTILES)} are {values}, and don't rise"
    # In a steady window rates count everything that arrived, also from requests that were sent
    # before it or cut off after it.
    told = [
        name
        for name, figure in point.figures
        if figure is not None and (point.opens is None or name in SPREADS)
    ]
    if told and not point.complete:
        yield f"figures.{told[0]}: is there, but no request was complete"
    if point.complete and point.seconds > 0 and point.figures.request_rate is None:
        yield "figures.request_rate: is missing, with complete requests"


# --- one load level: latency goals, and the stored sample of its requests


def _goals(point: Point, record: Record) -> Iterator[str]:
    """Checks that a streamed load level states every latency goal of the method: a goal that was
    left out may have been missed."""
    told, streamed = (
        [goal.seconds for goal in point.goals],
        point.figures.first_token is not None or not point.complete,
    )
    if sorted(told) != (asked := sorted(record.method.goals) if streamed else []):
        yield f"goals: {told} s, where {asked} are to be told"


def _sample(point: Point, record: Record) -> Iterator[str]:
    """Checks that the joint sample's columns have the same number of rows."""
    lengths = {
        len(column)
        for column in (point.sample.first, point.sample.per_token, point.sample.end_to_end)
    }
    if (
        len(lengths) > 1
        or max(lengths) > min(point.requests, SAMPLE_ROWS)
        or (point.requests and not max(lengths))
    ):
        yield f"sample: columns of {sorted(lengths)} rows, for {point.requests} requests"


# checks of one load level, the most basic first
RULES = (_counts, _marks, _client, _figures, _goals, _sample)
