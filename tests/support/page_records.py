"""Records whose answers can be said beforehand, for tests of the almanac's page: a made-up one as a
base, with points that hold exactly the first tokens that a test names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from made_records import made_records

from penstock.almanac.record import Record

GOALS = (0.3, 1.0, 3.0)
DEFAULT: Any = next(iter(made_records(1, rows=20))).model_dump(mode="json", by_alias=True)


def record(
    run: str, engine: str, points: Sequence[dict[str, Any]], **changes: Any
) -> dict[str, Any]:
    """A record on paper. `changes`: a path with dots to its new value, as in {"machine.cpu":
    "..."}."""
    made: dict[str, Any] = {
        **DEFAULT,
        "run": run,
        "points": list(points),
        "failures": [],
        "raw": None,
    }
    made["engine"] = {
        "name": engine,
        "version": "1.0",
        "commit": None,
        "command": f"{engine} serve it",
        "configuration": {"name": "default", "flags": ["--flag 1"], "files": {}, "environment": {}},
    }
    made["client"] = {
        **DEFAULT["client"],
        "command": f"penstock bench run --engine {engine} --model Test-1B --suite almanac",
    }
    made["model"] = {**DEFAULT["model"], "name": "Test-1B", "weights": "real"}
    made["machine"] = {**DEFAULT["machine"], "gpu": None, "cpu": "Test CPU", "cores": 4}
    made["shape"] = {
        **DEFAULT["shape"],
        "name": "1024x128",
        "kind": "exact",
        "input": 1024.0,
        "output": 128.0,
        "n": 1,
    }
    made["method"] = {**DEFAULT["method"], "short": False, "price_per_hour": None}
    for path, value in changes.items():
        *parents, name = path.split(".")
        holder = made
        for parent in parents:
            holder[parent] = dict(holder[parent])
            holder = holder[parent]
        holder[name] = value
    Record.model_validate(made)
    return made


def point(
    rate: float | None,
    first: Sequence[float],
    *,
    kind: str = "open",
    token: float = 0.01,
    failed: int = 0,
    short: bool = False,
    marks: Sequence[str] = (),
    concurrency: int | None = None,
) -> dict[str, Any]:
    """A point whose window had exactly these requests, all in its sample; `failed` more did not
    complete. In an open loop it is as long as they take at the rate."""
    good, issued = np.array(first, float), len(first) + failed
    end = good + 127 * token
    done = rate if rate is not None else 1 / float(end.mean())
    bad = [-1.0] * failed
    return {
        "name": f"{kind} {rate or concurrency or ''}".strip(),
        "kind": kind,
        "rate": rate if kind == "open" else None,
        "concurrency": concurrency,
        "seconds": issued / rate if kind == "open" and rate else 60.0,
        "opens": 10.0 if kind == "open" else None,
        "requests": issued,
        "complete": len(first),
        "outcomes": {"stalled": failed} if failed else {},
        "output_tokens": 128 * len(first),
        "prompt_tokens": 1024 * len(first),
        "cached_tokens": 0,
        "figures": {
            "request_rate": around(done),
            "output_rate": around(done * 128),
            "total_rate": around(done * 1152),
            "first_token": spread(good),
            "first_token_actual": spread(good),
            "inter_token": None,
            "per_token": spread(np.full(len(first), token)),
            "end_to_end": spread(end),
            "end_to_end_actual": None,
        },
        "goals": [],
        "client": {"lag_p99": 0.001, "busy": 0.2, "headroom": 9.0, "late_p99": 0.0, "short": short},
        "marks": list(marks),
        "sample": {
            "first": [*map(float, good), *bad],
            "per_token": [token] * len(first) + bad,
            "end_to_end": [*map(float, end), *bad],
        },
    }


def around(value: float) -> dict[str, float]:
    return {"value": value, "low": value * 0.98, "high": value * 1.02}


def spread(values: Any) -> dict[str, dict[str, float]]:
    quantiles = np.quantile(values, (0.5, 0.9, 0.95, 0.99))
    return {"mean": around(float(values.mean()))} | {
        name: around(float(value))
        for name, value in zip(("p50", "p90", "p95", "p99"), quantiles, strict=True)
    }


def firsts(share: float, under: float, over: float, count: int = 400) -> list[float]:
    """`count` first tokens: this share of them `under` seconds, the others `over`."""
    met = round(share * count)
    return [under] * met + [over] * (count - met)
