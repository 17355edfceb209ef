"""`make reliability`: everything that is tried on a service, as one table in docs/reliability.md.
What takes times has the machine to itself; then come the parts that take none, one for each core.

    python tests/reliability/run.py [--only WORD ...] [--quick] [--no-page]

With --only the page's rows of those parts are written anew, the others stay.

A part is a name, what is done, and a function from a folder and a size (1.0: the issue's, less with
--quick) to what came out and what is wrong with it. Parts that are pytest files count what passed.
A new part is a line in PARTS.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
import attacks
import batch_faults
import batch_kills
import build_kills
import bulk_cuts
import cut_streams
import deaths
import flood
import fuzz_schema
import large_batch
import ray_kills
import replica_kills
import slow_readers
import soak

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
SCHEMA_EXAMPLES = 40  # random cases for each operation
DRAWN = 3.0  # times as many inputs as `make test` draws
BEGIN, END = "<!-- made by make reliability: from here", "<!-- to here -->"
Outcome = tuple[str, list[str]]  # what came out, what is wrong with it


@dataclass(frozen=True)
class Part:
    group: str  # load held, faults survived, bad inputs tried
    name: str
    what: str
    run: Callable[[Path, float], Outcome]
    timeless: bool = False  # it takes no times: another may run beside it


class Told(Protocol):
    """What a part's own module says of its run."""

    def line(self) -> str: ...
    def faults(self) -> list[str]: ...


def part(run: Callable[[Path, float], Told]) -> Callable[[Path, float], Outcome]:
    def outcome(folder: Path, size: float) -> Outcome:
        made = run(folder, size)
        return made.line(), made.faults()

    return outcome


def held(folder: Path, size: float) -> Outcome:
    count, queue = int(10_000 * size), int(2_000 * size)
    made = flood.all_at_once(folder, count, queue, held=True)
    return made.line(), made.faults({200: queue, 429: count - queue})


def cross_talk(folder: Path, size: float) -> Outcome:
    streams = int(21_500 * size)  # 53 tokens each by the mean, of those that are not cut
    tally = cut_streams.run(folder, streams, at_once=500, seed=12, cuts=False)
    return tally.line(), tally.faults() + (
        [] if tally.tokens >= 1_000_000 * size else ["too few tokens were compared"]
    )


def dies(times: int, *kinds: str, **how: Any) -> Callable[[Path, float], Outcome]:
    def run(folder: Path, size: float) -> Outcome:
        rounds = max(1, int(times * size))
        made = [outcome for what in kinds for outcome in deaths.loop(folder, what, rounds, **how)]
        return deaths.summary(made), [fault for outcome in made for fault in outcome.faults()]

    return run


def ranks(**how: Any) -> Callable[[Path, float], Outcome]:
    """Half of them rank 0, which is the engine's process."""

    def run(folder: Path, size: float) -> Outcome:
        made = deaths.rank_loop(folder, max(4, int(20 * size)), **how)
        return deaths.summary(made), [fault for outcome in made for fault in outcome.faults()]

    return run


def drains(folder: Path, size: float) -> Outcome:
    cases = [(servers, second) for servers in (1, 2) for second in (False, True)]
    made = [deaths.drain(folder, servers=servers, second=second) for servers, second in cases]
    return "; ".join(f"{one.what}: {one.kinds}" for one in made), [
        fault for one in made for fault in one.faults()
    ]


def tests(*files: str) -> Callable[[Path, float], Outcome]:
    """Test files of this tree, whose cases are what is tried."""

    def run(folder: Path, size: float) -> Outcome:
        count, _, wrong = _pytest(files, 1)
        return f"{count} cases passed", wrong

    return run


def drawn(*files: str) -> Callable[[Path, float], Outcome]:
    """As tests, of files that draw their inputs: several times as many as `make test` draws, and
    others each time."""

    def run(folder: Path, size: float) -> Outcome:
        count, inputs, wrong = _pytest(files, max(1.0, DRAWN * size))
        return f"{count} cases passed" + (f", {inputs:,} inputs drawn" if inputs else ""), wrong

    return run


def _pytest(files: tuple[str, ...], scale: float) -> tuple[int, int, list[str]]:
    """Cases that passed, inputs that hypothesis drew for them, and what is wrong, with the seed of
    all draws; an input that fails goes to stderr, with the line of hypothesis' that has it drawn
    again."""
    by_name = {name: sorted((ROOT / "tests").glob(name)) for name in files}
    assert all(by_name.values()), (
        f"no test file is called {[name for name, paths in by_name.items() if not paths]}"
    )
    found = [str(path) for paths in by_name.values() for path in paths]
    seed = f"--hypothesis-seed={secrets.randbits(32)}"
    draws = ["--hypothesis-profile=wandering", seed]
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-qp",
            "no:cacheprovider",
            "--hypothesis-show-statistics",
            *draws,
            *found,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PENSTOCK_FUZZ": str(scale), "PENSTOCK_RELIABILITY": "1"},
    )
    last = made.stdout.strip().splitlines()[-1]
    count = re.search(r"(\d+) passed", last)
    inputs = sum(map(int, re.findall(r"^ *- (\d+) passing", made.stdout, re.M)))
    wrong = []
    if made.returncode:
        print(made.stdout, file=sys.stderr)
        wrong = [seed, *(re.findall(r"^(?:FAILED|ERROR) .*", made.stdout, re.M) or [last])]
    return int(count[1]) if count else 0, inputs, wrong


def that_draw() -> list[str]:
    """The test files whose inputs hypothesis draws."""
    tests = ROOT / "tests"
    found = sorted(tests.rglob("test_*.py"))
    return [
        str(path.relative_to(tests))
        for path in found
        if "from hypothesis import" in path.read_text()
    ]


def at_length() -> list[str]:
    """The test files with tests that `make test` leaves out, but for those that are a part of their
    own."""
    found = sorted((ROOT / "tests").glob("*/**/test_*.py"))
    own = ("on_ray/test_ray.py", "server/api_server/test_serve.py")
    names = [
        str(path.relative_to(ROOT / "tests"))
        for path in found
        if "from at_length import" in path.read_text()
    ]
    return [name for name in names if name not in own]


HUNG = {"step_timeout": 1.0}
PARTS = (
    Part(
        "load held",
        "burst, held",
        "10,000 requests at once, a queue of 2,000, no step meanwhile",
        held,
    ),
    Part(
        "load held",
        "burst",
        "10,000 requests at once, a queue of 2,000",
        part(
            lambda folder, size: flood.all_at_once(
                folder, int(10_000 * size), int(2_000 * size), held=False
            )
        ),
    ),
    Part(
        "load held",
        "overload",
        "ten times what it can do, 2 minutes",
        part(lambda folder, size: flood.overload(folder, 120 * size)),
    ),
    Part(
        "load held",
        "slow readers",
        "200 that hardly read beside 50 that do",
        part(lambda folder, size: slow_readers.run(folder, tokens=max(100, int(400 * size)))),
    ),
    Part(
        "load held",
        "attacks",
        "small requests that could hold everybody, 15 s each; a bystander's p99 of health, plain,"
        " form and chat in ms",
        part(lambda folder, size: attacks.run(folder, max(4.0, 15 * size))),
    ),
    Part("load held", "cross-talk", "500 in parallel, with aborts and preemption", cross_talk),
    Part(
        "load held",
        "large batch",
        "50,000 lines, 200 MB, ten of them bad; memory grows by 64 MB at most",
        part(lambda folder, size: large_batch.run(folder, int(large_batch.LINES * size))),
    ),
    Part(
        "load held",
        "soak",
        "2 minutes of whole answers, streams, cuts, batches; `make soak` takes 60",
        part(lambda folder, size: soak.soak(folder, 2 * size)),
    ),
    Part(
        "load held",
        "at length",
        "tests too long for `make test`, or of times: benchmarks from end to end, a client's figures",
        tests(*at_length()),
    ),
    Part(
        "faults survived",
        "cut streams",
        "2,000 requests cut at random states",
        part(lambda folder, size: cut_streams.run(folder, int(2_000 * size), seed=11)),
    ),
    Part(
        "faults survived",
        "cut bulk",
        "400 bodies of up to 200 lines, most cut or read slowly, with broken lines",
        part(lambda folder, size: bulk_cuts.run(folder, int(400 * size), seed=13)),
    ),
    Part(
        "faults survived", "engine killed", "kill -9 of the engine under load", dies(20, "engine")
    ),
    Part("faults survived", "server killed", "kill -9 of the server", dies(20, "server")),
    Part(
        "faults survived",
        "parent killed",
        "kill -9 of the parent of two servers",
        dies(20, "parent", servers=2),
    ),
    Part(
        "faults survived",
        "worker killed",
        "kill -9 of one of two servers; the other's end",
        dies(3, "worker", servers=2),
    ),
    Part(
        "faults survived", "drain", "SIGTERM under load, once and twice, one server and two", drains
    ),
    Part(
        "faults survived",
        "one of two killed",
        "kill -9 of the engine of two servers",
        dies(5, "engine", servers=2),
    ),
    Part(
        "faults survived",
        "engine dies",
        "exits, raises in a step, while it is read, out of memory",
        dies(3, *deaths.FAULTS),
    ),
    Part(
        "faults survived",
        "engine hangs",
        "in Python, with the lock held, SIGSTOP; step timeout 1 s",
        dies(3, *deaths.HANGS, **HUNG),
    ),
    Part(
        "faults survived",
        "hangs, two servers",
        "the same behind two servers",
        dies(1, *deaths.HANGS, servers=2, **HUNG),
    ),
    Part(
        "faults survived",
        "ranks killed",
        "kill -9 of one of two ranks of the demo model at random moments",
        ranks(),
    ),
    Part(
        "faults survived",
        "ranks hang",
        "SIGSTOP of one of two ranks; step timeout 1 s",
        ranks(**HUNG),
    ),
    Part(
        "faults survived",
        "replicas",
        "20 x kill -9 and 20 x SIGSTOP of one of two replicas at random moments, 3 rolling"
        " restarts",
        part(
            lambda folder, size: replica_kills.run(
                folder, max(4, int(20 * size)), max(1, int(3 * size))
            )
        ),
    ),
    Part(
        "faults survived",
        "one request fails",
        "our own code raises at it",
        tests("server/api_server/test_failed_requests.py"),
        timeless=True,
    ),
    Part(
        "faults survived",
        "batch killed",
        "kill -9 at 200 random points of a batch of 5,000 lines, good and bad",
        part(
            lambda folder, size: batch_kills.kill_and_resume(
                folder, kills=int(200 * size), lines=int(5_000 * size)
            )
        ),
    ),
    Part(
        "faults survived",
        "build killed",
        "kill -9 at random points of each stage of a build, twice on its way",
        part(lambda folder, size: build_kills.run(folder, max(1, int(4 * size)))),
        timeless=True,
    ),
    Part(
        "faults survived",
        "job on Ray killed",
        "kill -9 of a worker or the driver at 10 random moments",
        part(lambda folder, size: ray_kills.run(folder, max(2, int(10 * size)))),
    ),
    Part(
        "faults survived",
        "service on Ray",
        "from zero and back under load, a batch that outlives its replica, a start that fails",
        tests("on_ray/test_ray.py"),
    ),
    Part(
        "faults survived",
        "disk fails",
        "kills and faults at each open, read, write, sync, ... of a batch: good, bad, nameless,"
        " cancelled lines",
        part(lambda folder, size: batch_faults.try_all(folder, 30, every=1 if size == 1.0 else 10)),
    ),
    Part(
        "faults survived",
        "disk fails, upload",
        "open, write, sync, rename, row of an upload, each at its k-th call",
        tests("server/batch/test_disk_faults.py"),
        timeless=True,
    ),
    Part(
        "faults survived",
        "journal",
        "cut at every byte, each byte of 4 KB spoilt in seven ways, killed, full",
        drawn("test_journal*.py", "server/batch/test_output_files.py"),
        timeless=True,
    ),
    Part(
        "bad inputs tried",
        "requests",
        "bodies, fields, paths, headers, keys, connections",
        tests(
            "server/openai/test_bad_input*.py",
            "server/online/test_auth.py",
            "server/api_server/test_http_protocol.py",
        ),
        timeless=True,
    ),
    Part(
        "bad inputs tried",
        "drawn",
        "bodies, uploads, batches, lines, a model's files, messages; all that tests draw",
        drawn(*that_draw()),
        timeless=True,
    ),
    Part(
        "bad inputs tried",
        "schema",
        "schemathesis: data that fits and that doesn't, every operation",
        part(lambda folder, size: fuzz_schema.run(folder, max(2, int(SCHEMA_EXAMPLES * size)))),
        timeless=True,
    ),
    Part(
        "bad inputs tried",
        "forms",
        "1,000 answers over 50 JSON schemas, judged by jsonschema; regexes, choices by re",
        tests("llm/test_structured_outputs.py"),
        timeless=True,
    ),
    Part(
        "bad inputs tried",
        "real clients",
        "openai (files, batches, tools too), lm_eval against transformers, curl, langchain,"
        " pydantic-ai",
        tests(
            "server/openai/test_official_client.py",
            "server/openai/test_tools.py",
            "server/openai/test_responses.py",
            "server/openai/test_agent_clients.py",
            "server/batch/test_files.py",
            "server/batch/test_batches.py",
            "server/api_server/test_serve.py",
        ),
        timeless=True,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts whose name has one of these words"
    )
    parser.add_argument("--quick", action="store_true", help="a twentieth of each")
    parser.add_argument("--no-page", action="store_true", help="print the table alone")
    asked = parser.parse_args()
    # a shell's background job ignores it, and so would tests
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = [
        part for part in PARTS if not asked.only or any(word in part.name for word in asked.only)
    ]
    missing = fuzz_schema.missing()
    if missing and any(part.name in ("schema", "real clients") for part in chosen):
        parser.error(f"{' and '.join(missing)} must be there: pip install -e '.[reliability]'")
    began = time.monotonic()
    made = _tried(chosen, 0.05 if asked.quick else 1.0)
    if not (asked.no_page or asked.quick):
        _write([row for row, _ in made], None if asked.only else time.monotonic() - began)
    return not all(well for _, well in made)


def _tried(parts: list[Part], size: float) -> list[tuple[str, bool]]:
    """The row of each part, in their order, and whether all of it was as it should be."""

    def tried(part: Part) -> tuple[str, bool]:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said, wrong = part.run(Path(folder), size)
            except Exception as error:  # noqa: BLE001  # a fault of one part is its row, and the others are tried all the same
                traceback.print_exc()
                said, wrong = "the trial itself failed", [f"{type(error).__name__}: {error}"]
        seconds = time.monotonic() - started
        verdict = "as it should" if not wrong else "; ".join(wrong[:3])
        row = f"| {part.group} | {part.name} | {part.what} | {said} | {verdict} | {seconds:.0f} |"
        print(row, flush=True)
        return row, not wrong

    made = [(part, tried(part)) for part in parts if not part.timeless]
    timeless = [part for part in parts if part.timeless]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made += zip(timeless, pool.map(tried, timeless), strict=True)
    return [each for _, each in sorted(made, key=lambda one: parts.index(one[0]))]


def _write(rows: list[str], seconds: float | None) -> None:
    """Into the page: a whole table where all parts ran, in so many seconds; else these rows in the
    one there is."""
    before, rest = PAGE.read_text().split(BEGIN)
    mark, rest = rest.split("\n", 1)
    table, after = rest.split(END, 1)
    if seconds is None:
        for row in rows:
            known = re.compile("^" + re.escape(" | ".join(row.split(" | ")[:2])) + r" \|.*$", re.M)
            table, found = known.subn(lambda _, row=row: row, table)  # type: ignore[misc]
            if not found:  # a new part's comes behind the last of its group
                group = row.split(" | ")[0]
                at = table.rindex("\n" + group + " | ") + 1
                end = table.index("\n", at) + 1
                table = table[:end] + row + "\n" + table[end:]
    else:
        head = (
            "| | part | what is done | what came out | verdict | s |\n| --- | --- | --- | --- | ---"
            " | --- |"
        )
        where = (
            f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python"
            f" {platform.python_version()}"
        )
        when = datetime.now(UTC).date().isoformat()
        table = (
            f"\n{when}, {where}, {seconds / 60:.0f} minutes in all.\n\n{head}\n"
            + "\n".join(rows)
            + "\n\n"
        )
    PAGE.write_text(f"{before}{BEGIN}{mark}\n{table}{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
