"""PrefixTree against a dict of token tuples. Keys that collide on purpose: it finds less, and never a wrong block."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.schedule.blocks import BlockPool
from penstock.schedule.prefix_tree import NOWHERE, ROOT, PrefixTree, root_of

Chain = tuple[int, ...]  # a word for each block, from the root on


def tokens_of(chain: Chain) -> np.ndarray:
    """[n, 16]: a block whose word is w holds w, w + 1, ..."""
    return np.array(chain, np.int32).reshape(-1, 1) * 100 + np.arange(16, dtype=np.int32)


class Twin:
    """A tree, and of each of its pool's blocks the whole beginning whose KV it holds."""

    def __init__(self, num_blocks: int, keys: int = 0) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, np.zeros((num_blocks, 16), np.int32))
        self.holds: dict[int, Chain] = {}
        self.keys = keys  # so many different keys in all, 0: honest ones
        self.held: list[np.ndarray] = []

    def keys_of(self, chain: Chain) -> list[int]:
        keys = self.tree.keys(self.tree.sums(tokens_of(chain)))
        return [key % self.keys for key in keys] if self.keys else keys

    def match(self, chain: Chain) -> np.ndarray:
        found = self.tree.match(tokens_of(chain), self.keys_of(chain))
        for depth, block in enumerate(found.tolist()):
            assert self.holds[block] == chain[: depth + 1], "a block was found that holds something else"
        return found

    def known(self) -> set[Chain]:
        return {self.holds[block] for block in np.flatnonzero(self.pool.kept).tolist()}

    def admit(self, chain: Chain, use: bool = True) -> int:
        """Shares what is known, makes the rest; gives the number of blocks found. use=False: makes all of it."""
        found = self.match(chain) if use else np.zeros(0, np.int32)
        if len(chain) - found.size > self.pool.available - np.count_nonzero(self.pool.refs[found] == 0):
            return found.size
        self.pool.share(found)
        fresh = self.pool.take(len(chain) - found.size)
        self.tree.slot_token[fresh] = tokens_of(chain)[found.size :]
        self.holds.update({block: chain[: found.size + i + 1] for i, block in enumerate(fresh.tolist())})
        place = self.tree.place_of(found)
        keys, middle = self.keys_of(chain), (found.size + len(chain)) // 2  # as two chunks do
        for a, b in ((found.size, middle), (middle, len(chain))):
            place = self.tree.insert(keys[a:b], fresh[a - found.size : b - found.size].tolist(), place)
        self.held.append(np.concatenate((found, fresh)))
        return found.size

    def check(self) -> None:
        self.tree.check()
        self.pool.check()


def play(twin: Twin, seed: int, events: int) -> int:
    rng = random.Random(seed)
    found = 0
    for _ in range(events):
        chain = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 8)))
        if rng.random() < 0.5:
            found += twin.admit(chain, use=rng.random() < 0.8)
        elif twin.held:
            twin.pool.release(twin.held.pop(rng.randrange(len(twin.held))))
        twin.check()
        twin.match(chain)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_without_evictions_the_longest_known_beginning_is_found(seed: int) -> None:
    rng = random.Random(seed)
    twin = Twin(4000)
    known: set[Chain] = set()
    for _ in range(150):
        chain = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 8)))
        want = next((n for n in range(len(chain), 0, -1) if chain[:n] in known), 0)
        assert twin.match(chain).size == want
        twin.admit(chain)
        known |= {chain[: n + 1] for n in range(len(chain))}
        twin.check()
    assert twin.known() == known and len(twin.tree) == len(known)


@pytest.mark.parametrize("seed", range(8))
def test_evictions_never_lead_to_a_wrong_block(seed: int) -> None:
    twin = Twin(24)
    assert play(twin, seed, 300) > 0
    assert twin.pool.num_blocks - 1 < len(twin.holds) * 2


@pytest.mark.parametrize("keys", [1, 2, 5, 11])
def test_collisions_never_give_foreign_blocks(keys: int) -> None:
    found = 0
    for seed in range(20):
        twin = Twin(random.Random(seed).choice([14, 24, 60]), keys)
        found += play(twin, seed, 200)
    assert found > 0


def test_a_collision_keeps_nothing_behind_it() -> None:
    """The second chain's first key is the first chain's: what follows must not hang behind foreign contents."""
    twin = Twin(40)
    first, second = (1, 7), (2, 7)
    keys = twin.keys_of(first)
    blocks = twin.pool.take(4)
    twin.tree.slot_token[blocks] = np.concatenate((tokens_of(first), tokens_of(second)))
    numbers = blocks.tolist()
    assert twin.tree.insert(keys[:1], numbers[:1], ROOT) > ROOT
    assert twin.tree.insert(keys, numbers[2:], ROOT) == NOWHERE  # forged: the second chain under the first one's keys
    assert twin.tree.match(tokens_of(first), keys).tolist() == numbers[:1]
    assert twin.tree.match(tokens_of(second), keys).size == 0


def test_a_block_used_again_is_not_its_orphan_s_parent() -> None:
    """The parent is evicted and its block holds another beginning; the child must not be found behind that."""
    twin = Twin(40)
    keys = twin.keys_of((1, 7))
    parent, child = twin.pool.take(2).tolist()
    twin.tree.slot_token[[parent, child]] = tokens_of((1, 7))
    twin.tree.insert(keys, [parent, child], ROOT)
    twin.pool.release(np.array([parent], np.int32))
    while parent not in (taken := twin.pool.take(1).tolist()):
        pass
    twin.tree.slot_token[taken] = tokens_of((2,))
    twin.tree.insert(keys[:1], taken, ROOT)  # forged: (2,) under the key of (1,)
    assert twin.tree.match(tokens_of((2, 7)), keys).tolist() == taken


def test_generated_chains_are_those_of_a_prompt() -> None:
    """Blocks that came one by one from several sequences are found by prompts of the same tokens."""
    twin = Twin(60)
    chains = [(1, 2, 3, 4), (1, 2, 5), (6,), (1, 2, 3, 4, 9)]
    blocks, counts, firsts, bases, roots, own = [], [], [], [], [], []
    for chain in chains:
        first = min(2, len(chain) - 1)
        sums = twin.tree.sums(tokens_of(chain[:first]))
        twin.admit(chain[:first]) if first else None
        root = twin.tree.place_of(twin.match(chain[:first])) if first else ROOT
        mine = twin.pool.take(len(chain) - first)
        twin.tree.slot_token[mine] = tokens_of(chain)[first:]
        twin.holds.update({block: chain[: first + i + 1] for i, block in enumerate(mine.tolist())})
        blocks.append(mine)
        counts.append(mine.size)
        firsts.append(first)
        bases.append(int(sums[-1]) if first else 0)
        roots.append(root)
        own.append(mine.tolist())
    twin.tree.insert_chains(np.concatenate(blocks), np.array(counts), np.array(firsts), bases, roots)
    twin.check()
    assert [twin.match(chain).size for chain in chains] == [len(chain) for chain in chains]
    assert twin.match((1, 2, 3, 4, 9)).tolist()[2:4] == own[0], "equal contents stay with their first block"


def test_switched_off_it_keeps_nothing() -> None:
    pool = BlockPool(8)
    tree = PrefixTree(pool, np.zeros((8, 16), np.int32), enabled=False)
    keys = tree.keys(tree.sums(tokens_of((1, 2))))
    blocks = pool.take(2)
    tree.slot_token[blocks] = tokens_of((1, 2))
    tree.insert(keys, blocks.tolist(), ROOT)
    assert len(tree) == 0 and not pool.kept.any() and tree.match(tokens_of((1, 2)), keys).size == 0


def test_chains_of_one_salt_are_not_found_by_another() -> None:
    """Even where somebody made the keys equal: the place before a chain's first block is its salt's."""
    twin = Twin(32)
    chain = (1, 2, 3)
    tokens = tokens_of(chain)
    for salt in (0, 1, 77, 2**62 - 1):
        root, keys = root_of(salt), twin.tree.keys(twin.tree.sums(tokens, base=salt))
        assert twin.tree.match(tokens, keys, root).size == 0
        blocks = twin.pool.take(3)
        twin.tree.slot_token[blocks] = tokens
        place = twin.tree.insert(keys, blocks.tolist(), twin.tree.place_of(blocks[:0], root))
        assert twin.tree.match(tokens, keys, root).tolist() == blocks.tolist() and twin.tree.place_of(blocks) == place
        for other in (0, 1, 77, 2**62 - 1):
            if other != salt:
                assert twin.tree.match(tokens, keys, root_of(other)).size == 0
        twin.tree.check()
    assert len({root_of(salt) for salt in (0, 1, 2, 2**62 - 1)}) == 4 and root_of(2**62 - 1) >= -(2**63)
