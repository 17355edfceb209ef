"""Prefix groups: rows that attend to a shared prefix together. Attention reads the prefix once for
all rows of a group.

The samples of a fork group share the full blocks of their prompt. Fork groups whose tables begin
with the same blocks (the same few-shot header, the same system prompt) share these blocks. A row is
in at most one prefix group. The choice of groups saves nearly the most time by the device's
measured costs (the most in 98 of 100 random cases, tests/schedule/test_prefix_groups.py). Groups
are found from block numbers alone, since the prefix tree gives equal prefixes equal blocks.

    units (fork groups with running samples)   A: 1 2 3 4 (64 tails)  B: 1 2 7 (1)  C: 1 2 8 (1)
    blocks saved by one group over 1 2       (66 - 1) * 2 = 130
    by A alone over 1 2 3 4                  63 * 4 = 252, and B with C over 1 2: 1 * 2 -> chosen

Knows blocks, counts and costs; no rows' state, no tokens, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.schedule.step import Int32


@dataclass(slots=True, frozen=True, kw_only=True)
class SharingCosts:
    """Savings and costs of grouping in attention, all in one unit. `execute` passes measured
    seconds per layer; the defaults count tokens read. docs/design/prefix_groups.md has the model
    and its figures.

    The attention kernel splits a group's members into tiles; each tile reads the prefix once.
    """

    member_token: float = 1.0  # saved: a row doesn't read one token of the prefix itself
    member: float = 0.0  # spent: a row's own attention is merged with the prefix's
    tile_token: float = 1.0  # spent: a tile reads one token of the prefix
    tile_members: int = 1 << 30
    step: float = 0.0  # spent: once per step with groups

    def saved(self, members: int, tokens: int) -> float:
        """Returns the saving of one group, without the cost per step (`step`); 0 or less: it saves
        nothing."""
        tiles = -(-members // self.tile_members)
        return (
            members * (self.member_token * tokens - self.member) - tiles * self.tile_token * tokens
        )


@dataclass(slots=True)
class Unit:
    """A fork group with running samples: its slot, the full blocks of its prefix, and the number of
    its running samples (tails)."""

    slot: int
    blocks: Int32
    tails: int


@dataclass(slots=True)
class PrefixGroup:
    """Fork groups (units) that attend together to the prefix in `blocks`, and the saving."""

    blocks: Int32
    slots: list[int]
    saved: float


def find_groups(units: Sequence[Unit], refs: Int32, costs: SharingCosts) -> list[PrefixGroup]:
    """Returns the prefix groups that save time, greatest saving first; each unit is in at most one.
    Returns none if together they save less than the cost per step.

    refs: the block pool's reference counts; if a first block has one reference, no other unit
    shares it."""
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
    groups = [g for unit in alone for g in _single(unit, costs)]
    for family in together.values():
        groups += _best(family, 0, costs).groups
    if sum(group.saved for group in groups) <= costs.step:
        return []
    return sorted(groups, key=lambda group: group.saved, reverse=True)


def _single(unit: Unit, costs: SharingCosts) -> list[PrefixGroup]:
    saved = costs.saved(unit.tails, unit.blocks.size * BLOCK_SIZE) if unit.tails > 1 else 0.0
    return [PrefixGroup(unit.blocks, [unit.slot], saved)] if saved > 0 else []


@dataclass(slots=True)
class _Plan:
    """A grouping of units: its saving, its groups, the units without a group (`rest`), and the
    number of running samples of all units and of `rest`."""

    saved: float
    groups: list[PrefixGroup]
    rest: list[Unit]
    tails: int
    rest_tails: int


def _best(family: list[Unit], depth: int, costs: SharingCosts) -> _Plan:
    """Returns a grouping of units that share their first `depth` blocks. It is built from the
    leaves of the tree of their prefixes to the root.

    Where prefixes branch, a group over the blocks shared by all may be made. From each branch it
    takes either all units, or only the units outside the branch's own groups, whichever saves more.
    """
    if len(family) == 1:
        unit, groups = family[0], _single(family[0], costs)
        saved = groups[0].saved if groups else 0.0
        return _Plan(
            saved, groups, [] if groups else family, unit.tails, 0 if groups else unit.tails
        )
    shared = _common(family, depth)
    parts = [_best(members, shared + 1, costs) for members in _children(family, shared)]
    apart = _Plan(
        sum(part.saved for part in parts),
        [group for part in parts for group in part.groups],
        [unit for part in parts for unit in part.rest],
        sum(part.tails for part in parts),
        sum(part.rest_tails for part in parts),
    )
    kept = _kept(parts, apart.tails, shared * BLOCK_SIZE, costs)
    taken = apart.tails - sum(part.tails - part.rest_tails for part in kept)
    saved = costs.saved(taken, shared * BLOCK_SIZE) if taken > 1 else 0.0
    together = saved + sum(part.saved for part in kept)
    if saved <= 0 or together < apart.saved:
        return apart
    groups = [group for part in kept for group in part.groups]
    own = {slot for group in groups for slot in group.slots}
    rest = [unit.slot for unit in family if unit.slot not in own]
    return _Plan(
        together, [*groups, PrefixGroup(family[0].blocks[:shared], rest, saved)], [], apart.tails, 0
    )


def _kept(parts: list[_Plan], tails: int, tokens: int, costs: SharingCosts) -> list[_Plan]:
    """Returns the branches that keep their own groups beside a group over the shared blocks. Each
    branch is decided by itself, by its effect on the number of tiles."""
    kept, taken = [], tails
    for part in parts:
        # samples added to the group if the branch joins as a whole
        more = part.tails - part.rest_tails
        if part.groups and part.saved > costs.saved(taken, tokens) - costs.saved(
            taken - more, tokens
        ):
            kept.append(part)
            taken -= more
    return kept


def _common(family: list[Unit], depth: int) -> int:
    """Returns the number of leading blocks that all of `family` share; the first `depth` are known
    to be shared."""
    shortest = min(unit.blocks.size for unit in family)
    stacked = np.stack([unit.blocks[depth:shortest] for unit in family])
    differs = (stacked != stacked[0]).any(axis=0)
    return depth + (int(np.argmax(differs)) if differs.any() else differs.size)


def _children(family: list[Unit], shared: int) -> list[list[Unit]]:
    """Splits a family by the block after the `shared` ones; a unit that ends there forms its own
    part."""
    parts: dict[int, list[Unit]] = {}
    ended = [[unit] for unit in family if unit.blocks.size == shared]
    for unit in family:
        if unit.blocks.size > shared:
            parts.setdefault(int(unit.blocks[shared]), []).append(unit)
    return [*ended, *parts.values()]
