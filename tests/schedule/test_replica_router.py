"""The router: fork groups against every way to share them out, bursts, prefixes,
what it forgets."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from penstock.schedule.replica_router import Router, Share, fill, places_of

PACE = {
    "token_seconds": 1e-5,
    "prompt_token_seconds": 1e-5,
    "step_seconds": 1e-4,
    "mean_output_tokens": 100.0,
}
IDLE = {**PACE, "tokens_left": 0.0, "prompt_tokens_left": 0.0}


def router_of(count: int, blocks: int = 4096, first: int = 0) -> Router:
    made = Router(count, first)
    for replica in range(count):
        made.came_up(replica, blocks)
        made.said(replica, IDLE, 0)
    return made


def prompt_of(number: int, tokens: int = 320) -> list[int]:
    return [number * 7 + i for i in range(tokens)]


def cost(shares: Any, start: list[float], price: list[float], each: float) -> float:
    used = [place for place, share in enumerate(shares) if share]
    return max(start[p] + shares[p] * each for p in used) + sum(price[p] for p in used)


@pytest.mark.parametrize("seed", range(6))
def test_a_group_is_shared_out_as_well_as_by_trying_every_way(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        count, samples, each = draw.randint(1, 4), draw.randint(1, 9), draw.choice([0.1, 1.0, 5.0])
        prefill = draw.choice([0.0, 0.5, 2.0, 20.0])
        start = sorted(prefill + draw.choice([0.0, draw.random() * 10]) for _ in range(count))
        found = fill(start, [prefill] * count, each, samples)
        ways = (
            way
            for way in itertools.product(range(samples + 1), repeat=count)
            if sum(way) == samples
        )
        best = min(cost(way, start, [prefill] * count, each) for way in ways)
        assert sum(found) == samples
        assert cost(found, start, [prefill] * count, each) == pytest.approx(best)


def test_a_part_that_saves_less_than_its_prefill_stays() -> None:
    assert fill([0.1, 0.1], [0.1, 0.1], 0.01, 8) == [8, 0]
    assert fill([0.1, 0.1], [0.1, 0.1], 0.1, 8) == [4, 4]
    assert fill([0.1, 5.1], [0.1, 0.1], 0.1, 8) == [8, 0]
    assert fill([0.1, 0.3], [0.1, 0.1], 0.1, 8) == [5, 3]


def test_a_burst_does_not_pile_up_whatever_was_heard() -> None:
    """Nothing is heard of the engines while 400 requests come, from two processes of which neither
    sees the other's. One replica has what twelve requests take to do, as both know."""
    routers = [router_of(4, first=first) for first in (0, 1)]
    for replica, left in enumerate((0.0, 0.0, 5000.0, 0.0)):
        for router in routers:
            router.said(replica, {**IDLE, "tokens_left": left}, 0)
    sent = [0] * 4
    for number in range(400):
        (share,) = routers[number % 2].route(prompt_of(number), 0, 1, 100.0, range(4))
        routers[number % 2].sent(share, number)
        sent[share.replica] += 1
    assert max(sent) - min(sent) <= 24 and len({*sent[:2], sent[3]}) == 1 and sent[2] < sent[0]
    assert routers[0].route(prompt_of(0), 0, 1, 100.0, [2])[0].replica == 2


def test_what_was_sent_counts_until_it_is_heard_of() -> None:
    router = router_of(2)
    (share,) = router.route(prompt_of(1), 0, 1, 100.0, range(2))
    router.sent(share, 0)
    assert router.drain(share.replica) == pytest.approx(100 * 1e-5 + 319 * 1e-5)
    router.said(share.replica, {**IDLE, "tokens_left": 40.0}, 0)  # said before it came
    assert router.drain(share.replica) == pytest.approx(140 * 1e-5 + 319 * 1e-5)
    router.said(share.replica, {**IDLE, "tokens_left": 90.0}, 1)
    assert router.drain(share.replica) == pytest.approx(90 * 1e-5)


def test_a_prompt_goes_where_its_beginning_lies_until_that_costs_more_than_reading_it() -> None:
    router, prompt = router_of(2), prompt_of(3)
    (first,) = router.route(prompt, 0, 1, 100.0, range(2))
    other = 1 - first.replica
    assert [router.route([*prompt, i], 0, 1, 100.0, range(2))[0].replica for i in range(3)] == [
        first.replica
    ] * 3
    # another salt: nothing is found
    assert router.route(prompt, 5, 1, 100.0, [first.replica])[0].prompt_tokens == 319
    router.sent(Share(first.replica, 1, 200.0, 0), 0)
    assert router.route(prompt, 0, 1, 100.0, range(2))[0].replica == first.replica
    router.sent(Share(first.replica, 1, 200.0, 0), 1)
    assert router.route(prompt, 0, 1, 100.0, range(2))[0].replica == other


def test_a_single_one_is_not_thought_about() -> None:
    """It takes all, and nothing of what it was sent is kept."""
    router = router_of(1)
    assert router.route(prompt_of(1), 0, 50, 10.0, [0]) == [Share(0, 50, 500.0, 320)]
    assert not router._loads[0].cache


def test_one_that_came_up_anew_has_nothing() -> None:
    router, prompt = router_of(2), prompt_of(3)
    (first,) = router.route(prompt, 0, 1, 100.0, [0])
    router.sent(first, 0)
    router.went_down(0)
    router.came_up(0, 4096)
    assert router.drain(0) == 0
    assert router.route(prompt, 0, 1, 100.0, [0])[0].prompt_tokens == 319


def test_its_memory_is_bounded_and_forgets_the_end_of_a_chain_first() -> None:
    router = router_of(2, blocks=30)
    for number in range(50):
        router.route(prompt_of(number, 161), 0, 1, 1.0, [0])
    cache = router._loads[0].cache
    assert len(cache) == 30
    assert [
        router._hit(0, places_of(prompt_of(number, 161), 0))[0] for number in (49, 48, 47, 46)
    ] == [10, 10, 10, 0]
    router.route(prompt_of(70, 81), 0, 1, 1.0, [0])
    assert router._hit(0, places_of(prompt_of(47, 161), 0))[0] == 5


class Modelled:
    """Replicas of one row each token: a clock, a queue of work in seconds and an LRU of prefixes.
    It tells its stats every 0.1 s, as an engine does."""

    def __init__(self, count: int, router: Router | None) -> None:
        self.router = router
        self.busy = [0.0] * count  # until when
        self.cached: list[dict[int, None]] = [{} for _ in range(count)]
        self.hits = self.asked = 0
        self.heard, self.told = [0] * count, 0.0
        self.waits: list[float] = []

    def come(self, now: float, prompt: list[int], tokens: float) -> None:
        replica = 0
        if self.router is not None:
            if now - self.told > 0.1:
                self.tell(now)
            (share,) = self.router.route(prompt, 0, 1, tokens, range(len(self.busy)))
            replica = share.replica
            self.router.sent(share, self.heard[replica])
            self.heard[replica] += 1
        places, cache = places_of(prompt, 0), self.cached[replica]
        hit = next((at for at, place in enumerate(places) if place not in cache), len(places))
        for place in places:
            cache.pop(place, None)
            cache[place] = None
        while len(cache) > 6000:
            del cache[next(iter(cache))]
        self.hits += 16 * hit
        self.asked += len(prompt)
        begin = max(now, self.busy[replica])
        self.busy[replica] = begin + (len(prompt) - 16 * hit) * 1e-5 + tokens * 1e-5
        self.waits.append(begin - now)

    def tell(self, now: float) -> None:
        self.told = now
        assert self.router is not None
        for replica, until in enumerate(self.busy):
            left = max(0.0, until - now) / 1e-5
            self.router.said(replica, {**IDLE, "tokens_left": left}, self.heard[replica])


def test_mixed_load_waits_little_and_finds_as_much_as_one_replica_would() -> None:
    """Half of the requests have one of 20 beginnings of 2,000 tokens; bursts of 8; four replicas at
    nine tenths of what they can do, beside one that has all to itself and time enough."""
    draw = random.Random(3)
    headers = [[1000 * h + i for i in range(2000)] for h in range(20)]
    four, one = Modelled(4, router_of(4, blocks=6000)), Modelled(1, None)
    now = 0.0
    for number in range(6000):
        if number % 8 == 0:
            now += 8 * (0.5 * 300e-5 + 0.5 * 2300e-5 + 150e-5) / 4 * 0.55
        own = [100_000 + number * 400 + i for i in range(300)]
        prompt = [*draw.choice(headers), *own] if draw.random() < 0.5 else own
        four.come(now, prompt, draw.choice([50.0, 150.0, 250.0]))
        one.come(now, prompt, 1.0)
    assert four.hits / four.asked > one.hits / one.asked - 0.05
    waits = sorted(four.waits)
    assert waits[int(0.99 * len(waits))] < 0.25
    assert max(four.busy) - min(four.busy) < 0.1
