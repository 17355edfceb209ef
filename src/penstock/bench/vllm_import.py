"""What `vllm bench serve --save-result --save-detailed` wrote, as samples and as a record of the almanac.

What its file doesn't have stays unknown and is marked: intended starts, the client's own ceiling (so no point is
ranked), the machine (who imports says), cached tokens. Nothing of a generated text is taken over. Read off vLLM's
sources (vllm/benchmarks/serve.py, 2025 and 2026); `latencies` and `queue_times` came later.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
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
    Raw,
    Record,
    ShapeInfo,
)
from penstock.almanac.samples import Samples, from_lists, join, write_parquet
from penstock.bench.write_record import word
from penstock.errors import RecordError

LARGEST = 2_000_000_000  # bytes; 10,000 requests of 1,024 tokens are about 250 MB
Kind = Literal["saturation", "single", "open", "closed"]
# Words of its errors (a traceback a failed request) -> our outcome.
_FAULTS = (
    ("refused", ("ClientConnectorError", "ConnectionRefused", "Cannot connect")),
    ("stalled", ("TimeoutError", "ServerTimeout")),
    ("cut", ("ServerDisconnected", "ClientPayloadError", "ConnectionReset", "Never received a valid chunk")),
    ("broken", ("JSONDecodeError", "UnicodeDecodeError", "KeyError", "IndexError")),
)


@dataclass(frozen=True)
class VllmResult:
    """One result of the file: a point. rate: offered requests a second, None for all at once."""

    name: str
    kind: Kind
    rate: float | None
    concurrency: int | None
    when: str
    backend: str
    model: str
    late_p99: float  # seconds that its client held requests back, where it tells; else 0
    samples: Samples


def read_vllm(path: Path) -> list[VllmResult]:
    """Returns every result of the file. Raises RecordError, one line that names file and field."""
    results: list[VllmResult] = []
    for number, told in enumerate(_documents(path)):
        where = f"{path.name}: " if number == 0 else f"{path.name}: result {number + 1}: "
        result = _result(told, where, {each.name for each in results})
        results.append(result)
    if not results:
        raise RecordError(f"{path.name}: is empty")
    return results


def record_of(
    results: Sequence[VllmResult], raw: Path, *, engine: EngineInfo, machine: MachineInfo, goals: Sequence[float],
    weights: Literal["real", "random"], dtype: str, price: float | None = None,
) -> Record:  # fmt: skip
    """Writes the samples to `raw` and makes the record of them. Raises RecordError where the results are of different
    models (those are different records), and for numbers that no record may hold."""
    models = {result.model for result in results}
    if len(models) > 1:
        raise RecordError(f"results of {len(models)} models ({one_line(', '.join(sorted(models)))}): import them apart")
    samples, shape = join([result.samples for result in results]), _shape([result.samples for result in results])
    write_parquet(samples, raw)
    digest = hashlib.sha256(raw.read_bytes()).hexdigest()
    longest = max(float(np.nanmax(result.samples.end, initial=0.0)) for result in results)
    try:
        return Record.model_validate({
            "schema": SCHEMA,
            "run": digest[:16],
            "when": min(result.when for result in results),
            "engine": engine,
            "model": ModelInfo(
                name=word(results[0].model), weights=weights, dtype=dtype, source="by vLLM's file"
            ),
            "machine": machine,
            "shape": shape,
            "client": ClientInfo(
                penstock=__version__, processes=1, seed=0,
                command=f"vllm bench serve --backend {word(results[0].backend)} (imported)",
            ),
            "method": Method(
                warm_up=0.0, window=longest, enough=max(len(result.samples) for result in results), starts=1,
                quantile=0.95, goals=list(goals), short=True, price_per_hour=price,
            ),
            "points": [_point(result, goals, shape) for result in results],
            "failures": [],
            "raw": Raw(sha256=digest, rows=len(samples)),
        })  # fmt: skip
    except ValidationError as error:
        raise RecordError(f"the file's numbers make no record: {faults_in_a_line(error)}") from error


def _point(result: VllmResult, goals: Sequence[float], shape: ShapeInfo) -> Any:
    look = ClientHealth(lag_p99=0.0, busy=1.0, headroom=None, late_p99=result.late_p99, short=True)
    return point_of(
        result.samples,
        name=result.name,
        kind=result.kind,
        rate=result.rate,
        concurrency=result.concurrency,
        seconds=None,  # it has no steady window: from the first send to the last end, as vLLM's own figures
        goals=goals,
        look=look,
        marks=["imported from vllm bench serve", "client unknown", "intended start unknown", "text prompts"],
        sharing=shape.kind != "exact",
    )


# --- the file


def _documents(path: Path) -> list[dict[str, Any]]:
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise RecordError(f"{path.name}: {size} bytes; {LARGEST} are read at most")
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RecordError(f"{path.name}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path.name}: is no UTF-8 text (byte {error.start})") from error
    found, at, decoder = [], 0, json.JSONDecoder()
    while at < len(text):
        try:
            told, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path.name}: is no JSON: {one_line(str(error))}") from error
        if not isinstance(told, dict):
            raise RecordError(f"{path.name}: is no result of vllm bench serve, but a {type(told).__name__}")
        found.append(told)
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return found


def _result(told: dict[str, Any], where: str, taken: set[str]) -> VllmResult:
    fields = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    missing = [name for name in fields if name not in told]
    if missing:
        why = "it lacks " + ", ".join(missing)
        raise RecordError(f"{where}{why}: run vllm bench serve with --save-result --save-detailed")
    lists = {name: told[name] for name in fields}
    count = len(lists["ttfts"]) if isinstance(lists["ttfts"], list) else 0
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != count:
            raise RecordError(f"{where}{name}: is no list of {count} entries, as ttfts is")
    if not count:
        raise RecordError(f"{where}ttfts: holds no request")
    rate, concurrency = _rate(told, where), _concurrency(told, where)
    kind = _kind(rate, concurrency, count)
    name = _name(kind, rate, concurrency, taken)
    samples = _samples(lists, _starts(told, where, count, kind), name, where)
    queued = told.get("queue_times")
    late = float(np.quantile(_numbers(queued, "queue_times", where), 0.99)) if isinstance(queued, list) else 0.0
    backend, model = (str(told.get(key) or "unknown") for key in ("backend", "model_id"))
    shown = rate if kind == "open" else None
    return VllmResult(name, kind, shown, concurrency, _when(told, where), backend, model, max(late, 0.0), samples)


def _samples(lists: dict[str, list[Any]], starts: np.ndarray, name: str, where: str) -> Samples:
    first, inputs, outputs = (_numbers(lists[key], key, where) for key in ("ttfts", "input_lens", "output_lens"))
    gaps = [_numbers(each, f"itls.{at}", where) for at, each in enumerate(lists["itls"])]
    ok, count = outputs > 0, len(first)
    for key, bad in (("ttfts", first < 0), ("itls", np.array([bool((each < 0).any()) for each in gaps]))):
        if bad.any():
            raise RecordError(f"{where}{key}.{int(np.argmax(bad))}: a time below 0")
    at = np.where(ok, starts + first, np.nan)
    columns: dict[str, Any] = {
        "point": [name] * count,
        "start": [0] * count,
        "intended": [float("nan")] * count,
        "actual": list(starts),
        "first": list(at),
        "end": [one + float(each.sum()) for one, each in zip(at, gaps, strict=True)],
        "events": [len(each) + 1 if good else 0 for each, good in zip(gaps, ok, strict=True)],
        "gaps": [each if good else [] for each, good in zip(gaps, ok, strict=True)],
        "prompt_tokens": [int(each) if good else -1 for each, good in zip(inputs, ok, strict=True)],
        "output_tokens": [int(each) if good else -1 for each, good in zip(outputs, ok, strict=True)],
        "cached_tokens": [-1] * count,
        "asked_prompt": [-1] * count,
        "asked_output": [-1] * count,
        "window": [True] * count,
        "outcome": ["ok" if good else _outcome(error) for good, error in zip(ok, lists["errors"], strict=True)],
    }
    try:
        return from_lists(columns)
    except (OverflowError, ValueError) as error:
        raise RecordError(f"{where}{one_line(str(error))}") from error


def _numbers(values: Any, name: str, where: str) -> np.ndarray:
    """Returns [n] finite numbers of a list; anything else in it is refused."""
    if not isinstance(values, list) or any(type(each) not in (int, float) for each in values):
        raise RecordError(f"{where}{name}: is no list of numbers")
    try:
        made = np.array(values, np.float64)
    except OverflowError as error:
        raise RecordError(f"{where}{name}: {error}") from error
    if not (np.isfinite(made) & (np.abs(made) < 1e9)).all():
        raise RecordError(f"{where}{name}: holds a number that is none of a measurement")
    return made


def _starts(told: dict[str, Any], where: str, count: int, kind: Kind) -> np.ndarray:
    """Returns when each request was sent, since the first was. An old file has no such times: all at once needs
    none."""
    if "start_times" in told:
        starts = _numbers(told["start_times"], "start_times", where)
        if len(starts) != count:
            raise RecordError(f"{where}start_times: {len(starts)} entries, ttfts has {count}")
        sent = starts[starts > 0]  # a request that was never sent has 0
        return np.where(starts > 0, starts - (sent.min() if len(sent) else 0.0), 0.0)
    if kind != "saturation":
        raise RecordError(f"{where}start_times: is missing, so no rate can be had: use a vLLM that writes them")
    return np.zeros(count)


def _rate(told: dict[str, Any], where: str) -> float | None:
    rate = told.get("request_rate", "inf")
    if rate == "inf" or rate == float("inf"):
        return None
    if type(rate) not in (int, float) or not 0 < rate < 1e9:
        raise RecordError(f"{where}request_rate: {one_line(repr(rate))} is no rate")
    return float(rate)


def _concurrency(told: dict[str, Any], where: str) -> int | None:
    users = told.get("max_concurrency")
    if users is not None and (type(users) is not int or not 0 < users < 10**9):
        raise RecordError(f"{where}max_concurrency: {one_line(repr(users))} is no number of requests")
    return users


def _kind(rate: float | None, concurrency: int | None, count: int) -> Kind:
    """Returns the loop. A rate with a limit in flight is open, with its limit told: it was sent by a clock."""
    if rate is not None:
        return "open"
    if concurrency is None or concurrency >= count:
        return "saturation"
    return "single" if concurrency == 1 else "closed"


def _name(kind: Kind, rate: float | None, concurrency: int | None, taken: set[str]) -> str:
    name = {"open": f"open {rate:g}" if rate else "open", "closed": f"closed {concurrency}"}.get(kind, kind)
    names = (name, *(f"{name} ({again})" for again in range(2, len(taken) + 2)))
    return next(each for each in names if each not in taken)


def _outcome(error: Any) -> str:
    text = str(error)
    return next((ours for ours, words in _FAULTS if any(word in text for word in words)), "status")


def _when(told: dict[str, Any], where: str) -> str:
    """Its date is a local time without a zone: taken as UTC, off by at most a day."""
    try:
        when = datetime.datetime.strptime(str(told.get("date")), "%Y%m%d-%H%M%S")
    except ValueError as error:
        raise RecordError(f"{where}date: {one_line(repr(told.get('date')))} is none like 20260131-235959") from error
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _shape(parts: Sequence[Samples]) -> ShapeInfo:
    """Returns the shape: exact when every complete request of every point has the same lengths; else as a dataset, by
    its means."""
    done = [part.of(part.outcome == "ok") for part in parts]
    inputs = np.concatenate([part.prompt_tokens for part in done])
    outputs = np.concatenate([part.output_tokens for part in done])
    if not len(inputs):
        raise RecordError("no request of the file was complete: there is nothing to import")
    exact = len(np.unique(inputs)) == 1 and len(np.unique(outputs)) == 1
    size = max(float(inputs.mean()), 1.0), max(float(outputs.mean()), 1.0)
    name = f"{size[0]:.0f}x{size[1]:.0f}"
    return ShapeInfo(
        name=name if exact else f"mixed {name}",
        kind="exact" if exact else "dataset",
        input=size[0],
        output=size[1],
        source="imported from vllm bench serve",
        prompts="text",
    )
