"""A run of the tests is like every other: it draws the same inputs, and hears Ctrl-C whatever shell began it."""

from __future__ import annotations

import importlib
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
STARTED_DEAF = """
import runpy, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
runpy.run_path(sys.argv[1])
signal.raise_signal(signal.SIGHUP)
for number in ("INT", "HUP"):
    print(subprocess.run(["sh", "-c", f"kill -{number} $$"]).returncode)
signal.raise_signal(signal.SIGINT)
"""


def test_signals_are_heard_where_a_shell_had_them_ignored() -> None:
    """By what tests start, and Ctrl-C by the tests; a hangup doesn't end them."""
    child = [sys.executable, "-c", STARTED_DEAF, str(CONFTEST)]
    ended = subprocess.run(child, capture_output=True, text=True)
    assert ended.stdout == f"{-signal.SIGINT}\n{-signal.SIGHUP}\n" and "KeyboardInterrupt" in ended.stderr


def test_inputs_wander_where_they_are_asked_to_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they don't hang on what is imported: the constants of sources are drawn too."""
    hypothesis = pytest.importorskip("hypothesis")

    def drawn(profile: str) -> list[int]:
        seen: list[int] = []

        @hypothesis.settings(hypothesis.settings.get_profile(profile), max_examples=60)
        @hypothesis.given(hypothesis.strategies.lists(hypothesis.strategies.integers()))
        def draw(data: list[int]) -> None:
            seen.extend(data)

        draw()
        return seen

    first = drawn("penstock")
    (tmp_path / "source.py").write_text(f"NUMBERS = {[*range(1000, 2000)]}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("source")
    assert drawn("penstock") == first
    assert drawn("wandering") != drawn("wandering")


@pytest.mark.parametrize("again", [False, True])
def test_draws_from_nobodys_generator_begin_anew_with_each_test(again: bool) -> None:
    assert random.random() == random.Random(0).random(), f"the second time: {again}"
