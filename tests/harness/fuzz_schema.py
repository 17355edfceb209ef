"""Schemathesis, the program as it is, against a whole service over the fake engine: every operation
of /openapi.json, with data that fits its schema and data that doesn't. Judged by its report, and by
our own access log beside it.

It knows the program's command line and report; what they say of the service is its callers'. Needs
the extra `reliability`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fake_runner import Orders
from service import COMPLETIONS, Serving, make_folder, read_metrics, wait_until

KEY = "the-schema's-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REQUEST_SECONDS = 2.0  # the service's own limit, since a body may ask for 65,536 samples
PATIENCE = 20  # seconds after which an answer is a hang
# Further seeds of operations one after another, at most: whether one of them draws an upload that
# fits, a batch of it and a look at that one is luck; most do, with 40 examples.
MORE_SEEDS = 10
# What a context holds, a template takes and several fields mean together stands in no schema:
# fitting data may be refused. That it is refused in the documented way is still checked.
LEFT_OUT = "positive_data_acceptance"
# Not tried: whatever comes behind /sleep waits until somebody wakes the engine up, and the program
# writes no lines of JSON, which `bulk_cuts` does.
NOT_TRIED = ("/sleep", "/v1/bulk")


@dataclass
class Tried:
    """What came out. statuses: of our access log, which leaves probes out. reached: operations that
    found what they were asked for, and did it or (409, a batch that is over) said why not."""

    cases: int = 0
    operations: int = 0  # tried
    described: set[str] = field(default_factory=set)  # what the document has to be tried
    reached: set[str] = field(default_factory=set)
    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    said: str = ""  # by the program
    linked: bool = True  # operations were tried one after another too

    @property
    def broken(self) -> int:
        return sum(count for status, count in self.statuses.items() if status >= 500)

    @property
    def missed(self) -> set[str]:
        """Operations of the API that should have been reached, and were not."""
        return {name for name in self.described - self.reached if self.linked and " /v1/" in name}

    def faults(self) -> list[str]:
        found = list(self.wrong)
        if self.broken:
            found.append(f"{self.broken} x 5xx")
        if self.slowest > PATIENCE:
            found.append(f"an answer took {self.slowest:.0f} s")
        if self.missed:
            found.append(f"never reached: {', '.join(sorted(self.missed))}")
        if self.operations != len(self.described):
            found.append(f"{self.operations} of {len(self.described)} operations were tried")
        return found

    def line(self) -> str:
        counts = ", ".join(
            f"{self.statuses[status]:,} x {status}" for status in sorted(self.statuses)
        )
        said = f"{self.cases:,} cases for {self.operations} operations: {self.broken} x 5xx"
        return f"{said}, the slowest answer {self.slowest:.1f} s; {counts}"


def run(
    folder: Path,
    examples: int,
    *,
    seed: int = 1,
    phases: str = "examples,coverage,fuzzing,stateful",
) -> Tried:
    """So many random cases for each operation and mode,
    beside those that its schema's edges give."""
    make_folder(folder, Orders(step_seconds=0.0005), rows=64, num_blocks=2048, longest=96)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE})
    )
    log = folder / "access.jsonl"
    limits = {"request_seconds": REQUEST_SECONDS, "max_body_bytes": 1_000_000}
    more: dict[str, Any] = {
        "api_key": KEY,
        "state_dir": str(folder / "state"),
        "access_log": str(log),
    }
    with Serving(folder, limits=limits, **more) as service:
        paths = httpx.get(service.url + "/openapi.json", headers=HEADERS).json()["paths"]
        described = {
            f"{method.upper()} {path}"
            for path in paths
            for method in paths[path]
            if path not in NOT_TRIED
        }
        tried = Tried(described=described, linked="stateful" in phases)
        _schemathesis(tried, folder, service.url, examples, seed, phases)
        _look(tried, log)
        for more in range(1, MORE_SEEDS + 1):
            if tried.missed:
                _schemathesis(tried, folder, service.url, examples, seed + more, "stateful")
                _look(tried, log)
        _afterwards(tried, service)
    _look(tried, log)
    return tried


def _look(tried: Tried, log: Path) -> None:
    """At all that the log says so far."""
    tried.statuses.clear()
    for line in map(
        json.loads, log.read_text().split("\n")[:-1]
    ):  # a path may hold other ends of lines
        tried.statuses[line["status"]] += 1
        tried.slowest = max(tried.slowest, line["seconds"])
        if (200 <= line["status"] < 300 or line["status"] == 409) and line["route"] is not None:
            tried.reached.add(f"{line['method']} {line['route'].replace(':path', '')}")


def _schemathesis(
    tried: Tried, folder: Path, url: str, examples: int, seed: int, phases: str
) -> None:
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        url + "/openapi.json",
        "--header",
        f"Authorization: Bearer {KEY}",
        "--mode",
        "all",
        "--phases",
        phases,
        "--checks",
        "all",
        "--exclude-checks",
        LEFT_OUT,
        "--max-examples",
        str(examples),
        "--seed",
        str(seed),
        "--continue-on-failure",
        "--request-timeout",
        str(PATIENCE),
        "--generation-database",
        "none",
        "--suppress-health-check",
        "all",
        "--report-json-path",
        str(report),
        "--no-color",
        "--no-shrink",
        *(word for path in NOT_TRIED for word in ("--exclude-path", path)),
    ]
    wide = {**os.environ, "COLUMNS": "200"}
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=wide)
    tried.said = made.stdout + made.stderr
    if not report.exists() or not report.read_text():
        tried.wrong.append(f"schemathesis said: {tried.said.strip()[-300:]}")
        return
    found = json.loads(report.read_text())
    tried.cases += found["test_cases"]["generated"]
    tried.operations = max(tried.operations, (found["operations"] or {}).get("tested", 0))
    for each in found["failures"]:
        tried.wrong.append(
            f"{each['count']} x {each['title']} at {', '.join(each['operations'])[:200]}"
        )
    tried.wrong += [f"{each['count']} x {each['title']}" for each in found["errors"]]
    if made.returncode and not tried.wrong:
        tried.wrong.append(f"schemathesis ended with {made.returncode}")


def _afterwards(tried: Tried, service: Serving) -> None:
    """It serves as before, and nothing is left of what was asked."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

    def at_rest() -> bool:
        said = read_metrics(
            httpx.get(service.url + "/metrics", headers=HEADERS, timeout=PATIENCE).text
        )
        return all(said.get(f"penstock:{name}", 1.0) == 0.0 for name in names)

    if service.process.poll() is not None:
        tried.wrong.append("the service has ended")
        return
    if wait_until(at_rest, 30) is None:
        tried.wrong.append("something of it still runs")
    answer = httpx.post(
        service.url + COMPLETIONS, json={"prompt": "x"}, headers=HEADERS, timeout=PATIENCE
    )
    if answer.status_code != 200:
        tried.wrong.append(f"a plain request got {answer.status_code} afterwards")


def missing() -> list[str]:
    """Packages of the extra that are not installed."""
    return [
        name
        for name in ("schemathesis", "lm_eval", "langchain_openai", "pydantic_ai")
        if importlib.util.find_spec(name) is None
    ]
