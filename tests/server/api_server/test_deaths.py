"""A service whose engine, server or parent dies, hangs or is stopped under load: who waits hears of
it, and no orphan.

The harness is tests/harness's: real processes, channel and scheduler over a runner that
computes nothing. How soon an end comes is not asserted here: `make reliability`, which has the
machine to itself and breaks each part in every way, holds the issue's seconds.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from deaths import Outcome, Waiters, drain, loop
from fake_runner import Orders, expected
from growing_patience import patiently
from service import COMPLETIONS, HANG, Serving, make_folder, until

pytestmark = pytest.mark.torch

SLACK = math.inf  # an end may take any time


@pytest.mark.parametrize(
    ("what", "how", "said"),
    [
        ("exit", {}, "the engine died while serving"),
        ("raise_late", {"servers": 2}, "the engine died while serving"),
        ("memory", {}, "MemoryError: told that the device has no memory left"),
        ("engine", {"servers": 2, "draining": True}, "error: the engine died"),
        ("server", {}, ""),
        ("parent", {"servers": 2}, ""),
        (
            "worker",
            {"servers": 2},
            (
                "error: API server 0 of 2 was killed by signal 9 while serving, and the service"
                " with it"
            ),
        ),
        (
            "stop",
            {"servers": 2, "step_timeout": None},
            "completed no step for {} s though it had work, and was ended",
        ),
    ],
)
def test_a_part_that_dies_ends_all(
    tmp_path: Path, what: str, how: dict[str, Any], said: str
) -> None:
    """step_timeout: one that this machine keeps while nothing is broken."""

    def trial(seconds: float) -> Outcome:
        (outcome,) = loop(
            tmp_path, what, 1, **how | ({"step_timeout": seconds} if "step_timeout" in how else {})
        )
        assert said.format(f"{seconds:g}") in outcome.said
        return outcome

    outcome = patiently(trial) if "step_timeout" in how else trial(math.inf)
    assert outcome.faults(SLACK) == [] and sum(outcome.kinds.values()) == 24
    if what == "worker":
        assert outcome.kinds["answered"] >= 1 and outcome.kinds["torn"] >= 1, (
            "the other's get all of their tokens"
        )


def test_a_hang_ends_and_says_where(tmp_path: Path) -> None:
    def trial(seconds: float) -> tuple[Outcome, str]:
        (outcome,) = loop(tmp_path, "hang_with_lock", 1, step_timeout=seconds)
        return outcome, f"the engine completed no step for {seconds:g} s"

    outcome, said = patiently(trial)
    assert outcome.faults(SLACK) == [] and said in outcome.said
    stacks = re.split(r"Timeout \(0:\d\d:\d\d(?:\.\d+)?\)!\n", outcome.said, maxsplit=1)[1]
    assert stacks.startswith("Thread 0x") and "in fetch" in stacks


def test_a_stopped_engine_goes_with_a_killed_server(tmp_path: Path) -> None:
    """Its standard input ends, but no thread of it runs to see that:
    the kernel's signal ends it."""
    make_folder(tmp_path)
    with Serving(tmp_path) as serving:
        os.kill(serving.engine, signal.SIGSTOP)
        os.kill(serving.process.pid, signal.SIGKILL)
        ending = os.pidfd_open(serving.engine)
        try:
            assert select.select([ending], [], [], HANG)[0] == [ending]
        finally:
            os.close(ending)


@pytest.mark.parametrize(
    ("servers", "number", "second"), [(1, signal.SIGTERM, True), (2, signal.SIGHUP, False)]
)
def test_a_signal_drains_and_a_second_ends(
    tmp_path: Path, servers: int, number: int, second: bool
) -> None:
    outcome = drain(tmp_path, servers=servers, number=number, second=second)
    assert outcome.faults(SLACK) == []
    line = (
        r"penstock: lets (24 )?running requests end, for 600 s at most; a second signal ends it at"
        r" once\n?"
    )
    begun = r"penstock: \S+: 64 rows and contexts of 512 fit\n"
    begun += r"penstock: listens on \S+, keys: none, for this machine alone\n"
    assert re.fullmatch(begun + line, outcome.said), outcome.said


def test_the_harness_sees_what_is_wrong() -> None:
    late = Outcome(
        "kill", told=2.5, ended=5.5, code=0, left=1, said="", kinds={"nothing": 1, "error": 3}
    )
    assert len(late.faults()) == 4
    assert (
        Outcome("kill", told=0.1, ended=0.2, code=1, left=0, said="", kinds={"error": 4}).faults()
        == []
    )
    assert (
        Outcome("kill", told=0.1, ended=0.2, code=1, left=0, said="", kinds={"torn": 4}).faults()
        != []
    )
    assert (
        len(Outcome("SIGTERM, twice", 2.5, 2.6, 1, 0, "", {"error": 23, "torn": 1}).faults()) == 3
    )


def answers(serving: Serving, words: list[int]) -> None:
    """Whether a request of four tokens gets them."""
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 3, "return_token_ids": True}
    answer = httpx.post(serving.url + COMPLETIONS, json=body, timeout=HANG)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected([1, 2, 3], 4, words, seed=3)


def test_a_slow_engine_is_no_hang_and_an_idle_one_neither(tmp_path: Path) -> None:
    def trial(seconds: float) -> None:
        words = make_folder(tmp_path, Orders(step_seconds=0.4 * seconds))
        with Serving(tmp_path, limits={"step_timeout": seconds}) as serving:
            answers(serving, words)  # longer in all than a step may take
            time.sleep(1.5 * seconds)
            answers(serving, words)

    patiently(trial)


def test_a_step_that_takes_longer_than_is_allowed_but_goes_on_is_no_hang(tmp_path: Path) -> None:
    """Nor for a server that hears of it from another process."""

    def trial(seconds: float) -> None:
        words = make_folder(tmp_path, Orders())
        with Serving(tmp_path, servers=2, limits={"step_timeout": seconds}) as serving:
            serving.order(fault="long", long_seconds=2 * seconds)
            answers(serving, words)

    patiently(trial)


def test_three_probes(tmp_path: Path) -> None:
    def trial(seconds: float) -> None:
        make_folder(tmp_path)
        allowed = 4 * seconds
        with Serving(tmp_path, limits={"step_timeout": allowed}) as serving:

            def probe(name: str) -> int:
                return httpx.get(f"{serving.url}/health/{name}", timeout=HANG).status_code

            assert [probe(name) for name in ("live", "ready", "engine")] == [200, 200, 200]
            serving.order(held=True)
            load = Waiters(serving.url, 2)
            until(lambda: probe("engine") == 503 or serving.process.poll() is not None)
            assert serving.process.poll() is None
            state = httpx.get(f"{serving.url}/health/engine", timeout=HANG).json()
            assert state["alive"] and seconds <= state["seconds_since_step"] < allowed
            assert state["step_timeout"] == allowed
            assert [probe(name) for name in ("live", "ready")] == [200, 200]
            serving.order()
            load.join(HANG)
            assert [kind for kind, _ in load.ends] == ["answered"] * 2 and probe("engine") == 200

    patiently(trial)
