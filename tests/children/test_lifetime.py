"""What a process of ours survives: signals that are its parent's, and lines that nobody takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHILD = """
import os, signal, sys
from penstock.children.lifetime import begin_child
begin_child()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
said = os.dup(int(sys.argv[1]))
assert os.open(os.devnull, os.O_RDONLY) > 2
for _ in range(3):
    print("a line", flush=True)
    print("a line", file=sys.stderr)
os.write(said, b"alive")
"""


def end_of_child(**streams: Any) -> tuple[int, bytes]:
    """The exit code of a child whose streams are these, and what it said in the end."""
    read, write = os.pipe()
    command = [sys.executable, "-c", CHILD, str(write)]
    child = subprocess.Popen(command, pass_fds=(write,), stdin=subprocess.DEVNULL, **streams)
    os.close(write)
    with open(read, "rb") as said:
        return child.wait(600), said.read()


def test_a_child_leaves_signals_to_its_parent_and_loses_lines_that_nobody_takes() -> None:
    with open("/dev/full", "w") as full:
        assert end_of_child(stdout=full, stderr=full) == (0, b"alive")
    read, write = os.pipe()
    os.close(read)
    assert end_of_child(stdout=write, stderr=write) == (0, b"alive")
    os.close(write)


def test_descriptors_that_were_closed_at_the_start_are_nobody_elses() -> None:
    assert end_of_child(preexec_fn=lambda: [os.close(number) for number in (1, 2)]) == (0, b"alive")


def test_lines_of_a_full_output_are_told_once(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full, (tmp_path / "error").open("w") as error:
        assert end_of_child(stdout=full, stderr=error) == (0, b"alive")
    told = (
        "penstock: lines of standard output are lost (No space left on device): see that they can"
        " be written"
    )
    assert (tmp_path / "error").read_text().splitlines() == [told, *["a line"] * 3]
