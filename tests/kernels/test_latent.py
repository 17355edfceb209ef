"""Attention over latent vectors: both columns against fp64, groups, rows that are split, chunks;
Triton's in its interpreter. What is stored is the normed vector and the turned key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
from attention_cases import MIXED, of_columns
from kernels_naive import make_case
from latent_cases import LatentCase, kv_on, of_latents, right, stored_and_seen
from torch import Tensor

from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.inputs import ChunkSight, PrefillInputs, PrefixSight
from penstock.kernels.latent import LatentSizes
from penstock.kernels.reference.attention import attention as planned_plain
from penstock.kernels.reference.attention import latent as plain
from penstock.kernels.triton.attention import attention as planned
from penstock.kernels.triton.attention import latent as triton
from penstock.kernels.triton.attention import latent_chunks, latent_maps
from penstock.kernels.triton.attention import latent_store as triton_store

pytestmark = pytest.mark.torch

CASES: dict[str, dict[str, Any]] = {
    "rows alone": {"lengths": [1, 15, 16, 17, 64, 65]},
    "one row, split": {"lengths": [203], "heads": 2},
    "one row, in many parts": {"lengths": [990], "heads": 2},
    "a row alone in its group, split": {"lengths": [300], "groups": [(1, 160)], "heads": 2},
    "a row beside a chunk": {"lengths": [203], "chunks": [(0, 5)]},
    "chunks": {"lengths": [], "chunks": [(0, 1), (0, 40), (33, 2), (0, 0)]},
    "groups and chunks": MIXED,
    "many empty groups": {**MIXED, "groups": [(0, 16), (2, 0), (0, 32), (3, 32), (0, 0)]},
    "long prefixes, in parts": {
        "lengths": [420, 401, 300, 289, 291, 17],
        "groups": [(2, 400), (3, 288)],
    },
    "20 heads": {**MIXED, "heads": 20},
}


COLUMNS = [(planned_plain.plan, plain.latent_attention), (planned.plan, triton.latent_attention)]
SIZES = [
    LatentSizes(rank=32, turning=8, still=12, value=20),
    LatentSizes(rank=96, turning=16, still=80, value=8),  # a key's still part in two, 64 and 16
]


def _answers(step: LatentCase, column: int, expand_tokens: int) -> Tensor:
    plan, attend = COLUMNS[column]
    inputs, cos_sin = step.case.inputs, torch.zeros(1024, 2, step.kind.latent.turning // 2)
    planned_step = plan(inputs, step.kind, cos_sin, torch.float32)
    return attend(
        step.case.q, step.up, step.kv, inputs, step.kind, planned_step, expand_tokens=expand_tokens
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("sizes", "eight"), [(SIZES[0], False), (SIZES[1], False), (SIZES[0], True)], ids=str
)
def test_what_heads_see(name: str, sizes: LatentSizes, eight: bool) -> None:
    shape = {"heads": 4, "kv_heads": 1, "width": 16} | CASES[name] | {"kv_heads": 1, "width": 16}
    step = of_latents(make_case(**shape), sizes, eight=eight)
    if step.case.inputs.decode is not None:
        step.case = of_columns(step.case)
    wanted = right(step)
    for column in range(len(COLUMNS)):
        torch.testing.assert_close(
            _answers(step, column, 10**6).double(), wanted, rtol=1e-4, atol=1e-5
        )


# Chunks: tokens before, tokens of it.
EXPANDED = {
    "a prompt": {"lengths": [], "chunks": [(0, 70)]},
    "prompts beside rows": {"lengths": [40, 17], "chunks": [(0, 20), (0, 0), (0, 45), (0, 1)]},
    "behind others": {"lengths": [5], "chunks": [(60, 37), (0, 33), (16, 60)]},
}


@pytest.mark.parametrize("room", [None, 2], ids=["all heads at once", "two"])
@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize(("sizes", "eight"), [(SIZES[0], True), (SIZES[1], False)], ids=str)
def test_keys_and_values_that_are_made(
    name: str, sizes: LatentSizes, eight: bool, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = EXPANDED[name]
    step = of_latents(make_case(heads=5, kv_heads=1, width=16, **shape), sizes, eight=eight)
    monkeypatch.setattr(LatentSizes, "expands", lambda *_: True)
    if room is not None:
        each = step.case.inputs.prefill.seen.stored * (sizes.still + sizes.value)
        monkeypatch.setattr(latent_chunks, "ROOM", room * each * 4)
        monkeypatch.setattr(latent_chunks, "AT_ONCE", 48)
        monkeypatch.setattr(plain, "EXPANDED_AT_ONCE", room * each)
    made = []
    for place, inner in ((plain, "_expanded"), (triton, "attend_expanded")):
        real = getattr(place, inner)
        monkeypatch.setattr(place, inner, lambda *args, real=real: made.append(real(*args)))
    wanted = right(step)
    for column in range(len(COLUMNS)):
        torch.testing.assert_close(_answers(step, column, 1).double(), wanted, rtol=1e-4, atol=1e-5)
    assert len(made) == sum(own > 0 for _, own in shape["chunks"]) + 1, (
        "a call a chunk, and one of all"
    )


@pytest.mark.parametrize("room", [None, 2], ids=["all heads at once", "two"])
@pytest.mark.parametrize(
    "name", ["groups and chunks", "many empty groups", "long prefixes, in parts"]
)
@pytest.mark.parametrize(("sizes", "eight"), [(SIZES[0], True), (SIZES[1], False)], ids=str)
def test_keys_and_values_of_prefixes_that_are_made(
    name: str, sizes: LatentSizes, eight: bool, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = CASES[name] | {"heads": 5, "kv_heads": 1, "width": 16}
    step = of_latents(make_case(**shape), sizes, eight=eight)
    step.case = of_columns(step.case)
    groups = step.case.inputs.decode.groups
    groups.expanded = PrefixSight.of(groups.start.numpy(), groups.length.numpy())
    stored = groups.expanded.stored
    if room is not None:
        each = stored * (sizes.still + sizes.value)
        monkeypatch.setattr(latent_chunks, "ROOM", room * each * 4)
        monkeypatch.setattr(latent_chunks, "AT_ONCE", 48)
    made, real = [], triton.attend_expanded
    monkeypatch.setattr(triton, "attend_expanded", lambda *args: made.append(real(*args)))
    for prefill in (10**6, 1):  # chunks absorbed, and expanded too
        monkeypatch.setattr(LatentSizes, "expands", lambda *_, prefill=prefill: prefill == 1)
        answers = _answers(step, 1, prefill)
        torch.testing.assert_close(answers.double(), right(step), rtol=1e-4, atol=1e-5)
    assert len(made) == 2 + (step.case.inputs.prefill is not None)


def test_when_prefixes_are_expanded() -> None:
    """Moonlight's, 16 groups of 256 rows over 2,000 tokens, and what is too little."""
    deepseek = LatentSizes(rank=512, turning=64, still=128, value=128)
    start, length = np.array([0, 256, 512], np.int32), np.array([2000, 1600], np.int32)
    assert PrefixSight.of(start, length) == PrefixSight(3600, 256 * 3600)

    def expands(heads: int, groups: int, rows: int, tokens: int) -> bool:
        stored = groups * tokens
        return deepseek.expands_prefixes(heads, stored, rows * stored)

    assert expands(16, 16, 256, 2000)
    assert expands(16, 1, 1024, 1024)
    assert not expands(16, 64, 32, 2000), "each prefix has few rows"
    assert not expands(16, 16, 256, 64), "little is saved"
    assert not expands(16, 256, 256, 2000), "no room for one head"


def test_when_they_are_made() -> None:
    """A chunk's own tokens cost as much either way; those before it are made once for each chunk
    that sees them."""
    deepseek = LatentSizes(rank=512, turning=64, still=128, value=128)
    assert (deepseek.absorbed_pair, deepseek.expanded_pair, deepseek.expansion) == (
        1088,
        320,
        131072,
    )

    def chunks(*each: tuple[int, int]) -> PrefillInputs:
        nothing = torch.zeros(0, dtype=torch.int32)
        own, context = (np.array(part) for part in zip(*each, strict=True))
        return PrefillInputs(nothing, nothing, nothing, ChunkSight.of(own, context))

    assert chunks((300, 0)).seen == ChunkSight(300, 300, 300 * 301 // 2)
    assert chunks((7, 100), (0, 50)).seen == ChunkSight(7, 107, 7 * 100 + 28)
    assert chunks((300, 0)).expands(deepseek, 300) and not chunks((300, 0)).expands(deepseek, 301)
    assert chunks((200, 10_000)).expands(deepseek, 1) and not chunks((150, 10_000)).expands(
        deepseek, 1
    )
    assert not PrefillInputs(*[torch.zeros(0)] * 3).expands(deepseek, 1), (
        "a graph runs whatever is put into it"
    )
    narrow = LatentSizes(rank=8, turning=8, still=64, value=64)
    assert not chunks((300, 0)).expands(narrow, 1), (
        "keys and values are wider than what they are made of"
    )


@pytest.mark.parametrize("eight", [False, True], ids=["plain", "eight bits"])
@pytest.mark.parametrize("column", [plain, triton_store], ids=["reference", "triton"])
def test_what_is_stored(column: Any, eight: bool) -> None:
    step = of_latents(make_case(**MIXED, heads=4, kv_heads=1, width=16), SIZES[0], eight=eight)
    case, kv, kind = step.case, step.kv, step.kind
    inputs, draw = case.inputs, torch.Generator().manual_seed(4)
    angles = torch.rand(1024, 4, generator=draw) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    tokens = len(case.positions)
    given, q = torch.randn(tokens, 40, generator=draw), torch.randn(tokens, 4, 20, generator=draw)
    norm, every = torch.rand(32, generator=draw) + 0.5, torch.arange(len(kv.latent))
    norm *= 40 if eight else 1  # some are beyond 448 * 0.125
    wanted, asked = kv.worth(every), q.clone()
    plan = (planned_plain if column is plain else planned).plan(
        inputs, kind, cos_sin, torch.float32
    )
    column.latent_store(given, q, norm, 1e-6, cos_sin, inputs, kv, plan)

    def turned(x: Tensor, position: int) -> Tensor:
        """x [..., 8]: a pair's first number stands in the first half."""
        cos, sin = cos_sin[position]
        return torch.cat(
            (x[..., :4] * cos - x[..., 4:] * sin, x[..., 4:] * cos + x[..., :4] * sin), -1
        )

    for token, slot in enumerate(inputs.slots.tolist()):
        vector = given[token, :32] / (given[token, :32].square().mean() + 1e-6).sqrt() * norm
        if kv.scale is not None:
            vector = (vector / kv.scale).clamp(-448, 448).to(E4M3).float() * kv.scale
        wanted.view(-1, 40)[slot] = torch.cat(
            (vector, turned(given[token, 32:], case.positions[token]))
        )
        torch.testing.assert_close(
            q[token, :, 12:], turned(asked[token, :, 12:], case.positions[token])
        )
    torch.testing.assert_close(kv.worth(every), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(q[:, :, :12], asked[:, :, :12])


@pytest.mark.parametrize("tokens", [1, 9, 32, 33])
def test_a_launch_stores_few_tokens_and_multiplies_their_queries(tokens: int) -> None:
    lengths = [5 + 3 * at for at in range(tokens)]
    step = of_latents(make_case(lengths, heads=3, kv_heads=1, width=16), SIZES[1])
    inputs, sizes, draw = step.case.inputs, SIZES[1], torch.Generator().manual_seed(4)
    angles = torch.rand(1024, sizes.turning // 2, generator=draw) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    given = torch.randn(tokens, sizes.width, generator=draw)
    norm = torch.rand(sizes.rank, generator=draw) + 0.5
    plan = planned.plan(inputs, step.kind, cos_sin, torch.float32)
    found = []
    for up in (None, step.up):
        kv, q = kv_on(step.kv, "cpu"), step.case.q.clone()
        kv.latent = kv.latent.clone()
        asked = triton_store.latent_store(given, q, norm, 1e-6, cos_sin, inputs, kv, plan, up)
        assert (asked is None) == (up is None or tokens > latent_maps.FEW_TOKENS)
        if asked is not None:
            made = latent_maps.absorbed_queries(step.case.q, step.up, sizes)
            torch.testing.assert_close(asked, made, rtol=1e-4, atol=1e-4)
        found.append((q, kv.latent))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not torch.equal(found[0][1], step.kv.latent)


@pytest.mark.parametrize("eight", [False, True], ids=["plain", "eight bits"])
@pytest.mark.parametrize("lengths", [[1], [16], [31], [990], [5, 700, 64]], ids=str)
def test_few_tokens_are_stored_and_seen(lengths: list[int], eight: bool) -> None:
    """A lone query's parts are joined where they become values."""
    case = make_case(lengths, heads=3, kv_heads=1, width=16)
    seen, wanted = stored_and_seen(of_latents(case, SIZES[1], eight=eight), "cpu")
    torch.testing.assert_close(seen.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_lone_query_over_latents_too_wide_to_be_joined_with_their_product() -> None:
    wide = LatentSizes(rank=latent_maps.FEW_INPUTS + 8, turning=8, still=12, value=20)
    case = make_case([203], heads=2, kv_heads=1, width=16)
    seen, wanted = stored_and_seen(of_latents(case, wide), "cpu")
    torch.testing.assert_close(seen.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 17, 70])
def test_products_by_head(tokens: int) -> None:
    """Queries to the latents' space and sums to values, in several iterations of which the last is
    not full; queries lie between other numbers of a row."""
    sizes, heads = LatentSizes(rank=200, turning=12, still=136, value=72), 3
    rows = torch.randn(tokens, heads * sizes.head + 5, generator=torch.Generator().manual_seed(1))
    q = rows[:, 5:].view(tokens, heads, sizes.head)
    up = torch.randn(heads, sizes.still + sizes.value, sizes.rank)
    got = latent_maps.absorbed_queries(q, up, sizes)
    wide = up.double()
    asked = torch.einsum("ths,hsr->thr", q[..., : sizes.still].double(), wide[:, : sizes.still])
    torch.testing.assert_close(got.double(), asked, rtol=1e-4, atol=1e-4)
    seen, out = torch.randn(tokens, heads, sizes.rank), torch.empty(tokens, heads, sizes.value)
    assert latent_maps.values_of(seen, up, sizes, out) is out
    values = torch.einsum("thr,hvr->thv", seen.double(), wide[:, sizes.still :])
    torch.testing.assert_close(out.double(), values, rtol=1e-4, atol=1e-4)
