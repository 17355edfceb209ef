"""Benchmarks run from a shell find what they share with the tests: the folder that they look into
exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_folders_that_benchmarks_look_into_are_there() -> None:
    named = {
        (script.name, folder)
        for script in (ROOT / "benchmarks").rglob("*.py")
        for folder in re.findall(r'"tests" / "(\w+)"', script.read_text())
    }
    assert named and all((ROOT / "tests" / folder).is_dir() for _, folder in named), named
