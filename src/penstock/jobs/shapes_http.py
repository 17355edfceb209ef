"""Works over HTTP: a server in a process of its own (anyone's with OpenAI's completions), and the bench's load.

It knows a command that serves, /health, /metrics and /v1/completions; no engine.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import numpy as np

from penstock.almanac.samples import Samples
from penstock.bench.cores import count_here
from penstock.bench.load import Ask, Load, Seen, run_load
from penstock.bench.serving import HOST, Server
from penstock.bench.target import Target
from penstock.errors import EngineError
from penstock.jobs.shapes_gpu import GpuLog, tree_peak_mib
from penstock.jobs.shapes_llm import rates
from penstock.jobs.shapes_model import Shape
from penstock.jobs.shapes_works import Work, body_of, prompts_of

CONNECTIONS = 256  # streams of one client process at most
IDLE_PATIENCE = 30.0
# Our figure -> the metric's name after the colon; a server may lack some.
METRICS = {
    "generation_tokens": "generation_tokens_total",
    "wasted_tokens": "wasted_tokens_total",
    "steps": "engine_steps_total",
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "preemptions": "num_preemptions_total",
}
_METRIC = re.compile(r"^(?:penstock|vllm):(\w+)(?:\{[^}]*\})? (\S+)$", re.M)


def penstock_command(knobs: dict[str, Any], port: int, options: list[str]) -> list[str]:
    """`penstock serve` with these knobs of Config."""
    words = [sys.executable, "-m", "penstock", "serve", str(knobs["model"]), "--host", HOST, "--port", str(port)]
    for name, value in knobs.items():
        flag = name.replace("_", "-")
        if name == "model" or value is None:
            continue
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words + options


def metrics(server: Server) -> dict[str, float]:
    """Figures of METRICS that this server has."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(server.get("/metrics")):
        found[name] = found.get(name, 0.0) + float(value)
    return {ours: found[theirs] for ours, theirs in METRICS.items() if theirs in found}


def wait_idle(server: Server) -> None:
    """Until no request runs: what was cut has to leave first. Raises EngineError."""
    begin = time.monotonic()
    while any(metrics(server).get(name, 0.0) for name in ("running", "waiting")):
        server.check()
        if time.monotonic() - begin > IDLE_PATIENCE:
            raise EngineError(f"the server is still at work {IDLE_PATIENCE:.0f} s after its clients left")
        time.sleep(0.1)


def run_http(
    server: Server, work: Work, shape: Shape, *, stop: str, problems: str | None, shots: str | None, seconds: float
) -> dict[str, Any]:
    """A work's result over HTTP: a row of figures. Raises EngineError."""
    warm = work.smaller()
    begin = time.monotonic()
    drive(server, warm, prompts_of(warm, shape, problems, shots, "warm"), stop, seconds)
    warmed = time.monotonic() - begin
    wait_idle(server)
    before = metrics(server)
    prompts = prompts_of(work, shape, problems, shots, "run")
    with GpuLog() as log:
        samples, seen = drive(server, work, prompts, stop, seconds)
        after = metrics(server)
    wait_idle(server)
    changed = {name: after[name] - before[name] for name in after if name in before}
    row: dict[str, Any] = {"work": work.name, "way": "http", "shape": shape.name, "warm_up_seconds": round(warmed, 2)}
    row |= figures(work, samples, seen, changed)
    busy, memory = log.between(row.pop("begin"), row.pop("end"))
    peak = tree_peak_mib(server.pid) if memory is None else memory
    return row | {"busy_percent": busy, "busy_by": "nvidia-smi", "peak_memory_mib": peak}


def figures(work: Work, samples: Samples, seen: Seen, changed: dict[str, float]) -> dict[str, Any]:
    """From the samples and what the server's counters rose by. Cut: tokens are the server's, of unfinished ones too."""
    ended = samples.of(samples.outcome == "ok")
    failed = int(np.isin(samples.outcome, ["ok", "unfinished"], invert=True).sum())
    if failed:
        told = next(message for outcome, message in seen.troubles.items() if outcome != "unfinished")
        raise EngineError(f"{work.name}: {failed} of {len(samples)} requests failed: {told}")
    cut = len(ended) < len(samples)
    begin = seen.begin + float(samples.actual.min())
    end = seen.begin + float(ended.end.max()) if not cut else time.monotonic()
    tokens = int(changed.get("generation_tokens", 0)) if cut else int(ended.output_tokens.sum())
    row = rates(tokens, int(ended.prompt_tokens.sum()), len(ended), end - begin)
    row |= {"begin": begin, "end": end, "cut": cut, "preemptions": changed.get("preemptions")}
    computed = changed.get("generation_tokens", 0) + changed.get("wasted_tokens", 0)
    known = not cut and "wasted_tokens" in changed and computed
    row["thrown_away_percent"] = 100.0 * (computed - tokens) / computed if known else None
    steps = changed.get("steps")
    row |= {"steps": steps, "steps_per_second": steps / (end - begin) if steps is not None else None}
    if work.stream and len(ended):
        firsts = np.sort(ended.first - ended.actual)
        row["events_per_second"] = float(samples.events.sum()) / (end - begin)
        row["first_token_ms_p50"] = 1e3 * float(firsts[len(firsts) // 2])
        row["first_token_ms_p99"] = 1e3 * float(firsts[int(0.99 * (len(firsts) - 1))])
    return row


def drive(server: Server, work: Work, prompts: list[Any], stop: str, seconds: float) -> tuple[Samples, Seen]:
    """Posts one body a prompt, all at once, from as many client processes as it takes; after `seconds` the rest is cut.
    A stall is cut then too, for a work's last request may wait as long as the work."""
    bodies = [json.dumps(body_of(work, server.model, prompt, stop)).encode() for prompt in prompts]
    count = min(-(-len(bodies) // CONNECTIONS), max(1, count_here() // 4)) if work.stream else 1
    asks = [Ask(0.0, body, -1, -1) for body in bodies]
    load = Load(asks, None, seconds, seconds + 60, (0.0, seconds), work.stream)
    came = run_load(Target(HOST, server.port), load, point=work.name, start=0, processes=count)
    server.check()
    return came
