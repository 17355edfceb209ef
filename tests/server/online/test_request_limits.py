"""The queue's arithmetic, on a clock that the test turns: exact bounds, keys' parts, tickets, the
drain's measure."""

from __future__ import annotations

import random

import pytest

from penstock.server.online.api_keys import Key
from penstock.server.online.request_limits import (
    FIRST_WAIT,
    LONGEST_WAIT,
    WINDOW,
    QueueFullError,
    RequestLimits,
    Ticket,
)
from penstock.server.openai.http_errors import HttpError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(name: str, **limits: int) -> Key:
    return Key(name=name, digest="00" * 32, **limits)


def refused(queue: RequestLimits, who: Key | None = None, reqs: int = 1, tokens: int = 1) -> str:
    """How it is refused; empty where there is room."""
    try:
        queue.check(who, reqs, tokens)
    except HttpError as error:
        return f"{error.status} {error.code}"
    return ""


def test_exactly_as_many_as_the_bound() -> None:
    queue = RequestLimits(2000, 10**9)
    tickets, turned_away = [], 0
    for _ in range(10_000):
        try:
            queue.check(None)
            tickets.append(queue.acquire(None, 1, 10))
        except QueueFullError:
            turned_away += 1
    assert (len(tickets), turned_away, queue.refused) == (2000, 8000, 8000)
    tickets[7].release()
    tickets[7].release()
    queue.acquire(None, 1, 10)
    assert refused(queue, None) == "429 queue_full"


def test_samples_count_and_go_one_by_one() -> None:
    queue = RequestLimits(10, 1000)
    ticket = queue.acquire(None, 8, 100)
    assert refused(queue, None, 3, 1) == "429 queue_full"
    ticket.ended(1)
    queue.acquire(None, 3, 1)
    ticket.ended(100)  # more than it has left: no more than that is given back
    assert (queue.reqs.total, queue.tokens.total) == (3, 101)


def test_tokens_are_a_guess_and_then_exact() -> None:
    queue = RequestLimits(100, 1000)
    ticket = queue.acquire(None, 1, 400)
    ticket.adjust(700)
    assert queue.tokens.total == 700
    other = queue.acquire(None, 1, 200)
    with pytest.raises(QueueFullError):
        other.adjust(301)
    other.release()
    assert (queue.tokens.total, queue.reqs.total) == (700, 1)
    ticket.adjust(1)
    assert queue.tokens.total == 1


def test_what_alone_is_larger_than_a_bound_is_taken_alone() -> None:
    queue = RequestLimits(10, 100)
    large = queue.acquire(None, 1024, 5000)
    large.adjust(6000)
    assert refused(queue, None) == "429 queue_full"
    large.release()
    small = queue.acquire(None, 1, 1)
    assert refused(queue, None, 1024, 1) == "429 queue_full"
    small.release()
    assert (queue.reqs.total, queue.tokens.total) == (0, 0)


def test_no_key_keeps_another_out() -> None:
    queue = RequestLimits(100, 10**6, keys=2)
    greedy, modest = key("greedy"), key("modest")
    taken = 0
    while not refused(queue, greedy):
        queue.acquire(greedy, 1, 1)
        taken += 1
    assert taken == 75
    for _ in range(25):
        queue.acquire(modest, 1, 1)
    assert refused(queue, modest, 1, 1) == "429 queue_full"


@pytest.mark.parametrize("keys", [9, 16])
def test_one_of_many_keys_leaves_every_other_a_place(keys: int) -> None:
    queue = RequestLimits(64, 10**6, keys=keys, servers=4)
    while not refused(queue, key("greedy")):
        queue.acquire(key("greedy"), 1, 1)
    for number in range(keys - 1):
        queue.acquire(key(f"modest{number}"), 1, 1)
    assert queue.reqs.total == 16


def test_limits_of_a_key() -> None:
    queue = RequestLimits(100, 1000, keys=1)
    mine = key("mine", max_num_queued_reqs=4, max_num_queued_tokens=50)
    ticket = queue.acquire(mine, 3, 10)
    for reqs, tokens in ((2, 1), (1, 41)):
        assert refused(queue, mine, reqs, tokens) == "429 rate_limit_exceeded"
    for reqs, tokens in ((5, 1), (1, 51)):
        assert refused(queue, mine, reqs, tokens) == "400 key_limit"
    ticket.release()
    queue.acquire(mine, 4, 50)


def test_several_servers_share_the_bounds() -> None:
    taken = 0
    for queue in [RequestLimits(2000, 10**6, servers=3) for _ in range(3)]:
        for _ in range(2000):
            try:
                queue.acquire(None, 1, 1)
                taken += 1
            except QueueFullError:
                pass
    assert taken == 1998


def test_a_keys_limits_over_several_servers() -> None:
    """Nothing within it is refused for ever; beside what it has open, a key gets an equal part of
    it at each server."""
    queue = RequestLimits(2000, 10**6, keys=1, servers=4)
    mine = key("mine", max_num_queued_reqs=8, max_num_queued_tokens=400)
    for reqs, tokens in ((4, 1), (8, 400)):
        ticket = queue.acquire(mine, reqs, tokens)
        assert refused(queue, mine, 1, 1) == "429 rate_limit_exceeded"
        ticket.release()
    for reqs, tokens in ((9, 1), (1, 401)):
        assert refused(queue, mine, reqs, tokens) == "400 key_limit"
    queue.acquire(mine, 1, 50)
    queue.acquire(mine, 1, 50)
    for reqs, tokens in ((1, 0), (0, 1)):
        assert refused(queue, mine, reqs, tokens) == "429 rate_limit_exceeded"
    one = key("one", max_num_queued_reqs=1)  # fewer than there are servers: one at each
    ticket = queue.acquire(one, 1, 1)
    assert refused(queue, one) == "429 rate_limit_exceeded"
    ticket.release()
    queue.acquire(one, 1, 1)


def test_a_text_may_turn_out_longer_than_a_keys_part_of_a_server() -> None:
    queue = RequestLimits(2000, 10**6, keys=1, servers=4)
    mine = key("mine", max_num_queued_tokens=400)
    ticket = queue.acquire(mine, 1, 10)
    ticket.adjust(400)
    assert queue.tokens.total == 400
    with pytest.raises(HttpError) as never:
        ticket.adjust(401)
    assert never.value.code == "key_limit"
    ticket.release()
    assert queue.tokens.total == 0


def test_retry_after_is_the_measured_drain() -> None:
    clock = Clock()
    queue = RequestLimits(100, 10**6, clock=clock)
    tickets = [queue.acquire(None, 1, 1) for _ in range(100)]

    def wait(reqs: int = 1) -> int:
        with pytest.raises(QueueFullError) as full:
            queue.acquire(None, reqs, 1)
        return int(full.value.headers["retry-after"])

    assert wait() == FIRST_WAIT  # nothing has drained yet
    clock.now += WINDOW
    assert wait() == LONGEST_WAIT  # nor in that time
    for _ in range(20):  # two a second for ten seconds
        clock.now += 0.5
        tickets.pop().release()
        tickets.append(queue.acquire(None, 1, 1))
    assert wait() == 5  # a tenth of the queue, at two a second
    assert wait(30) == 15
    clock.now += 100
    assert wait() == LONGEST_WAIT


def test_nothing_leaks_over_random_lives() -> None:
    random.seed(1)
    keys = [None, key("a"), key("b", max_num_queued_reqs=20), key("c", max_num_queued_tokens=100)]
    queue = RequestLimits(50, 500, keys=3)
    open_: list[Ticket] = []
    for _ in range(20_000):
        if open_ and random.random() < 0.5:
            ticket = open_.pop(random.randrange(len(open_)))
            ticket.ended(random.randrange(3))
            ticket.release()
        try:
            ticket = queue.acquire(random.choice(keys), random.randint(1, 9), random.randint(1, 60))
        except HttpError:
            continue
        try:
            ticket.adjust(random.randint(1, 80))
            open_.append(ticket)
        except HttpError:
            ticket.release()
    for ticket in open_:
        ticket.release()
    for pool in (queue.reqs, queue.tokens):
        assert (
            pool.total == 0
            and not pool._held
            and pool.room("new") == pool._own + pool.most - 3 * pool._own
        )
