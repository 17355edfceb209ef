"""A service whose engine, server or parent dies, hangs or is stopped under load: who waits hears of
it, and no orphan.

The harness is tests/harness's: real processes, channel and scheduler over a runner that
computes nothing. Bounds of seconds tell here that nothing hangs; `make reliability`, which has the
machine to itself and breaks each part in every way, holds the issue's.
"""

from __future__ import annotations

import os
import re
import select
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from deaths import Outcome, Waiters, drain, loop
from fake_runner import LONG, LONG_SECONDS, Orders, expected
from service import COMPLETIONS, Serving, make_folder, until, wait_until

pytestmark = pytest.mark.torch

QUICK = 1.0  # a step timeout for tests
SLACK = 10.0  # of a machine that runs other things meanwhile


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
            {"servers": 2, "step_timeout": QUICK},
            "completed no step for 1 s though it had work, and was ended",
        ),
    ],
)
def test_a_part_that_dies_ends_all(
    tmp_path: Path, what: str, how: dict[str, Any], said: str
) -> None:
    (outcome,) = loop(tmp_path, what, 1, **how)
    assert outcome.faults(SLACK) == [] and sum(outcome.kinds.values()) == 24
    assert said in outcome.said
    if what == "worker":
        assert outcome.kinds["answered"] >= 1 and outcome.kinds["torn"] >= 1, (
            "the other's get all of their tokens"
        )


def test_a_hang_ends_and_says_where(tmp_path: Path) -> None:
    (outcome,) = loop(tmp_path, "hang_with_lock", 1, step_timeout=QUICK)
    assert outcome.faults(SLACK) == []
    assert "the engine completed no step for 1 s" in outcome.said
    stacks = outcome.said.partition("Timeout (0:00:01.050000)!\n")[2]
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
            assert select.select([ending], [], [], 60)[0] == [ending]
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
        r"penstock: lets (24 )?running requests end, for 30 s at most; a second signal ends it at"
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


def test_a_slow_engine_is_no_hang_and_an_idle_one_neither(tmp_path: Path) -> None:
    words = make_folder(tmp_path, Orders(step_seconds=0.6))
    with Serving(tmp_path, limits={"step_timeout": QUICK}) as serving:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 3, "return_token_ids": True}
        # longer in all than a step may take
        answer = httpx.post(serving.url + COMPLETIONS, json=body, timeout=600)
        assert answer.json()["choices"][0]["token_ids"] == expected([1, 2, 3], 4, words, seed=3)
        assert wait_until(lambda: serving.process.poll() is not None, 1.5 * QUICK) is None


def test_a_step_that_takes_longer_than_is_allowed_but_goes_on_is_no_hang(tmp_path: Path) -> None:
    """Nor for a server that hears of it from another process."""
    words = make_folder(tmp_path, Orders())
    with Serving(tmp_path, servers=2, limits={"step_timeout": QUICK}) as serving:
        assert LONG_SECONDS / LONG < QUICK < LONG_SECONDS
        serving.order(fault="long")
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 3, "return_token_ids": True}
        answer = httpx.post(serving.url + COMPLETIONS, json=body, timeout=600)
        assert answer.json()["choices"][0]["token_ids"] == expected([1, 2, 3], 4, words, seed=3)


def test_three_probes(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with Serving(tmp_path, limits={"step_timeout": 4.0}) as serving:

        def probe(name: str) -> int:
            return httpx.get(f"{serving.url}/health/{name}", timeout=600).status_code

        assert [probe(name) for name in ("live", "ready", "engine")] == [200, 200, 200]
        serving.order(held=True)
        load = Waiters(serving.url, 2)
        until(lambda: probe("engine") == 503)
        state = httpx.get(f"{serving.url}/health/engine").json()
        assert (
            state["alive"] and 1 <= state["seconds_since_step"] < 4 and state["step_timeout"] == 4
        )
        assert [probe(name) for name in ("live", "ready")] == [200, 200]
        serving.order()
        load.join(600)
        assert [kind for kind, _ in load.ends] == ["answered"] * 2 and probe("engine") == 200
