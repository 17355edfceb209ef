"""More than the queue holds, and readers that don't read, on a whole service: small forms of `make reliability`."""

from __future__ import annotations

from pathlib import Path

import flood
import slow_readers
import soak
from cut_streams import Tally


def test_a_burst_against_a_held_engine(tmp_path: Path) -> None:
    made = flood.all_at_once(tmp_path, 600, 120, held=True)
    assert made.faults({200: 120, 429: 480}) == []


def test_a_burst_against_a_running_engine(tmp_path: Path) -> None:
    made = flood.all_at_once(tmp_path, 600, 120, held=False)
    assert made.faults() == [] and sum(made.statuses.values()) == 600 and made.statuses[200] >= 120


def test_slow_readers_keep_nobody_waiting_and_nothing_behind(tmp_path: Path) -> None:
    made = slow_readers.run(tmp_path, slow=60, normal=10, tokens=60)
    assert made.events == 10 * 59  # every token of the normal ones came
    assert made.faults(most=5.0) == []  # its time is the reliability run's to judge; here nothing may stand still


def test_what_the_runs_call_a_fault() -> None:
    bad = flood.Flood({0: 1, 200: 5}, wrong=1, no_retry_after=1, grown=300 << 20, at_rest=False)
    assert len(bad.faults()) == 5 and len(bad.faults({200: 6})) == 5
    slow = flood.Overload({200: 1, 429: 1}, at_rest=True, peak=100.0, goodput=90.0, refusal_p99=0.06)
    assert len(slow.faults()) == 2
    assert len(slow_readers.Beside(alone=0.02, beside=0.03, grown=300 << 20).faults()) == 3
    rising = [(36.0 * at, float(at)) for at in range(100)]  # a megabyte every 36 s
    leaking = soak.Soak(60, Tally(), {"server": rising, "engine": [(at, 1.0) for at, _ in rising]}, (5, 6))
    assert leaking.faults() == [
        "server grows: +100.0 MB an hour [+100.0, +100.0]", "not at rest afterwards", "descriptors: 5 before, 6 after",
    ]  # fmt: skip
    short = soak.Soak(2, Tally(), {"server": [(at / 36, 30 * size) for at, size in rising]}, at_rest=True)
    assert len(short.faults()) == 1 and short.faults()[0].startswith("server rose by ")
