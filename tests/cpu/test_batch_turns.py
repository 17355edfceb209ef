"""Turns and their fairness, and when a batch is expected to end: both without a batch."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from penstock.server.batch import eta
from penstock.server.batch.eta import Eta
from penstock.server.batch.fair_slots import Turns


class Guest:
    """Somebody who takes a turn, and keeps it until told to leave."""

    def __init__(self, turns: Turns, owner: str) -> None:
        self.waived, self.leaves, self.inside = asyncio.Event(), asyncio.Event(), False
        self.task = asyncio.create_task(self._stay(turns, owner))

    async def _stay(self, turns: Turns, owner: str) -> None:
        async with turns.of(owner, self.waived):
            self.inside = True
            await self.leaves.wait()
        self.inside = False


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_free_place_goes_to_the_owner_who_holds_the_fewest() -> None:
    async def play() -> None:
        turns = Turns(2)
        first = [Guest(turns, "a") for _ in range(4)]
        second = [Guest(turns, "b") for _ in range(2)]
        guests = first + second
        await settle()
        assert [guest.inside for guest in guests] == [True, True, False, False, False, False]
        for leaver, inside in ((0, [1, 4]), (1, [4, 2]), (4, [2, 5]), (5, [2, 3]), (2, [3]), (3, [])):
            guests[leaver].leaves.set()
            await settle()
            assert {at for at, guest in enumerate(guests) if guest.inside} == set(inside)

    asyncio.run(play())


@pytest.mark.parametrize("how", ["waived", "cancelled", "cancelled as it is let in"])
def test_who_stops_waiting_takes_no_place(how: str) -> None:
    async def play() -> None:
        turns = Turns(1)
        holder, goner, next_one = (Guest(turns, "a") for _ in range(3))
        await settle()
        if how == "waived":
            goner.waived.set()
            await settle()
            assert goner.inside and holder.inside and not next_one.inside
        elif how == "cancelled":
            goner.task.cancel()
            await settle()
        holder.leaves.set()
        if how == "cancelled as it is let in":
            while holder.inside:
                await asyncio.sleep(0)
            goner.task.cancel()
        await settle()
        assert next_one.inside and goner.inside == (how == "waived")
        for guest in (goner, next_one):
            guest.leaves.set()
        await settle()
        last = Guest(turns, "a")
        await settle()
        assert last.inside and not next_one.inside
        last.leaves.set()
        await last.task

    asyncio.run(play())


def test_an_end_is_expected_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 50_000 + now[0])
    monkeypatch.setattr(eta, "time", clock)
    progress = Eta()
    assert progress.expected_end(100) is None
    assert progress.expected_end(100, 30.0, 50) == 51_060, "before anything is counted, too"
    progress.note(0)
    assert progress.expected_end(100) is None, "nothing is done yet"
    now[0] += 10
    progress.note(20)
    assert progress.expected_end(100) == 51_010 + 40, "80 to go, 2 a second"
    now[0] += 30  # the online load leaves nothing
    assert progress.expected_end(100) == 51_040 + 160, "80 to go, half a one a second"
    now[0] += 3600
    assert progress.expected_end(100) > 50_000 + now[0]
    for _ in range(61):
        now[0] += 1
        progress.note(20)
    assert progress.expected_end(100) is None, "none in the last minute"
    assert progress.expected_end(100, 30.0, 16) == round(50_000 + now[0] + 30 * 80 / 16), "as the scheduler expects"
    assert progress.expected_end(100, 30.0, 200) == 50_000 + now[0] + 30, "no sooner than what is at the engine"
    assert progress.expected_end(100, 30.0, 0) is None and progress.expected_end(100, 0.0, 16) is None
    now[0] += 1
    progress.note(21)
    assert progress.expected_end(100) == pytest.approx(50_000 + now[0] + 79 * 60, abs=79)
    assert progress.expected_end(100, 30.0, 16) == progress.expected_end(100), "by the rate it is later"
    progress.note(70)
    assert progress.expected_end(100) < 50_000 + now[0] + 60, "a wave of lines has ended"
    assert progress.expected_end(100, 60.0, 20) == 50_000 + now[0] + 90, "and the next takes longer than it seems"
