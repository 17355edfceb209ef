"""Patterns of stop_when: what is refused before it is compiled, where the rest is searched for, and
what ends it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from penstock.engine.group_stop import GroupStop
from penstock.errors import PenstockError, UsageError
from penstock.request import Delta
from penstock.sandbox import pattern_search
from penstock.sandbox.pattern_search import PatternSearches
from penstock.text.answer_pattern import SLOW, AnswerPattern

QUADRATIC = r"(?:.+.+)(?=\A)"
HELD = r"(a+)\1+\1+$"


def drive(work: Callable[[PatternSearches], Awaitable[None]]) -> None:
    async def main() -> None:
        searches = PatternSearches()
        try:
            await work(searches)
        finally:
            searches.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "pattern",
    [
        "(?x)a{4 0 0 0 0 0 0}b",
        "(?x)a{4#}\n",
        "(?x)a{4#x\n000000}b",
        "(?x: [ab]{ 99 }{9\t9}{9\n9})",
        "(?x)a{1,4 00 000}",
        "(?x)a{4 0 0 0 0 0 0 0 0 0 0 0 0 0}",
        "(?x)a{0#9\n,9#1\n99 99}",
    ],
)
def test_a_bound_is_counted_as_a_verbose_pattern_reads_it(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is compiled: that took 12 s and 1.3 GB."""
    compiled: list[str] = []
    if pattern != "(?x)a{4#}\n":  # a brace that never ends is no bound
        monkeypatch.setattr(
            "penstock.text.answer_pattern.regex.compile", lambda text, flags: compiled.append(text)
        )
        with pytest.raises(UsageError, match="repeats more than 10,000 times"):
            AnswerPattern(pattern)
    else:
        AnswerPattern(pattern)
    assert not compiled


def test_searches_are_a_process_of_their_own() -> None:
    async def work(searches: PatternSearches) -> None:
        await searches.check("a(b+)")
        search = searches.of("a(b+)")
        found = await asyncio.gather(*map(search.find, ("xabb", "x", "ab")))
        assert found == ["bb", None, "b"]
        with pytest.raises(UsageError, match="is no regex that can be served") as refused:
            await searches.check("(")
        assert (
            refused.value.param == "stop_when" and "missing ) at position 1" in refused.value.rule
        )
        (sandbox,) = searches._pool._open
        assert sandbox._process.pid != os.getpid()

    drive(work)


@pytest.mark.parametrize("pattern, text", [(QUADRATIC, "x" * 30_000), (HELD, "a" * 40_000 + "b")])
def test_what_takes_too_long_is_ended_and_the_next_is_served(pattern: str, text: str) -> None:
    async def work(searches: PatternSearches) -> None:
        with pytest.raises(UsageError) as ended:
            await searches.of(pattern).find(text)
        assert (ended.value.rule, ended.value.param) == (f"stop_when.pattern {SLOW}", "stop_when")
        assert await searches.of("[0-9]+").find("a 12") == "12"

    drive(work)


def test_a_process_that_is_ended_from_outside_costs_its_search() -> None:
    async def work(searches: PatternSearches) -> None:
        await searches.check("a")
        (sandbox,) = searches._pool._open
        os.kill(sandbox._process.pid, signal.SIGKILL)
        with pytest.raises(PenstockError):
            await searches.of("a").find("a")
        assert await searches.of("a").find("a") == "a"

    drive(work)


def test_all_searches_of_a_request_have_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these takes less than a search may, and n may be 65,536."""
    monkeypatch.setattr(pattern_search, "BUDGET", 0.02)

    async def work(searches: PatternSearches) -> None:
        search = searches.of(QUADRATIC)
        done = await asyncio.gather(
            *(search.find("x" * 600) for _ in range(64)), return_exceptions=True
        )
        assert done[0] is None or isinstance(done[0], UsageError)
        assert isinstance(done[-1], UsageError) and done[-1].param == "stop_when"

    drive(work)
    pattern = AnswerPattern(QUADRATIC, 0.02)
    with pytest.raises(UsageError, match="takes too long"):
        for _ in range(256):
            pattern.find("x" * 600)


def test_a_group_counts_what_is_found_elsewhere() -> None:
    """One text at a time, in the order of their ends; once enough agree, or it fails, the rest
    isn't looked for."""

    async def main() -> None:
        looked: list[tuple[str, asyncio.Future[str | None]]] = []

        def find(text: str) -> asyncio.Future[str | None]:
            looked.append((text, asyncio.get_running_loop().create_future()))
            return looked[-1][1]

        for failure in (None, UsageError("stop_when.pattern: no", param="stop_when")):
            looked.clear()
            ended: list[bool] = []
            group = GroupStop(find, 2)
            group.on_over(partial(ended.append, True))
            for index in range(4):
                group.hear(Delta(0, index, text=str(index), finish_reason="stop"))
            assert [text for text, _ in looked] == ["0"]
            looked[0][1].set_result("7")
            await asyncio.sleep(0)
            assert [text for text, _ in looked] == ["0", "1"] and not ended
            looked[1][1].set_result("7") if failure is None else looked[1][1].set_exception(failure)
            await asyncio.sleep(0)
            assert ended == [True] and group.over and group.fault is failure and len(looked) == 2

    asyncio.run(main())
