"""Fits the cost model of prefix groups to measured steps, and prices its decisions beside other
rules.

    saved by a group = members * (member_byte * prefix bytes - member * token bytes)
                       - tiles * tile_byte * prefix bytes
    saved by a step  = sum over its groups - step

Bytes are K's and V's of a layer, so that all head shapes share one set of constants: a
MeasuredSharing. Knows times; `prefix_groups.py` measures them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.prefix_cost import MeasuredSharing
from penstock.schedule.prefix_groups import SharingCosts, Unit, find_groups

Shape = tuple[int, int, int]  # heads, KV heads, width
Floats = NDArray[np.float64]
BEFORE_TOKENS = 64  # the rule before this model: a group that saves as many tokens' reading


@dataclass(slots=True, frozen=True)
class Part:
    """Rows that share a prefix; grouped, or each alone."""

    members: int
    tokens: int
    own: int


@dataclass(slots=True)
class Step:
    """A uniform step: its parts, and the milliseconds of a layer's attention, with all rows alone
    and with `room` parts grouped."""

    shape: Shape
    tile_members: int
    room: int
    parts: list[Part]
    alone: float
    grouped: float


@dataclass(slots=True)
class Mixed:
    """A mixed step: the milliseconds of a layer's attention, and the number of groups, for each
    rule."""

    shape: Shape
    rows: int
    times: dict[str, float]
    groups: dict[str, int]


@dataclass(slots=True)
class Times:
    """The measurements on a device."""

    device: str
    tree: dict[str, dict[str, float]]  # shape -> the SharingCosts that the tree had then
    steps: list[Step]
    mixed: list[Mixed]

    @classmethod
    def read(cls, path: Path) -> Times:
        told = json.loads(path.read_text())
        steps = [
            Step(
                **{
                    **one,
                    "shape": tuple(one["shape"]),
                    "parts": [Part(**part) for part in one["parts"]],
                }
            )
            for one in told["steps"]
        ]
        mixed = [Mixed(**{**one, "shape": tuple(one["shape"])}) for one in told["mixed"]]
        return cls(told["device"], told["tree"], steps, mixed)


# parts, the tree's costs -> which to group, the best first
Rule = Callable[[list[Part], SharingCosts], list[int]]


def by_costs(parts: list[Part], costs: SharingCosts) -> list[int]:
    units = [
        Unit(n, np.full(part.tokens // 16, n, np.int32), part.members)
        for n, part in enumerate(parts)
    ]
    return [group.slots[0] for group in find_groups(units, np.zeros(len(parts), np.int32), costs)]


def as_before(parts: list[Part], costs: SharingCosts) -> list[int]:
    return [n for n, part in enumerate(parts) if (part.members - 1) * part.tokens >= BEFORE_TOKENS]


def always(parts: list[Part], costs: SharingCosts) -> list[int]:
    return [n for n, part in enumerate(parts) if part.members > 1]


def never(parts: list[Part], costs: SharingCosts) -> list[int]:
    return []


RULES: dict[str, Rule] = {
    "model": by_costs,
    "always": always,
    "never": never,
    "64 tokens": as_before,
}


def fitted(times: Times) -> MeasuredSharing:
    """Returns the least-squares fit over the steps, each weighted by its time;
    no constant below 0."""
    told = np.array([_terms(step) for step in times.steps])
    saved = np.array([step.alone - step.grouped for step in times.steps]) * 1e-3
    weight = 1 / np.array([min(step.alone, step.grouped) for step in times.steps])
    a, b, c, d = _not_negative(told * weight[:, None], saved * weight).tolist()
    return MeasuredSharing(times.device, member_byte=a, member=b, tile_byte=c, step=d)


def _terms(step: Step) -> tuple[float, float, float, float]:
    kv_bytes = 4 * step.shape[1] * step.shape[2]
    part, count = step.parts[0], step.room
    tiles = -(-part.members // step.tile_members)
    rows = count * part.members
    return (
        rows * part.tokens * kv_bytes,
        -rows * kv_bytes,
        -count * tiles * part.tokens * kv_bytes,
        -1.0,
    )


def _not_negative(told: Floats, wanted: Floats) -> Floats:
    """Solves least squares with x >= 0 by trying every choice of zeros."""
    scale = np.linalg.norm(told, axis=0)
    best, least = np.zeros(told.shape[1]), float(wanted @ wanted)
    for choice in range(1, 1 << told.shape[1]):
        kept = [i for i in range(told.shape[1]) if choice >> i & 1]
        x, *_ = np.linalg.lstsq(told[:, kept] / scale[kept], wanted, rcond=None)
        error = float(np.sum((told[:, kept] / scale[kept] @ x - wanted) ** 2))
        if (x >= 0).all() and error < least:
            best, least = np.zeros(told.shape[1]), error
            best[kept] = x / scale[kept]
    return best


def costs_of(measured: MeasuredSharing, step: Step) -> SharingCosts:
    return SharingCosts(**asdict(measured.times(step.shape[1], step.shape[2], step.tile_members)))


def show(times: Times, table: bool) -> None:
    model = fitted(times)
    print(f"{times.device}: {len(times.steps)} uniform steps; fitted:")
    for name, value in asdict(model).items():
        print(f"    {name} = {value:.3g}" if name != "device" else f"    {value}")
    print(
        "\nuniform steps: decided right, and time lost where not: on average, at worst, of all time"
    )
    for shape in [None, *dict.fromkeys(step.shape for step in times.steps)]:
        steps = [step for step in times.steps if shape in (None, step.shape)]
        pays = np.mean([step.grouped < step.alone for step in steps])
        print(f"  {shape or 'all'}: {len(steps)} steps, grouping pays in {pays:.0%}")
        for name, rule in RULES.items():
            _show_rule(
                name, steps, [bool(rule(step.parts, costs_of(model, step))) for step in steps]
            )
        tree = {told: SharingCosts(**costs) for told, costs in times.tree.items()}  # type: ignore[arg-type]
        _show_rule(
            "the tree's",
            steps,
            [bool(by_costs(step.parts, tree[str(step.shape)])) for step in steps],
        )
    if times.mixed:
        _show_mixed(times.mixed)
    if table:
        _show_table(times.steps, model)


def _show_rule(name: str, steps: list[Step], grouped: list[bool]) -> None:
    taken = np.array(
        [
            step.grouped if chosen else step.alone
            for step, chosen in zip(steps, grouped, strict=True)
        ]
    )
    best = np.array([min(step.alone, step.grouped) for step in steps])
    lost, all_of_it = taken / best - 1, taken.sum() / best.sum() - 1
    print(
        f"    {name:10s} {np.mean(lost == 0):6.1%} right  {lost.mean():7.2%}  {lost.max():6.0%} "
        f" {all_of_it:7.2%}"
    )


def _show_mixed(steps: list[Mixed]) -> None:
    print(
        "\nmixed steps, groups chosen by each rule with the tree's constants: time beyond the best"
        " rule's"
    )
    best = np.array([min(step.times.values()) for step in steps])
    for name in RULES:
        taken = np.array([step.times[name] for step in steps])
        lost = taken / best - 1
        groups = np.mean([step.groups[name] for step in steps])
        print(
            f"    {name:10s} {lost.mean():7.2%} on average, {lost.max():6.0%} at worst;"
            f" {groups:.1f} groups a step"
        )


def _show_table(steps: list[Step], model: MeasuredSharing) -> None:
    print(
        "\nshape, groups x members, shared + own tokens: us alone, us grouped; ! where the model is"
        " wrong"
    )
    for step in steps:
        part = step.parts[0]
        wrong = bool(by_costs(step.parts, costs_of(model, step))) != (step.grouped < step.alone)
        print(
            f"{'/'.join(map(str, step.shape)):10s} {len(step.parts):4d} x {part.members:5d}"
            f" {part.tokens:6d} + {part.own:3d} {step.alone * 1e3:9.1f} {step.grouped * 1e3:9.1f}"
            f" {'!' if wrong else ''}"
        )
