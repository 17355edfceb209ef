"""BlockPool against a model of sets and counts, under random operations."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from penstock.errors import CapacityError
from penstock.schedule.blocks import BlockPool
from penstock.schedule.step import SCRATCH_BLOCK


class Model:
    """Which blocks are held how often, which are kept,
    and in which order kept ones came to rest."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.refs: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.rested: list[int] = []  # idle blocks, first to be evicted first
        self.evicted: list[int] = []
        pool.on_evict = lambda blocks: self.evicted.extend(blocks.tolist())

    def take(self, count: int) -> None:
        blocks = self.pool.take(count).tolist()
        assert len(set(blocks)) == count and SCRATCH_BLOCK not in blocks
        gone, self.evicted = self.evicted, []
        assert sorted(gone) == sorted(self.rested[: len(gone)]), (
            "it evicted another than the oldest"
        )
        self.rested = self.rested[len(gone) :]
        self.kept -= set(gone)
        for block in blocks:
            assert not self.refs[block] and block not in self.kept, "it gave a block that is in use"
            self.refs[block] = 1

    def release(self, blocks: list[int]) -> None:
        self.pool.release(np.array(blocks, np.int32))
        empty = []
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block] and block in self.kept:
                empty.append(block)
        self.rested += reversed(empty)

    def share(self, blocks: list[int]) -> None:
        self.pool.share(np.array(blocks, np.int32))
        for block in blocks:
            self.refs[block] += 1
        self.rested = [block for block in self.rested if block not in blocks]

    def keep(self, block: int) -> None:
        self.pool.kept[block] = True
        self.kept.add(block)

    def check(self) -> None:
        self.pool.check()
        held = {block for block, refs in self.refs.items() if refs}
        assert self.pool.held == len(held)
        assert self.pool.available == self.pool.num_blocks - 1 - len(held)
        assert (self.pool.refs[sorted(held)] == [self.refs[b] for b in sorted(held)]).all()
        assert set(np.flatnonzero(self.pool.kept).tolist()) == self.kept


@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    model = Model(BlockPool(rng.choice([2, 5, 17, 150])))
    evictions = 0
    for _ in range(300):
        held = [block for block, refs in model.refs.items() for _ in range(refs)]
        known = sorted(set(held) | set(model.rested))
        choice = rng.random()
        if choice < 0.4:
            before = len(model.rested)
            model.take(rng.randrange(model.pool.available + 1))
            evictions += before - len(model.rested)
        elif choice < 0.7 and held:
            model.release(rng.sample(held, rng.randrange(1, len(held) + 1)))
        elif choice < 0.85 and known:
            model.share(rng.sample(known, rng.randrange(1, len(known) + 1)))
        elif held:
            model.keep(rng.choice(held))
        model.check()
    assert evictions or model.pool.num_blocks == 2


def test_a_chain_is_eaten_from_its_end() -> None:
    pool = BlockPool(5)
    chain = pool.take(4)
    pool.kept[chain] = True
    pool.release(chain)
    assert pool.take(1).tolist() == [chain[3]] and pool.take(1).tolist() == [chain[2]]
    pool.share(chain[:1])  # found again
    assert pool.take(1).tolist() == [chain[1]] and pool.available == 0


def test_it_gives_no_more_than_it_has() -> None:
    pool = BlockPool(4)
    assert pool.take(3).size == 3
    with pytest.raises(CapacityError):
        pool.take(1)
    with pytest.raises(CapacityError):
        BlockPool(1)
