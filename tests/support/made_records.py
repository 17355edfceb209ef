"""Made-up records that are valid: engines, models, GPUs and shapes with plausible curves of latency
against load.

`made_records(2000)` yields records; `write_records(root, 2000)` lays them out as files. Nothing in
them was measured: every run's name begins with "made". Same seed, same records. `rows` is the
length of a point's joint sample: a real record has up to 500; a test of the page's size may want
fewer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import __version__
from penstock.almanac.record import SAMPLE_ROWS, SCHEMA, Record

Floats = npt.NDArray[np.float64]

ENGINES = {
    "penstock": ("0.1.0", 1.0),
    "vllm": ("0.26.0", 0.6),
    "sglang": ("0.6.1", 0.7),
    "trtllm": ("1.3.0", 0.75),
}
MODELS = {
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen3-4B": 4_022_468_096,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.3-70B": 70_553_706_496,
}
GPUS = {
    "NVIDIA L4": (1, 0.08, 0.8),
    "NVIDIA A100-SXM4-80GB": (1, 0.4, 2.0),
    "NVIDIA H100 80GB HBM3": (1, 0.8, 3.5),
    "NVIDIA H200": (1, 1.0, 4.5),
    "NVIDIA H200 x8": (8, 7.0, 34.0),
    "cpu": (0, 0.02, 0.2),
}
SHAPES = ((128, 1024), (1024, 128), (512, 512), (256, 2048), (2048, 256), (1024, 1024), (656, 128))
LOADS = (0.2, 0.5, 0.7, 0.85, 0.95, 1.05)  # open-loop rates over the highest
GOALS = (0.3, 1.0, 3.0)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
KEPT = 1000  # requests a point


def made_records(count: int, seed: int = 0, rows: int = SAMPLE_ROWS) -> Iterator[Record]:
    """Every engine x model x GPU x shape in turn, then the same again on later days with other
    noise."""
    cases = [(e, m, g, s) for s in SHAPES for m in MODELS for g in GPUS for e in ENGINES]
    for number in range(count):
        # 37 and the cases have no common factor
        engine, model, gpu, shape = cases[number * 37 % len(cases)]
        rng = np.random.default_rng([seed, number])
        yield Record.model_validate(_record(rng, number, engine, model, gpu, shape, rows))


def write_records(root: Path, count: int, seed: int = 0, rows: int = SAMPLE_ROWS) -> list[Path]:
    """As the almanac keeps them, under `root`; returns the paths."""
    from penstock.almanac.collect import place_of

    paths = []
    for record in made_records(count, seed, rows):
        path = root / place_of(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record.model_dump_json(by_alias=True))
        paths.append(path)
    return paths


def _record(
    rng: np.random.Generator,
    number: int,
    engine: str,
    model: str,
    gpu: str,
    shape: tuple[int, int],
    rows: int,
) -> dict[str, Any]:
    version, skill = ENGINES[engine]
    day, month = 1 + (number // 840 * 7 + number % 7) % 28, 1 + number // 3360 % 10
    run = "made" + hashlib.sha256(f"{number}".encode()).hexdigest()[:8]
    monkeys = shape == (656, 128)
    size, (gpus, speed, memory) = MODELS[model] / 1e9, GPUS[gpu]
    fits = size * 2 < max(gpus, 1) * {"NVIDIA L4": 24, "cpu": 64}.get(gpu, 80)
    tuned = number % 3 == 0
    curve = _Curve(
        skill * (1.1 if tuned else 1.0) * rng.lognormal(0, 0.05), size, speed, memory, shape
    )
    flags = ["--max-num-seqs 1024"] if tuned else []
    points = _points(rng, curve, rows) if fits else []
    return {
        "schema": SCHEMA,
        "run": run,
        "when": f"2026-{month:02d}-{day:02d}T{number % 24:02d}:{number % 60:02d}:00Z",
        "engine": {
            "name": engine,
            "version": version,
            "commit": None,
            "command": f"{engine} serve {model} --port 8000",
            "configuration": {"name": "tuned" if tuned else "default", "flags": flags},
        },
        "model": {
            "name": model,
            "weights": "random" if number % 5 == 0 else "real",
            "parameters": MODELS[model],
            "dtype": "bf16",
            "source": f"made up for {run}",
        },
        "machine": {
            "gpu": None
            if gpu == "cpu"
            else {
                "name": gpu.removesuffix(" x8"),
                "count": gpus,
                "memory_mib": 143_771,
                "driver": "580.95.05",
                "clocks": "1980 MHz",
            },
            "cpu": "Made-up CPU",
            "cores": 16,
            "memory_mib": 131_072,
            "system": "Linux 6.8",
            "python": "3.11.9",
        },
        "shape": {
            "name": "monkeys" if monkeys else f"{shape[0]}x{shape[1]}",
            "kind": "monkeys" if monkeys else "exact",
            "input": float(shape[0]),
            "output": float(shape[1]),
            "n": 64 if monkeys else 1,
            "temperature": 0.6 if monkeys else 0.0,
            "prompts": "ids",
        },
        "client": {
            "penstock": __version__,
            "command": "penstock bench run --suite almanac",
            "processes": 4,
            "seed": number,
            "ceiling_events": 120_000.0,
            "ceiling_requests": 9_000.0,
        },
        "method": {
            "warm_up": 10.0,
            "window": 60.0,
            "enough": KEPT,
            "starts": 1,
            "quantile": 0.95,
            "goals": list(GOALS),
            "short": number % 11 == 0,
            "price_per_hour": 4.0 * gpus or 0.5,
        },
        "points": points,
        "failures": []
        if fits
        else [
            {
                "point": None,
                "kind": "out of memory",
                "log": "made up: no room for the weights",
                "message": f"{model} does not fit {gpu}",
            }
        ],
        "raw": {"sha256": hashlib.sha256(run.encode()).hexdigest(), "rows": KEPT * len(points)}
        if points
        else None,
    }


class _Curve:
    """How long things take at a load: one queue in front of a batch whose step grows with its
    members."""

    def __init__(
        self, skill: float, size: float, speed: float, memory: float, shape: tuple[int, int]
    ) -> None:
        self.input, self.output = shape
        flops = 400e12 * speed * skill
        self.prefill = 0.01 + 2e9 * size * self.input / flops
        self.token = 0.001 + 2 * size / (1000 * memory) / skill
        self.highest = flops / (2e9 * size * (self.input + 3 * self.output))  # requests a second

    def load_of(self, users: int) -> float:
        """The load at which so many users in turn are in flight:
        rate times time is their number."""
        low, high = 0.0, 1.0
        for _ in range(40):
            load = (low + high) / 2
            wait = self.prefill * (1 + min(load / max(1 - load, 0.02), 50))
            flying = load * self.highest * (wait + self.token * (1 + 4 * load) * (self.output - 1))
            low, high = (load, high) if flying < users else (low, load)
        return low

    def rows(
        self, rng: np.random.Generator, load: float, count: int
    ) -> tuple[Floats, Floats, Floats]:
        """first, per token, end to end of `count` requests at this share of the highest rate; sum
        exactly."""
        wait = self.prefill * min(load / max(1 - load, 0.02), 50)
        # beyond the highest rate the queue grows as long as the window lasts
        wait += 60 * max(load - 1, 0)
        first = self.prefill * rng.lognormal(0, 0.1, count) + wait * rng.gamma(1.5, 1 / 1.5, count)
        token = self.token * (1 + 4 * min(load, 1.0)) * rng.lognormal(0, 0.05, count)
        return first, token, first + token * (self.output - 1)


def _points(rng: np.random.Generator, curve: _Curve, rows: int) -> list[dict[str, Any]]:
    top = curve.highest
    made = [_point(rng, curve, rows, "saturation", "saturation", 1.0, 1.0, None, None)]
    made.append(_point(rng, curve, rows, "single", "single", 0.0, 0.0, None, 1))
    for load in LOADS:
        rate = _short(load * top)
        made.append(
            _point(rng, curve, rows, f"open {rate:.4g}", "open", load, min(load, 1.0), rate, None)
        )
    for users in (4, 16, 64):
        load = curve.load_of(users)
        made.append(_point(rng, curve, rows, f"closed {users}", "closed", load, 0.0, None, users))
    return made


def _point(
    rng: np.random.Generator,
    curve: _Curve,
    rows: int,
    name: str,
    kind: str,
    load: float,
    served: float,
    rate: float | None,
    users: int | None,
) -> dict[str, Any]:
    first, token, end = curve.rows(rng, load, KEPT)
    if kind == "saturation":  # all sent at once: they wait for each other
        first = first + np.sort(rng.uniform(0, KEPT / curve.highest, KEPT))
        end = first + token * (curve.output - 1)
    failed = np.zeros(KEPT, bool)
    if load > 1:
        failed[rng.choice(KEPT, 7, replace=False)] = True
    done, bad = int((~failed).sum()), int(failed.sum())
    seconds = (
        float(end.max())
        if kind == "saturation"
        else KEPT / rate
        if rate
        else KEPT * float(end.mean()) / users
    )
    per_second = served * curve.highest if rate else done / seconds
    keep = np.sort(rng.choice(KEPT, min(rows, KEPT), replace=False))
    columns = {"first": first, "per_token": token, "end_to_end": end}
    spreads = {key: _spread(column[~failed]) for key, column in columns.items()}
    least = max(30.0, 0.0 if kind == "saturation" else 2 * spreads["end_to_end"]["p95"]["value"])
    return {
        "name": name,
        "kind": kind,
        "rate": rate,
        "concurrency": users,
        "seconds": _short(seconds),
        "opens": None if kind in ("saturation", "single") else 10.0,
        "effective": KEPT / 2,
        "requests": KEPT,
        "complete": done,
        "outcomes": {"stalled": bad} if bad else {},
        "output_tokens": done * curve.output,
        "prompt_tokens": done * curve.input,
        "cached_tokens": 0,
        "figures": {
            "request_rate": _around(per_second),
            "output_rate": _around(per_second * curve.output),
            "total_rate": _around(per_second * (curve.input + curve.output)),
            "first_token": spreads["first"],
            "first_token_actual": spreads["first"],
            "inter_token": spreads["per_token"],
            "per_token": spreads["per_token"],
            "end_to_end": spreads["end_to_end"],
            "end_to_end_actual": spreads["end_to_end"],
        },
        "goals": [_goal(first, failed, goal, seconds) for goal in GOALS],
        "client": {
            "lag_p99": 0.002,
            "busy": 0.3,
            "headroom": 6.0,
            "late_p99": 0.001,
            "short": False,
        },
        "marks": ["short window"] if _short(seconds) < least else [],
        "sample": {key: _sample(column, failed, keep) for key, column in columns.items()},
    }


def _spread(values: Floats) -> dict[str, Any]:
    ordered, count = np.sort(values), len(values)
    made = {"mean": _around(float(values.mean()), 1.96 * float(values.std()) / count**0.5)}
    for name, level in QUANTILES.items():
        half = 1.96 * (count * level * (1 - level)) ** 0.5
        ends = int(count * level - half), int(count * level + half)
        low, high = (_short(ordered[at]) if 0 <= at < count else None for at in ends)
        made[name] = {"value": _short(np.quantile(values, level)), "low": low, "high": high}
    return made


def _around(value: float, half: float | None = None) -> dict[str, Any]:
    half = 0.01 * value if half is None else half
    return {
        "value": _short(value),
        "low": _short(max(value - half, 0)),
        "high": _short(value + half),
    }


def _goal(
    first: Floats, failed: npt.NDArray[np.bool_], goal: float, seconds: float
) -> dict[str, Any]:
    met = int(((first <= goal) & ~failed).sum())
    share, z = met / KEPT, 1.96
    middle = (share + z * z / 2 / KEPT) / (1 + z * z / KEPT)
    half = z * ((share * (1 - share) + z * z / 4 / KEPT) / KEPT) ** 0.5 / (1 + z * z / KEPT)
    low, high = max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0)
    return {
        "seconds": goal,
        "share": share,
        "low": low,
        "high": high,
        "goodput": _short(met / seconds),
    }


def _sample(
    column: Floats, failed: npt.NDArray[np.bool_], keep: npt.NDArray[np.int64]
) -> list[float]:
    return [-1.0 if failed[at] else _short(column[at], 5) for at in keep]


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")
