"""Figures of one client run by three definitions: Penstock's, vLLM's, and the null server's stamps.

    of_samples    Penstock's samples, by both definitions
    of_file       figures that vLLM's client printed
    by_stamps     the null server's own times
    of_figures    a record's figures as rows

Times in milliseconds. Knows columns and files; clients_compared.py runs the clients.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from timed_server import read_stamps

from penstock.almanac.figures import point_of
from penstock.almanac.record import ClientHealth, Figures
from penstock.almanac.samples import OK, Samples
from penstock.almanac.throughput import issued

QUANTILES = (0.5, 0.95, 0.99)
WARM = 0.2  # of a run: before it our steady window isn't open
ROWS = [f"{time} p{round(100 * q)} ms" for time in ("first", "gap", "token") for q in QUANTILES]
ROWS += ["requests/s", "output tok/s", "sent late p99 ms", "cached tokens a request"]


def spread(name: str, seconds: np.ndarray) -> dict[str, float]:
    return {f"{name} p{round(100 * q)} ms": 1e3 * float(np.quantile(seconds, q)) for q in QUANTILES}


def of_samples(
    samples: Samples, rate: float | None, users: int | None
) -> dict[str, dict[str, float]]:
    """Returns Penstock's figures (from the intended start, in a steady window), and figures by
    vLLM's definitions from the same samples."""
    last = float(issued(samples).max())
    opens = WARM * last
    samples.window = (issued(samples) >= opens) & (issued(samples) < last)
    look = ClientHealth(lag_p99=0.0, busy=0.0, headroom=None, late_p99=0.0, short=False)
    point = point_of(
        samples,
        name="p",
        kind="open" if rate else "closed",
        rate=rate,
        concurrency=users,
        seconds=last - opens,
        opens=opens,
        goals=(),
        look=look,
        marks=(),
    )
    late = {"sent late p99 ms": 1e3 * float(np.quantile(samples.actual - issued(samples), 0.99))}
    return {
        "Penstock": of_figures(point.figures) | late,
        "its samples, vLLM's definitions": by_sending(samples),
    }


def of_figures(figures: Figures) -> dict[str, float]:
    told = {}
    for name, times in (
        ("first", figures.first_token),
        ("gap", figures.inter_token),
        ("token", figures.per_token),
    ):
        if times is not None:
            told |= {f"{name} {q} ms": 1e3 * getattr(times, q).value for q in ("p50", "p95", "p99")}
    for name, rate in (("requests/s", figures.request_rate), ("output tok/s", figures.output_rate)):
        if rate is not None:
            told[name] = rate.value
    return told


def by_sending(samples: Samples) -> dict[str, float]:
    """Returns figures as vLLM defines them: times from the sending, rates over the whole run with
    its tail."""
    done = samples.of(samples.outcome == OK)
    gaps = np.concatenate([np.asarray(each, np.float64) for each in done.gaps])
    answering = np.array([float(np.sum(each, dtype=np.float64)) for each in done.gaps])
    span = float(done.end.max())
    told = spread("first", done.first - done.actual) | spread("gap", gaps)
    told |= spread("token", answering / (done.output_tokens - 1))
    return told | {
        "requests/s": len(done) / span,
        "output tok/s": float(done.output_tokens.sum()) / span,
    }


def of_file(file: Path, times: np.ndarray) -> dict[str, dict[str, float]]:
    """Returns vLLM's figures as its client prints them."""
    told = json.loads(file.read_text())
    if told["completed"] != len(times):
        sys.exit(f"{file}: {told['completed']} of {len(times)} requests")
    named = (("first", "ttft"), ("gap", "itl"), ("token", "tpot"))
    found = {
        f"{ours} p{q} ms": told[f"p{q}_{theirs}_ms"] for ours, theirs in named for q in (50, 95, 99)
    }
    found |= {"requests/s": told["request_throughput"], "output tok/s": told["output_throughput"]}
    if not np.isnan(
        times
    ).any():  # its first one is taken for punctual, since nobody knows when it began
        late = np.array(told["start_times"]) - times
        found["sent late p99 ms"] = 1e3 * float(np.quantile(late - late.min(), 0.99))
    gaps, tokens, prompt = (
        np.mean([len(each) for each in told["itls"]]),
        told["output_lens"],
        told["input_lens"],
    )
    print(
        f"  vLLM: {gaps:.1f} gaps, {np.mean(tokens):.1f} tokens out, {np.mean(prompt):.1f} in",
        file=sys.stderr,
    )
    return {"vLLM": found}


def by_stamps(file: Path) -> dict[str, float]:
    """Returns the null server's own times: the truth, without the network."""
    stamps = read_stamps(file)
    written = [np.array(each.written) for each in stamps]
    span = max(each[-1] for each in written) - min(each.came for each in stamps)
    told = spread("first", np.array([each[0] for each in written]) - [each.came for each in stamps])
    told |= spread("gap", np.concatenate([np.diff(each) for each in written]))
    told |= spread("token", np.array([(each[-1] - each[0]) / (len(each) - 1) for each in written]))
    return told | {"requests/s": len(stamps) / span, "output tok/s": sum(map(len, written)) / span}
