"""Imports result files of `vllm bench serve`. A file written with --save-result --save-detailed
becomes samples and a benchmark record.

Values that the file lacks stay unknown and are marked: intended starts, the client's ceiling (so no
load level is ranked), the machine (the user states it), cached tokens. Generated texts are ignored.
Fields are read as vLLM's sources define them (vllm/benchmarks/serve.py, 2025 and 2026).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from penstock import __version__
from penstock.almanac.figures import point_of
from penstock.almanac.parse_record import faults_in_a_line, one_line
from penstock.almanac.record import (
    SCHEMA,
    ClientHealth,
    ClientInfo,
    EngineInfo,
    MachineInfo,
    Method,
    ModelInfo,
    Point,
    Raw,
    Record,
    ShapeInfo,
)
from penstock.almanac.samples import OK, Samples, from_lists, join, write_parquet
from penstock.bench.write_record import word
from penstock.disk import read_plain
from penstock.errors import RecordError

Kind = Literal["saturation", "single", "open", "closed"]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
LARGEST_RESULT = 4 << 30  # most bytes of a file; each token has a number of 20 characters in it
# Outcome of a failed request, and words that its traceback in the file has.
_FAULTS = (
    ("refused", ("ClientConnectorError", "ConnectionRefused", "Cannot connect")),
    ("stalled", ("TimeoutError", "ServerTimeout")),
    (
        "cut",
        (
            "ServerDisconnected",
            "ClientPayloadError",
            "ConnectionReset",
            "Never received a valid chunk",
        ),
    ),
    ("broken", ("JSONDecodeError", "UnicodeDecodeError", "KeyError", "IndexError")),
)


class VllmResult(msgspec.Struct):
    """One result of the file, which becomes a load level. Its lists have one entry per request; a
    failed request has 0 output tokens."""

    date: Annotated[str, msgspec.Meta(pattern=r"^\d{8}-\d{6}$")]
    input_lens: list[Tokens]
    output_lens: list[Tokens]
    ttfts: list[Seconds]
    itls: list[list[Seconds]]
    errors: list[Any]
    # send time of each request; 0: never sent. Old files lack it, and a saturation load level does
    # not need it
    start_times: list[Seconds] = []
    # seconds that the client held requests back, if the file has them
    queue_times: list[float] | None = None
    request_rate: Annotated[float, msgspec.Meta(gt=0, lt=1e9)] | Literal["inf"] = "inf"
    max_concurrency: Annotated[int, msgspec.Meta(gt=0, lt=10**9)] | None = None
    backend: str | None = None
    model_id: str | None = None

    @property
    def rate(self) -> float | None:
        """Returns the offered requests a second; None: all at once."""
        return None if self.request_rate == "inf" else self.request_rate

    @property
    def kind(self) -> Kind:
        """Returns the kind of loop. A rate with a concurrency limit counts as open: requests were
        sent by a clock."""
        if self.rate is not None:
            return "open"
        if self.max_concurrency is None or self.max_concurrency >= len(self.ttfts):
            return "saturation"
        return "single" if self.max_concurrency == 1 else "closed"

    @property
    def when(self) -> str:
        """Returns the date. The file has local time without a zone; it is taken as UTC, off by at
        most a day."""
        day, time = self.date.split("-")
        return f"{day[:4]}-{day[4:6]}-{day[6:]}T{time[:2]}:{time[2:4]}:{time[4:]}Z"

    def check(self) -> None:
        """Raises ValueError for faults that the decoder cannot see."""
        for name in ("input_lens", "output_lens", "itls", "errors", "start_times"):
            count = len(getattr(self, name))
            if count != len(self.ttfts) and (count or name != "start_times"):
                raise ValueError(f"{name}: {count} entries, ttfts has {len(self.ttfts)}")
        if not self.start_times and self.kind != "saturation":
            raise ValueError(
                "start_times: is missing, so no rate can be had: use a vLLM that writes them"
            )


def read_vllm(path: Path) -> list[VllmResult]:
    """Returns every result of the file. Raises RecordError, one line that names file and field."""
    try:
        results = msgspec.json.Decoder(VllmResult).decode_lines(read_plain(path, LARGEST_RESULT))
        for result in results:
            result.check()
    except OSError as error:
        raise RecordError(f"{path.name}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        why = one_line(str(error), 200)
        raise RecordError(
            f"{path.name}: is none of vllm bench serve --save-result --save-detailed: {why}"
        ) from error
    if not results:
        raise RecordError(f"{path.name}: is empty")
    return results


def record_of(
    results: Sequence[VllmResult],
    raw: Path,
    *,
    engine: EngineInfo,
    machine: MachineInfo,
    goals: Sequence[float],
    weights: Literal["real", "random"],
    dtype: str,
    price: float | None = None,
) -> Record:
    """Writes the samples to `raw` and makes their record. Raises RecordError for results of
    different models, which need separate records, and for numbers outside a benchmark record's
    ranges."""
    models = {result.model_id or "unknown" for result in results}
    if len(models) > 1:
        raise RecordError(
            f"results of {len(models)} models ({one_line(', '.join(sorted(models)))}): import them"
            " apart"
        )
    parts = [_samples(result, name) for result, name in zip(results, _names(results), strict=True)]
    samples = join(parts)
    shape = _shape(samples.of(samples.outcome == OK))
    write_parquet(samples, raw)
    digest = hashlib.sha256(raw.read_bytes()).hexdigest()
    try:
        return Record.model_validate(
            {
                "schema": SCHEMA,
                "run": digest[:16],
                "when": min(result.when for result in results),
                "engine": engine,
                "model": ModelInfo(
                    name=word(models.pop()), weights=weights, dtype=dtype, source="by vLLM's file"
                ),
                "machine": machine,
                "shape": shape,
                "client": ClientInfo(
                    penstock=__version__,
                    processes=1,
                    seed=0,
                    command=(
                        f"vllm bench serve --backend {word(results[0].backend or 'unknown')}"
                        " (imported)"
                    ),
                ),
                "method": Method(
                    warm_up=0.0,
                    window=float(np.nanmax(samples.end)),
                    enough=max(map(len, parts)),
                    starts=1,
                    quantile=0.95,
                    goals=list(goals),
                    short=True,
                    price_per_hour=price,
                ),
                "points": [
                    _point(result, part, goals, shape)
                    for result, part in zip(results, parts, strict=True)
                ],
                "failures": [],
                "raw": Raw(sha256=digest, rows=len(samples)),
            }
        )
    except ValidationError as error:
        raise RecordError(
            f"the file's numbers make no record: {faults_in_a_line(error)}"
        ) from error


def _names(results: Sequence[VllmResult]) -> list[str]:
    """Returns a unique name for each load level."""
    names: list[str] = []
    for result in results:
        name = {
            "open": f"open {result.rate:g}" if result.rate else "",
            "closed": f"closed {result.max_concurrency}",
        }
        plain = name.get(result.kind, result.kind)
        numbered = (plain, *(f"{plain} ({again})" for again in range(2, len(names) + 2)))
        names.append(next(each for each in numbered if each not in names))
    return names


def _point(result: VllmResult, samples: Samples, goals: Sequence[float], shape: ShapeInfo) -> Point:
    late = float(np.quantile(result.queue_times, 0.99)) if result.queue_times else 0.0
    return point_of(
        samples,
        name=str(samples.point[0]),
        kind=result.kind,
        rate=result.rate,
        concurrency=result.max_concurrency,
        # no steady window: from the first send to the last end, like vLLM's own figures
        seconds=None,
        goals=goals,
        look=ClientHealth(
            lag_p99=0.0, busy=1.0, headroom=None, late_p99=max(late, 0.0), short=True
        ),
        marks=[
            "imported from vllm bench serve",
            "client unknown",
            "intended start unknown",
            "text prompts",
        ],
        sharing=shape.kind != "exact",
    )


def _samples(result: VllmResult, name: str) -> Samples:
    ok, count = np.array(result.output_lens) > 0, len(result.ttfts)
    starts = _starts(result)
    first = np.where(ok, starts + np.array(result.ttfts), np.nan)
    outcomes = [
        OK if good else _outcome(str(error)) for good, error in zip(ok, result.errors, strict=True)
    ]
    return from_lists(
        {
            "point": [name] * count,
            "start": [0] * count,
            "intended": [float("nan")] * count,
            "actual": list(starts),
            "first": list(first),
            "end": list(first + [sum(gaps) for gaps in result.itls]),
            "events": [
                len(gaps) + 1 if good else 0 for gaps, good in zip(result.itls, ok, strict=True)
            ],
            "gaps": [gaps if good else [] for gaps, good in zip(result.itls, ok, strict=True)],
            "prompt_tokens": list(np.where(ok, result.input_lens, -1)),
            "output_tokens": list(np.where(ok, result.output_lens, -1)),
            "cached_tokens": [-1] * count,
            "asked_prompt": [-1] * count,
            "asked_output": [-1] * count,
            "window": [True] * count,
            "outcome": outcomes,
        }
    )


def _starts(result: VllmResult) -> npt.NDArray[np.float64]:
    """Returns each request's send time, in seconds since the first one's."""
    starts = np.array(result.start_times or [0.0] * len(result.ttfts))
    sent = starts > 0
    return np.where(sent, starts - starts[sent].min(initial=np.inf), 0.0)


def _outcome(error: str) -> str:
    return next((ours for ours, words in _FAULTS if any(each in error for each in words)), "status")


def _shape(done: Samples) -> ShapeInfo:
    """Returns the shape: exact if all complete requests have the same lengths, else a dataset with
    the mean lengths."""
    if not len(done):
        raise RecordError("no request of the file was complete: there is nothing to import")
    exact = len(np.unique(done.prompt_tokens)) == 1 and len(np.unique(done.output_tokens)) == 1
    size = max(float(done.prompt_tokens.mean()), 1.0), max(float(done.output_tokens.mean()), 1.0)
    name = f"{size[0]:.0f}x{size[1]:.0f}"
    return ShapeInfo(
        name=name if exact else f"mixed {name}",
        kind="exact" if exact else "dataset",
        input=size[0],
        output=size[1],
        source="imported from vllm bench serve",
        prompts="text",
    )
