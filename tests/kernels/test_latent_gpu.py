"""Attention over latent vectors on a GPU, at DeepSeek's sizes and GLM-4.7-Flash's: against fp64,
groups, rows that are split, chunks in both forms."""

from __future__ import annotations

import pytest
import torch
from attention_cases import drawn, of_columns, on, some
from kernels_naive import make_case
from latent_cases import LatentCase, kv_on, of_latents, right, stored_and_seen

from penstock.kernels.inputs import PrefixSight
from penstock.kernels.latent import LatentSizes
from penstock.kernels.reference.attention import attention as planned_plain
from penstock.kernels.reference.attention import latent as plain
from penstock.kernels.triton.attention import latent_chunks
from penstock.kernels.triton.attention.attention import plan
from penstock.kernels.triton.attention.latent import latent_attention
from penstock.kernels.triton.attention.latent_store import latent_store

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

MOST_OFF = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SIZES = {
    "deepseek": LatentSizes(rank=512, turning=64, still=128, value=128),
    "glm": LatentSizes(rank=512, turning=64, still=192, value=256),
}
NEVER = 1 << 40


def _check(step: LatentCase, tokens: list[int], expand_tokens: int, expands: bool = False) -> None:
    """expands: prefixes are expanded."""
    dtype, wanted = step.case.q.dtype, right(step, tokens, "cuda")
    moved, kv = on(step.case, "cuda"), kv_on(step.kv, "cuda")
    cos_sin = torch.zeros(2048, 2, 32, device="cuda")
    inputs, kind = moved.inputs, step.kind
    if expands:
        groups = inputs.decode.groups
        groups.expanded = PrefixSight.of(groups.start.cpu().numpy(), groups.length.cpu().numpy())
    planned = plan(inputs, kind, cos_sin, dtype)
    out = latent_attention(
        moved.q, step.up.cuda(), kv, inputs, kind, planned, expand_tokens=expand_tokens
    )
    assert (planned.room is not None) == (expands or expand_tokens != NEVER)
    off = (out[tokens].cpu().double() - wanted).abs()
    assert off.max() < MOST_OFF[dtype] * 4 and off.mean() < MOST_OFF[dtype]


@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
@pytest.mark.parametrize(
    ("heads", "of"), [(16, "deepseek"), (20, "glm"), (64, "deepseek"), (128, "deepseek")]
)
@pytest.mark.parametrize("eight", [False, True], ids=["plain", "eight bits"])
@pytest.mark.parametrize("seed", range(4))
def test_what_heads_see(seed: int, eight: bool, heads: int, of: str, dtype: torch.dtype) -> None:
    step = of_latents(drawn(seed, heads=heads, kv_heads=1, width=16), SIZES[of], dtype, eight)
    step.case = of_columns(step.case)
    _check(step, some(step.case, 60), NEVER)


@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
@pytest.mark.parametrize("eight", [False, True], ids=["plain", "eight bits"])
def test_what_is_stored_is_what_plain_torch_stores(eight: bool, dtype: torch.dtype) -> None:
    sizes, draw = SIZES["deepseek"], torch.Generator().manual_seed(4)
    step = of_latents(
        make_case([1, 40, 17], chunks=[(16, 90)], heads=16, kv_heads=1, width=16),
        sizes,
        dtype,
        eight,
    )
    inputs, tokens = step.case.inputs, len(step.case.positions)
    angles = torch.rand(1024, sizes.turning // 2, generator=draw) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    given, norm = (
        torch.randn(tokens, sizes.width, generator=draw).to(dtype),
        torch.rand(sizes.rank, generator=draw),
    )
    norm = (norm + 0.5).to(dtype)
    found, q = kv_on(step.kv, "cuda"), step.case.q.cuda()
    moved = on(step.case, "cuda").inputs
    latent_store(given.cuda(), q, norm.cuda(), 1e-6, cos_sin.cuda(), moved, found, None)
    plan_there = planned_plain.plan(inputs, step.kind, cos_sin, dtype)
    plain.latent_store(given, step.case.q, norm, 1e-6, cos_sin, inputs, step.kv, plan_there)
    every, near = (
        torch.arange(len(step.kv.latent)),
        {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype],
    )
    torch.testing.assert_close(q.cpu(), step.case.q, rtol=near, atol=near)
    off = (found.worth(every.cuda()).cpu().float() - step.kv.worth(every).float()).abs()
    assert (off > near * 4).float().mean() < (2e-3 if eight else 0) + 1e-9, (
        "a last bit may round to the next number"
    )
    assert off.max() < (0.51 if eight else near * 8)


FEW = {
    "lone": [330],
    "a block": [16],
    "one tile": [31],
    "long": [1900],
    "first": [1],
    "three": [5, 700, 64],
}


@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
@pytest.mark.parametrize(("heads", "of"), [(16, "deepseek"), (20, "glm"), (64, "deepseek")])
@pytest.mark.parametrize("eight", [False, True], ids=["plain", "eight bits"])
@pytest.mark.parametrize("few", [*FEW, "thirty-two"])
def test_few_tokens_are_stored_and_seen(
    few: str, eight: bool, heads: int, of: str, dtype: torch.dtype
) -> None:
    """The launch that stores a token multiplies its queries, and a lone query's parts are joined
    where they become values; the newest token, stored a launch before, is seen."""
    lengths = FEW.get(few) or [3 + 11 * at for at in range(32)]
    step = of_latents(
        make_case(lengths, heads=heads, kv_heads=1, width=16), SIZES[of], dtype, eight
    )
    seen, wanted = stored_and_seen(step, "cuda")
    off = (seen.cpu().double() - wanted).abs()
    assert off.max() < MOST_OFF[dtype] * 4 and off.mean() < MOST_OFF[dtype]


CHUNKS = {
    "a prompt": {"lengths": [], "chunks": [(0, 1100)]},
    "prompts beside rows": {"lengths": [40, 17], "chunks": [(0, 300), (0, 0), (0, 451), (0, 1)]},
    "behind others": {"lengths": [5], "chunks": [(600, 370), (0, 333), (1600, 600)]},
    "groups of many rows and of few, rows alone, and a chunk": {
        "lengths": [1650 + at % 90 for at in range(200)] + [300, 291, 289] + [17, 400, 1],
        "groups": [(200, 1600), (3, 288)],
        "chunks": [(33, 50)],
    },
}


@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
@pytest.mark.parametrize("room", [2**28, 2**23])
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize(
    ("heads", "of", "eight"), [(16, "deepseek", False), (5, "glm", False), (16, "deepseek", True)]
)
def test_keys_and_values_that_are_made(
    heads: int,
    of: str,
    eight: bool,
    name: str,
    room: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """room: of all heads, or of some after the others. Prefixes of groups are expanded beside
    chunks in either form."""
    monkeypatch.setattr(latent_chunks, "ROOM", room)
    monkeypatch.setattr(latent_chunks, "AT_ONCE", 1000)
    monkeypatch.setattr(LatentSizes, "expands", lambda *_: True)
    step = of_latents(
        make_case(heads=heads, kv_heads=1, width=16, **CHUNKS[name]), SIZES[of], dtype, eight
    )
    groups = "groups" in CHUNKS[name]
    if groups:
        step.case = of_columns(step.case)
        _check(step, some(step.case, 60), NEVER, expands=True)
    _check(step, some(step.case, 60), 1, expands=groups)
