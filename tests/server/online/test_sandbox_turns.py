"""Turns at the sandboxes: what counts as long, and what leaves a sandbox to others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import pytest

from penstock.request import StructuredOutputsParams
from penstock.sandbox.sandbox_process import (
    ChatJob,
    GrammarJob,
    Job,
    Reply,
    TellJob,
    TextJob,
    TokensJob,
)
from penstock.server.online.sandbox_turns import (
    A_PART,
    A_SIGN,
    LONG,
    OF_A_FORM,
    SandboxTurns,
    is_long,
)

Result = TypeVar("Result")


def chat(*contents: Any, **more: Any) -> ChatJob:
    return ChatJob(messages=[{"role": "user", "content": content} for content in contents], **more)


def form(size: int) -> GrammarJob:
    return GrammarJob(StructuredOutputsParams(regex="a" * size))


@pytest.mark.parametrize(
    "job, long",
    [
        (chat("hi"), False),
        (chat("a" * LONG), True),
        (chat("\U0001f600" * (LONG // A_SIGN)), True),
        (chat("a" * (LONG // A_SIGN)), False),
        (chat(*["a"] * (LONG // A_PART)), True),
        (chat([{"type": "text", "text": "a"}] * (LONG // A_PART)), True),
        (
            chat("hi", template_kwargs={str(number): number for number in range(LONG // A_PART)}),
            True,
        ),
        (chat("hi", template_kwargs={"a" * LONG: 1}), True),
        (chat("hi", tools=[{"function": {"description": "a" * LONG}}]), True),
        (TextJob(["a" * (LONG // 2)]), False),
        (TextJob(["a" * (LONG // 2)] * 2), True),
        (TellJob("a" * LONG), False),
        (TellJob("a" * (LONG + 1)), True),
        (TokensJob(bytes(4 * LONG)), False),
        (TokensJob(bytes(4 * LONG + 4)), True),
        (form(LONG // OF_A_FORM), False),
        (form(LONG // OF_A_FORM + 1), True),
    ],
)
def test_what_is_long(job: Job, long: bool) -> None:
    assert is_long(job) == long


class Pool:
    """Does a job when it is told to."""

    def __init__(self) -> None:
        self.going: list[tuple[Job, asyncio.Future[list[Reply]]]] = []

    def run(self, jobs: Sequence[Job]) -> asyncio.Future[list[Reply]]:
        (job,) = jobs
        self.going.append((job, asyncio.get_running_loop().create_future()))
        return self.going[-1][1]

    async def end(self) -> Job:
        job, future = self.going.pop(0)
        future.set_result([Reply(text=str(job))])
        for _ in range(10):
            await asyncio.sleep(0)
        return job


async def plainly(work: Awaitable[Result], /) -> Result:
    return await work


@pytest.mark.parametrize("aside", [False, True])
def test_jobs_that_come_together_leave_a_sandbox_to_others(aside: bool) -> None:
    async def main() -> None:
        turns, pool, short = SandboxTurns(2), Pool(), chat("hi")
        many: list[Job] = [
            chat(str(number) if aside else str(number) * LONG) for number in range(5)
        ]
        made: Any = pool
        run = (
            turns.run_aside(made, many, "many") if aside else turns.run(made, many, "many", plainly)
        )
        all_of_them = asyncio.ensure_future(run)
        for _ in range(10):
            await asyncio.sleep(0)
        assert [job for job, _ in pool.going] == many[:1]
        alone = asyncio.ensure_future(turns.run(made, [short], "one", plainly))
        for _ in range(10):
            await asyncio.sleep(0)
        assert [job for job, _ in pool.going] == [many[0], short]
        pool.going.reverse()
        assert await pool.end() is short and alone.done()
        for each in many[:4]:
            assert await pool.end() is each
        all_of_them.cancel()  # its client has gone
        with pytest.raises(asyncio.CancelledError):
            await all_of_them
        assert turns.every._taken == turns.long._taken == (0, 0) and not turns.every._waiting

    asyncio.run(main())
