"""Steps to hold a column of attention against: small ones that Triton's interpreter can walk too,
and large ones.

A case is what `kernels_naive.make_case` takes, with a window. It knows no column.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import torch
from kernels_naive import Case, make_case
from torch import Tensor

MIXED = {
    "lengths": [1, 16, 33, 40, 70, 48, 90, 17],
    "groups": [(2, 0), (3, 32)],
    "chunks": [(0, 5), (16, 3), (21, 19)],
}

SMALL: dict[str, tuple[dict[str, Any], int | None]] = {
    "rows alone": ({"lengths": [1, 15, 16, 17, 64, 65]}, None),
    "one row, split": ({"lengths": [203], "heads": 2, "kv_heads": 1}, None),
    "chunks alone": ({"lengths": [], "chunks": [(0, 1), (0, 40), (33, 2)], "extra_width": 2}, None),
    "groups and chunks": (MIXED, None),
    "many empty groups": ({**MIXED, "groups": [(0, 16), (2, 0), (0, 32), (3, 32), (0, 0)]}, None),
    "long prefixes, in parts": (
        {"lengths": [420, 401, 300, 289, 291, 17], "groups": [(2, 400), (3, 288)]},
        None,
    ),
    "ratio 7, width 80": ({**MIXED, "heads": 7, "kv_heads": 1, "width": 80}, None),
    "ratio 1, width 96": ({**MIXED, "heads": 3, "kv_heads": 3, "width": 96}, None),
    "window 20": ({"lengths": [1, 17, 20, 21, 70], "chunks": [(0, 50), (16, 20), (60, 3)]}, 20),
    "window 1": ({"lengths": [1, 17, 40], "chunks": [(0, 9), (30, 4)]}, 1),
}


def sinks_of(case: Case) -> Tensor:
    """A score of each head: some drown what tokens bring, some do nothing."""
    return torch.linspace(-6.0, 5.0, case.q.shape[1])


def of_columns(case: Case, spare: int = 3, seed: int = 0) -> Case:
    """The same step with its rows scattered over the device's columns, among rows that are not of
    it."""
    decode = case.inputs.decode
    assert decode is not None
    rng = torch.Generator().manual_seed(seed)
    count, width = decode.rows.shape[0], decode.table.shape[1]
    rows = torch.randperm(count + spare, generator=rng)[:count].to(torch.int32)
    table = torch.zeros(count + spare, width + 2, dtype=torch.int32)
    table[rows.long(), :width] = decode.table[decode.rows]
    length = torch.zeros(count + spare, dtype=torch.int32)
    length[rows.long()] = decode.length[decode.rows]
    told = replace(decode, rows=rows, table=table, length=length)
    return replace(case, inputs=replace(case.inputs, decode=told))


def on(case: Case, device: str) -> Case:
    """The case with its tensors on a device; where its tokens stand stays on the host."""
    return replace(
        case, q=case.q.to(device), kv=case.kv.to(device), inputs=_moved(case.inputs, device)
    )


def _moved(part: Any, device: str) -> Any:
    if isinstance(part, Tensor):
        return part.to(device)
    if not hasattr(part, "__dataclass_fields__"):
        return part
    return type(part)(**{f.name: _moved(getattr(part, f.name), device) for f in fields(part)})


def drawn(seed: int, **shape: Any) -> Case:
    """Groups of any size beside rows alone, and chunks."""
    rng = random.Random(seed)
    groups = [
        (rng.choice([1, 2, 3, 40, 64, 300]), 16 * rng.choice([1, 2, 5, 20]))
        for _ in range(rng.randint(1, 9))
    ]
    lengths = [
        p + rng.choice([1, 2, 16, 17, rng.randint(1, 200)])
        for members, p in groups
        for _ in range(members)
    ]
    lengths += [rng.randint(1, 900) for _ in range(rng.choice([0, 1, 30]))]
    chunks = [(rng.randint(0, 400), rng.randint(1, 300)) for _ in range(rng.randint(0, 3))]
    return make_case(lengths, groups, chunks, seed=seed, **shape)


def want(case: Case, tokens: list[int], window: int | None = None) -> Tensor:
    """`Case.naive` of some tokens, a token at a time but all its heads together; fp64."""
    kv_heads = case.kv.shape[1]
    found = []
    for token in tokens:
        position = case.positions[token]
        seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
        blocks = case.tables[token].long()[seen // 16]
        # [2, Hkv, seen, D]
        keys, values = case.kv[blocks, :, :, seen % 16].double().permute(2, 1, 0, 3)
        queries = case.q[token].double().view(kv_heads, -1, case.q.shape[2])
        weights = torch.softmax(queries @ keys.mT * case.scale, -1)
        found.append((weights @ values).view(case.q.shape[1:]))
    return torch.stack(found)


def some(case: Case, count: int, seed: int = 0) -> list[int]:
    """Tokens to hold against the contract, where all would take too long."""
    tokens = range(len(case.positions))
    return sorted(random.Random(seed).sample(tokens, min(count, len(tokens))))
