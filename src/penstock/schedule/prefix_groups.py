"""Prefix groups: which running rows are attended together, their shared prefix once.

A fork group's tails share its full blocks. Fork groups whose tables begin with the same blocks (the same few-shot
header, the same system prompt) share those: one level of grouping, chosen so that nearly the most block reads are saved
(the most in 98 of 100 random families, tests/numpy/test_prefix_groups.py). Found from block numbers alone: the prefix
tree gives equal beginnings equal blocks.

    units (fork groups with running tails)       A: 1 2 3 4 (64 tails)   B: 1 2 7 (1 tail)   C: 1 2 8 (1 tail)
    saved by one group over 1 2                  (66 - 1) * 2 = 130
    saved by A alone over 1 2 3 4                63 * 4 = 252, and B with C over 1 2: 1 * 2      -> taken

It knows blocks and counts; no rows' state, no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.schedule.step import Int32

MIN_SHARED_TOKENS = 64  # block reads that grouping must save, in tokens: below it a launch costs more than it saves


@dataclass(slots=True)
class Unit:
    """A fork group with running tails: its slot, its full prefix blocks, its running tails."""

    slot: int
    blocks: Int32
    tails: int


@dataclass(slots=True)
class PrefixGroup:
    """Units that are attended together over `blocks`."""

    blocks: Int32
    slots: list[int]


def pays(tails: int, blocks: int) -> bool:
    """Whether attending `blocks` once for `tails` rows is cheaper than once a row."""
    return (tails - 1) * blocks * BLOCK_SIZE >= MIN_SHARED_TOKENS


def find_groups(units: Sequence[Unit], refs: Int32) -> list[PrefixGroup]:
    """Groups that pay, each unit in at most one. `refs` of the pool: a first block held once has no second unit."""
    alone: list[Unit] = []
    together: dict[int, list[Unit]] = {}
    for unit in units:
        if not unit.blocks.size:
            continue
        first = int(unit.blocks[0])
        if refs[first] > 1:
            together.setdefault(first, []).append(unit)
        else:
            alone.append(unit)
    groups = [g for unit in alone for g in _single(unit)]
    for family in together.values():
        groups += _best(family, 0).groups
    return groups


def _single(unit: Unit) -> list[PrefixGroup]:
    return [PrefixGroup(unit.blocks, [unit.slot])] if pays(unit.tails, unit.blocks.size) else []


@dataclass(slots=True)
class _Plan:
    """A grouping of units: blocks saved, its groups, the units in none, and the tails of all and of those."""

    saved: int
    groups: list[PrefixGroup]
    rest: list[Unit]
    tails: int
    rest_tails: int


def _best(family: list[Unit], depth: int) -> _Plan:
    """A grouping of units that share their first `depth` blocks, from the leaves of their tree to its root.

    At each fork: a group over what all share may open; of each branch it takes either all units, or those that are in
    none of the branch's own groups, whichever saves more.
    """
    if len(family) == 1:
        unit, groups = family[0], _single(family[0])
        saved = (unit.tails - 1) * unit.blocks.size if groups else 0
        return _Plan(saved, groups, [] if groups else family, unit.tails, 0 if groups else unit.tails)
    shared = _common(family, depth)
    parts = [_best(members, shared + 1) for members in _children(family, shared)]
    whole = [part.saved + (part.rest_tails - part.tails) * shared <= 0 for part in parts]  # no worse when taken whole
    taken = sum(part.tails if all_of_it else part.rest_tails for part, all_of_it in zip(parts, whole, strict=True))
    kept = sum(part.saved for part, all_of_it in zip(parts, whole, strict=True) if not all_of_it)
    apart = _Plan(
        sum(part.saved for part in parts),
        [group for part in parts for group in part.groups],
        [unit for part in parts for unit in part.rest],
        sum(part.tails for part in parts),
        sum(part.rest_tails for part in parts),
    )
    together = kept + (taken - 1) * shared
    if not pays(taken, shared) or together < apart.saved:
        return apart
    groups = [g for part, all_of_it in zip(parts, whole, strict=True) if not all_of_it for g in part.groups]
    own = {slot for group in groups for slot in group.slots}
    group = PrefixGroup(family[0].blocks[:shared], [unit.slot for unit in family if unit.slot not in own])
    return _Plan(together, [*groups, group], [], apart.tails, 0)


def _common(family: list[Unit], depth: int) -> int:
    """Leading blocks that all of `family` share; `depth` of them are known to be."""
    shortest = min(unit.blocks.size for unit in family)
    stacked = np.stack([unit.blocks[depth:shortest] for unit in family])
    differs = (stacked != stacked[0]).any(axis=0)
    return depth + (int(np.argmax(differs)) if differs.any() else differs.size)


def _children(family: list[Unit], shared: int) -> list[list[Unit]]:
    """Parts of a family by the block after the `shared` ones; units that end there stand by themselves."""
    parts: dict[int, list[Unit]] = {}
    ended = [[unit] for unit in family if unit.blocks.size == shared]
    for unit in family:
        if unit.blocks.size > shared:
            parts.setdefault(int(unit.blocks[shared]), []).append(unit)
    return [*ended, *parts.values()]
