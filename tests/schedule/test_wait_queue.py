"""The line before the rows: first come, first served; fair between tenants, in tokens; who was here
goes first."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
import pytest
from schedule_drive import EOS, VOCAB, Drive

from penstock.errors import UsageError
from penstock.request import MAX_SALT, Request, SamplingParams
from penstock.schedule.request_state import ForkGroup, RequestState
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.wait_queue import FairQueue


class Asking:
    """Groups in the order in which they come."""

    def __init__(self) -> None:
        self.line = FairQueue()
        self.count = 0

    def group(self, tenant: int = 0, tokens: int = 17) -> ForkGroup:
        ids = np.arange(tokens, dtype=np.int32)
        request = Request(
            request_id=self.count, prompt=ids.tobytes(), sampling=SamplingParams(), tenant=tenant
        )
        live = RequestState.of(request, self.count, 0, 1024, -1)
        self.count += 1
        return ForkGroup(0, live, ids, np.zeros(1, np.int32), tokens)

    def ask(self, tenant: int = 0, tokens: int = 17) -> ForkGroup:
        group = self.group(tenant, tokens)
        self.line.push(group)
        return group

    def go(self, count: int) -> list[int]:
        """The tenants of the next so many, each charged its prompt."""
        return [self.line.pop(self.line.head.tokens.size).live.tenant for _ in range(count)]


def test_one_tenant_is_a_plain_line() -> None:
    """Against a deque, with removals and groups that come back to their place by arrival."""
    random.seed(3)
    asking, twin, gone = Asking(), deque[ForkGroup](), list[ForkGroup]()
    for _ in range(3000):
        what = random.random()
        if what < 0.4:
            twin.append(asking.ask(tokens=random.randint(2, 90)))
        elif what < 0.75 and twin:
            assert asking.line.head is twin[0]
            group = twin.popleft()
            assert asking.line.pop(group.tokens.size) is group
            gone.append(group)
        elif what < 0.85 and gone:
            back = gone.pop(random.randrange(len(gone)))
            asking.line.push(back)
            older = sum(other.live.arrival < back.live.arrival for other in twin)
            twin.insert(older, back)
        elif twin:
            group = random.choice(twin)
            twin.remove(group)
            assert group in asking.line
            asking.line.remove(group)
        assert len(asking.line) == len(twin) and bool(asking.line) == bool(twin)
        assert {id(group) for group in asking.line} == set(map(id, twin))


def test_a_burst_of_one_tenant_does_not_hold_another_up() -> None:
    asking = Asking()
    for _ in range(1000):
        asking.ask(tenant=1)
    assert asking.go(100) == [1] * 100
    for _ in range(5):
        asking.ask(tenant=2)
    assert Counter(asking.go(10)) == {1: 5, 2: 5}
    assert asking.go(20) == [1] * 20


def test_it_is_fair_in_tokens() -> None:
    asking = Asking()
    for _ in range(400):
        asking.ask(tenant=1, tokens=10)
        asking.ask(tenant=2, tokens=30)
        asking.ask(tenant=3, tokens=60)
    counts = Counter(asking.go(300))
    assert [
        abs(counts[tenant] * size - 2000) <= 60 for tenant, size in ((1, 10), (2, 30), (3, 60))
    ] == [True] * 3


def test_nobody_saves_up_while_away() -> None:
    asking = Asking()
    for _ in range(200):
        asking.ask(tenant=1)
    asking.go(100)
    for _ in range(100):
        asking.ask(tenant=2)
    assert Counter(asking.go(20))[2] <= 11


def test_those_that_were_here_go_first() -> None:
    asking = Asking()
    first, second = asking.ask(tenant=1), asking.ask(tenant=1)
    asking.go(2)
    asking.ask(tenant=2)
    asking.line.push(second)
    asking.line.push(first)
    assert [asking.line.pop(1) for _ in range(2)] == [first, second]
    assert asking.go(1) == [2]
    with pytest.raises(IndexError):
        _ = asking.line.head


def test_many_tenants_leave_little() -> None:
    asking = Asking()
    for tenant in range(500):
        asking.ask(tenant=tenant)
    asking.go(500)
    assert not asking.line and not asking.line._given


# -- in the scheduler


def limits(**changed: int) -> SchedulerConfig:
    usual = {
        "num_blocks": 400,
        "max_rows": 2,
        "max_model_len": 256,
        "max_batched_tokens": 64,
        "vocab_size": VOCAB,
    }
    return SchedulerConfig(**{**usual, **changed}, eos_token_ids=tuple(EOS))  # type: ignore[arg-type]


def test_the_scheduler_serves_tenants_in_turn() -> None:
    drive = Drive(limits())
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    many = [drive.submit([1, 2, 3 + number], params, tenant=1) for number in range(20)]
    few = [drive.submit([9, 8, 7 + number], params, tenant=2) for number in range(3)]
    while not all(drive.asked[number].ended for number in few):
        drive.step()
        drive.read()
    assert sum(bool(drive.asked[number].ended) for number in many) <= 6
    drive.finish()


@pytest.mark.parametrize(
    ("first", "second", "shared"), [(0, 0, True), (5, 5, True), (0, 5, False), (5, 6, False)]
)
def test_cached_blocks_are_of_one_salt(first: int, second: int, shared: bool) -> None:
    drive = Drive(limits())
    prompt = list(range(1, 80))
    for salt in (first, second):
        drive.submit(prompt, SamplingParams(n=3, max_tokens=20, ignore_eos=True, seed=1), salt=salt)
        drive.finish()
    assert drive.scheduler.stats()["prefix_hit_tokens"] == (64 if shared else 0)
    # A chat's next turn finds what was generated, where it is of the same salt.
    one = drive.submit(
        prompt[:40], SamplingParams(max_tokens=60, ignore_eos=True, seed=2), salt=first
    )
    drive.finish()
    before = drive.scheduler.stats()["prefix_hit_tokens"]
    made = drive.asked[one].alone[0].tokens
    drive.submit([*prompt[:40], *made, 3], SamplingParams(max_tokens=2, seed=2), salt=second)
    drive.finish()
    assert (drive.scheduler.stats()["prefix_hit_tokens"] - before >= 80) == shared


def test_salts_that_cannot_be() -> None:
    for salt in (-1, MAX_SALT + 1):
        with pytest.raises(UsageError):
            Drive(limits()).submit([1], SamplingParams(), salt=salt)
