"""A batch as large as one may be: 50,000 lines in just under 200 MB. The memory of what runs it
stays as it is.

`python tests/harness/large_batch.py [LINES]`. The client and what looks are in this process,
the service in others.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import batch_client
from batch_client import Asked, Done
from fake_runner import Orders
from service import HANG, Serving, make_folder, own_memory, wait_until

LINES, IDS = 50_000, 764  # ids of a prompt, so that a line takes just under 4,000 bytes
FILE_BYTES = 200 * 10**6  # that a file of so many lines may have
BAD = 10
# MB that a process may grow by. The server was seen to take 22 (lines in flight, rows on their way
# to the disk, a few bytes for each custom_id), the engine 7. The file is 200, and 300 as lists of
# ids: whoever reads it whole or keeps what a line asked for grows by more, and so does who keeps 1
# KB of each line.
MOST_GROWTH = 64
LOOKS, FEWEST_LOOKS = 20, 5  # a second: tried for, and taken


@dataclass
class Large:
    lines: int
    bytes: int = 0
    done: Done = field(default_factory=Done)
    grown: dict[str, float] = field(default_factory=dict)  # process -> MB, at most
    looks: float = 0.0  # at each process's memory, a second
    left: list[str] = field(default_factory=list)
    at_rest: bool = False

    def faults(self) -> list[str]:
        found = list(self.done.faults)
        found += [
            f"{who} grew by {size:.0f} MB" for who, size in self.grown.items() if size > MOST_GROWTH
        ]
        found += [f"files left: {len(self.left)}"] if self.left else []
        found += (
            [f"memory was looked at {self.looks:.1f} times a second"]
            if self.looks < FEWEST_LOOKS
            else []
        )
        return found + ([] if self.at_rest else ["not at rest afterwards"])

    def line(self) -> str:
        sizes = ", ".join(f"{who} {size:+.0f} MB" for who, size in self.grown.items())
        times = f"uploaded in {self.done.upload:.1f} s, run in {self.done.run:.0f}"
        return f"{self.lines:,} lines, {self.bytes / 1e6:.1f} MB: {times}; {sizes} at most"


@contextlib.contextmanager
def _watched(made: Large, pids: dict[str, int]) -> Iterator[None]:
    """Fills `grown` and `looks` while the block runs."""
    ended, looks, began = threading.Event(), 0, time.monotonic()
    before = {who: own_memory(pid) for who, pid in pids.items()}
    made.grown = dict.fromkeys(pids, 0.0)

    def look() -> None:
        nonlocal looks
        while not ended.wait(1 / LOOKS):
            looks += 1
            for who, pid in pids.items():
                made.grown[who] = max(made.grown[who], own_memory(pid) - before[who])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
        made.looks = looks / (time.monotonic() - began)


def run(folder: Path, lines: int = LINES) -> Large:
    orders = Orders(step_seconds=0.001)
    words = make_folder(
        folder, orders, rows=128, num_blocks=8192, longest=1024, batched_tokens=16384
    )
    asked, path, state = (
        Asked(lines=lines, bad=BAD, ids=IDS, compared=20),
        folder / "lines.jsonl",
        folder / "state",
    )
    made = Large(lines, asked.write(path))
    assert 0.98 * FILE_BYTES / LINES < made.bytes / lines <= FILE_BYTES / LINES
    with Serving(folder, state_dir=str(state)) as serving:
        with _watched(made, {"server": serving.process.pid, "engine": serving.engine}):
            made.done = batch_client.run(serving.url, path, asked, words)
        made.left = batch_client.left_behind(state)
        made.at_rest = wait_until(serving.at_rest, HANG) is not None
    return made


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        result = run(Path(place), *map(int, sys.argv[1:]))
    print(result.line())
    print("\n".join(result.faults()) or "as it should")
    sys.exit(bool(result.faults()))
