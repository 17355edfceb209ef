"""PrefixTree against a dict of token tuples."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.schedule.blocks import BlockPool
from penstock.schedule.prefix_tree import PrefixTree, words_of

Chain = tuple[int, ...]  # a word for each block, from the root on


def tokens_of(chain: Chain) -> np.ndarray:
    """[n, 16]: a block whose word is w holds w, w + 1, ..."""
    return np.array(chain, np.int32).reshape(-1, 1) * 100 + np.arange(16, dtype=np.int32)


class Twin:
    """A tree, and of each of its pool's blocks the whole beginning whose KV it holds."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, np.zeros((num_blocks, 16), np.int32))
        self.holds: dict[int, Chain] = {}
        self.held: list[np.ndarray] = []

    def match(self, chain: Chain) -> tuple[np.ndarray, int]:
        found, place = self.tree.match(words_of(tokens_of(chain)), 0)
        for depth, block in enumerate(found.tolist()):
            assert self.holds[block] == chain[: depth + 1], (
                "a block was found that holds something else"
            )
        return found, place

    def known(self) -> set[Chain]:
        return {self.holds[block] for block in np.flatnonzero(self.pool.kept).tolist()}

    def admit(self, chain: Chain, use: bool = True) -> int:
        """Shares what is known, makes the rest; gives the number of blocks found. use=False: makes
        all of it."""
        found, place = self.match(chain if use else ())
        if len(chain) - found.size > self.pool.available - np.count_nonzero(
            self.pool.refs[found] == 0
        ):
            return found.size
        self.pool.share(found)
        fresh = self.make(chain, found.size)
        # as two chunks do
        words, middle = (
            words_of(tokens_of(chain)),
            (found.size + len(chain)) // 2,
        )
        for a, b in ((found.size, middle), (middle, len(chain))):
            place = self.tree.insert(
                words[a:b], fresh[a - found.size : b - found.size].tolist(), place
            )
        self.held.append(np.concatenate((found, fresh)))
        return found.size

    def make(self, chain: Chain, first: int) -> np.ndarray:
        """Takes blocks for chain[first:]."""
        fresh = self.pool.take(len(chain) - first)
        self.tree.slot_token[fresh] = tokens_of(chain)[first:]
        self.holds.update({block: chain[: first + i + 1] for i, block in enumerate(fresh.tolist())})
        return fresh

    def check(self) -> None:
        self.tree.check()
        self.pool.check()


@pytest.mark.parametrize("seed", range(8))
def test_without_evictions_the_longest_known_beginning_is_found(seed: int) -> None:
    rng = random.Random(seed)
    twin = Twin(4000)
    known: set[Chain] = set()
    for _ in range(150):
        chain = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 8)))
        want = next((n for n in range(len(chain), 0, -1) if chain[:n] in known), 0)
        assert twin.match(chain)[0].size == want
        twin.admit(chain)
        known |= {chain[: n + 1] for n in range(len(chain))}
        twin.check()
    assert twin.known() == known and len(twin.tree) == len(known)


@pytest.mark.parametrize("seed", range(8))
def test_evictions_and_drops_never_lead_to_a_wrong_block(seed: int) -> None:
    twin, rng, found = Twin(24), random.Random(seed), 0
    for _ in range(300):
        chain = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 8)))
        what = rng.random()
        if what < 0.5:
            found += twin.admit(chain, use=rng.random() < 0.8)
        elif what < 0.97 and twin.held:
            twin.pool.release(twin.held.pop(rng.randrange(len(twin.held))))
        elif what >= 0.97:
            twin.tree.drop(twin.match(chain)[0][:1])
            assert twin.match(chain)[0].size == 0
        twin.check()
        twin.match(chain)
    assert found > 0 and twin.pool.num_blocks - 1 < len(twin.holds) * 2


def test_a_block_used_again_is_not_its_orphan_s_parent() -> None:
    """The parent is evicted, comes back in another block, and the child isn't found behind what
    took its block."""
    twin = Twin(40)
    twin.admit((1, 7))
    parent, child = twin.held.pop().tolist()
    twin.pool.release(np.array([parent], np.int32))
    while parent not in (taken := twin.pool.take(1).tolist()):
        pass
    twin.holds[parent] = (2,)
    twin.tree.insert(words_of(tokens_of((2,))), taken, 0)
    assert twin.match((2, 7))[0].tolist() == taken and twin.match((1, 7))[0].size == 0
    assert twin.pool.kept[child]
    twin.check()


def test_generated_chains_are_those_of_a_prompt() -> None:
    """Blocks that came one by one from several sequences are found by prompts of the same
    tokens."""
    twin = Twin(60)
    chains = [(1, 2, 3, 4), (1, 2, 5), (6,), (1, 2, 3, 4, 9)]
    made, places = [], []
    for chain in chains:
        first = min(2, len(chain) - 1)
        twin.admit(chain[:first])
        places.append(twin.match(chain[:first])[1])
        made.append(twin.make(chain, first))
    twin.tree.insert_chains(np.concatenate(made), np.array([own.size for own in made]), places)
    twin.check()
    assert [twin.match(chain)[0].size for chain in chains] == [len(chain) for chain in chains]
    assert twin.match(chains[3])[0].tolist()[2:4] == made[0].tolist(), (
        "equal contents stay with their first block"
    )


def test_chains_of_one_salt_are_not_found_by_another() -> None:
    twin = Twin(32)
    words = words_of(tokens_of((1, 2, 3)))
    salts = (0, 1, 77, 2**62 - 1)
    for salt in salts:
        assert twin.tree.match(words, -salt)[0].size == 0
        blocks = twin.pool.take(3).tolist()
        place = twin.tree.insert(words, blocks, -salt)
        found, behind = twin.tree.match(words, -salt)
        assert found.tolist() == blocks and behind == place
    twin.tree.check()
