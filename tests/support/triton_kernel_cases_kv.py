"""What the Triton column is held to where KV lies in eight bits, on any device: attention, the
store, one row, copies. Import the kernels' environment first; functions assert.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from attention_cases import SMALL, of_columns, on
from kernels_naive import assert_close, attend, in_form, make_case, rotate, stored_in, worth
from torch import Tensor
from triton_kernel_cases import drawn

from penstock.kernels.fixed_row import to_fixed
from penstock.kernels.inputs import AttentionKind
from penstock.kernels.layer_kv import KvForm, LayerKv
from penstock.kernels.reference.attention import attention as plain_attention
from penstock.kernels.reference.elementwise.norm import rms_norm
from penstock.kernels.triton.attention import attention, blocks, one_row_attention
from penstock.kernels.triton.attention import rotary_and_store as rotary


def check_attention(device: str, dtype: torch.dtype, name: str, eight: int, **shape: Any) -> None:
    """A small step against fp64 of the stored numbers."""
    told, window = SMALL[name]
    case = make_case(**{**told, **shape}, dtype=dtype)
    kv = stored_in(case.kv, eight)
    want = replace(case, kv=worth(kv)).naive(window)
    for step in (case, of_columns(case)) if told["lengths"] and shape == {} else (case,):
        there = on(step, device)
        got = attend(attention, there.q, moved(kv, device), there.inputs, there.scale, window)
        assert_close(got.cpu(), want)


def moved(kv: LayerKv, device: str) -> LayerKv:
    """The same numbers on a device, K and V over one storage there."""
    scales = None if kv.scales is None else kv.scales.to(device)
    form = KvForm(kv.kv_heads, kv.keys.shape[3], kv.keys.dtype, kv.values.dtype, scales)
    return form.over(kv.storage.to(device))


def check_apart(
    device: str, dtype: torch.dtype, column: Any, eight: int, name: str = "groups and chunks"
) -> None:
    """Blocks between which another layer's bytes lie, NaNs: attention reads what is its own, the
    store writes there."""
    told, window = SMALL[name]
    case = make_case(**told, dtype=dtype)
    kv = stored_in(case.kv, eight)
    apart, pool = among_others(kv, device)
    got = attend(column, on(case, device).q, apart, on(case, device).inputs, case.scale, window)
    assert_close(got.cpu(), replace(case, kv=worth(kv)).naive(window))
    heads, (_, kv_heads, _, width) = case.q.shape[1], kv.keys.shape
    tokens = len(case.positions)
    qkv = drawn(tokens, (heads + 2 * kv_heads) * width, dtype=dtype, by=3.0)
    angles = drawn(400, width // 2, seed=3)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    together = moved(kv, device)
    for to in (together, apart):
        there = on(case, device).inputs
        rotate(
            column, qkv.clone().to(device), cos_sin.to(device), there, to, heads, kv_heads, width
        )
    assert torch.equal(apart.storage.view(torch.uint8), together.storage.view(torch.uint8))
    third = pool.shape[1] // 3
    assert (pool[:, :third] == 255).all() and (pool[:, 2 * third :] == 255).all()


def among_others(kv: LayerKv, device: str) -> tuple[LayerKv, Tensor]:
    """The same numbers as the middle third of each page, and the pages [blocks, bytes], all else of
    which is NaN."""
    scales = None if kv.scales is None else kv.scales.to(device)
    form = KvForm(kv.kv_heads, kv.keys.shape[3], kv.keys.dtype, kv.values.dtype, scales)
    pool = torch.full(
        (kv.keys.shape[0], 3 * form.block_bytes), 255, dtype=torch.uint8, device=device
    )
    own = pool.narrow(1, form.block_bytes, form.block_bytes).unflatten(1, form.block_shape)
    own.copy_(kv.storage.view(torch.uint8).view(own.shape))
    return form.over(own), pool


def check_store(
    device: str, dtype: torch.dtype, tokens: int, shape: tuple[int, int, int], eight: int
) -> None:
    """The store of many rows against plain torch's, number by number: a step of e4m3 where the
    rotation rounded."""
    heads, kv_heads, width = shape
    pool = tokens // 16 + 3
    qkv = drawn(tokens, (heads + 2 * kv_heads) * width, dtype=dtype, by=3.0)
    qkv[0, heads * width :: 7] = 100.0
    slots = torch.randperm(pool * 16, generator=torch.Generator().manual_seed(2))[:tokens]
    angles = drawn(90, width // 2, seed=3)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(90, (tokens,), generator=torch.Generator().manual_seed(1))
    made = [
        in_form(torch.zeros(pool, kv_heads, 2, 16, width, device=where), eight, dtype)
        for where in ("cpu", device)
    ]
    inputs = SimpleNamespace(positions=positions, slots=slots, rows=0, decode=None, prefill=None)
    inputs.decode_for = lambda window: None
    q = rotate(plain_column(), qkv.clone(), cos_sin, inputs, made[0], heads, kv_heads, width)
    inputs = SimpleNamespace(positions=positions.to(device), slots=slots.to(device))
    got = rotate(
        rotary, qkv.clone().to(device), cos_sin.to(device), inputs, made[1], heads, kv_heads, width
    )
    assert_close(got.cpu(), q.double(), factor=2.0)
    same_numbers(made[1], made[0])


def check_gemma4_store(device: str, dtype: torch.dtype, eight: int, width: int = 64) -> None:
    """Keys that are values, values that are normed, queries alone: what comes of columns that say
    it themselves."""
    heads, kv_heads, tokens, pool = 4, 3, 21, 5
    q, k = (
        drawn(tokens, count * width, dtype=dtype, by=3.0, seed=count) for count in (heads, kv_heads)
    )
    norms = [drawn(width, dtype=torch.float32, seed=seed) for seed in (4, 5)]
    slots = torch.randperm(pool * 16, generator=torch.Generator().manual_seed(2))[:tokens]
    angles, positions = drawn(90, width // 2, seed=3), torch.arange(7, 7 + tokens)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    inputs = SimpleNamespace(positions=positions, slots=slots, rows=0, decode=None, prefill=None)
    inputs.decode_for = lambda window: None
    there = SimpleNamespace(positions=positions.to(device), slots=slots.to(device))
    values = rms_norm(k.view(tokens, kv_heads, width), torch.ones(width), 1e-6).flatten(1)

    def made(where: str) -> LayerKv:
        return in_form(torch.zeros(pool, kv_heads, 2, 16, width, device=where), eight, dtype)

    sizes, wanted = (heads, kv_heads, width, *norms, 1e-6), made("cpu")
    turned = rotate(plain_column(), torch.cat((q, k, values), 1), cos_sin, inputs, wanted, *sizes)
    on_device = (heads, kv_heads, width, *(norm.to(device) for norm in norms), 1e-6)
    for column, step, where, own in (
        (plain_column(), inputs, "cpu", sizes),
        (rotary, there, device, on_device),
    ):
        kv, given = made(where), torch.cat((q, k), 1).to(where)
        got = rotate(
            column,
            given,
            cos_sin.to(where),
            step,
            kv,
            *own,
            keys_as_values=True,
            normed_values=True,
        )
        assert_close(got.cpu(), turned.double(), factor=2.0)
        for found, right, steps in (
            (kv.keys, wanted.keys, eight == 2),
            (kv.values, wanted.values, eight > 0),
        ):
            full = right.float()
            assert bool(full.any())  # a step of e4m3, or rounding
            within = full.abs() * (2.0**-3 if steps else 4 * torch.finfo(dtype).eps) + (
                2.0**-8 if steps else 1e-6
            )
            assert ((found.cpu().float() - full).abs() <= within).all()
        alone = rotate(
            column, q.clone().to(where), cos_sin.to(where), step, None, *own, normed_values=True
        )
        # of another program's sums: the same but for rounding
        assert_close(alone.cpu(), turned.double(), factor=2.0)


def check_one_row_apart(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], eight: int
) -> None:
    """A row's store and attention in one launch, over blocks that lie apart: as over blocks that
    don't."""
    heads, kv_heads, width = shape
    kind = AttentionKind(heads, kv_heads, width, 0, None, width**-0.5)
    qkv, angles = (
        drawn(1, (heads + 2 * kv_heads) * width, dtype=dtype),
        drawn(400, width // 2, seed=3),
    )
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(device)
    case = make_case([150], heads=heads, kv_heads=kv_heads, width=width, dtype=dtype)
    kv, inputs = stored_in(case.kv, eight), on(case, device).inputs
    (apart, _), together = among_others(kv, device), moved(kv, device)
    answers = [
        one_row_attention.rotate_and_attend_one(qkv.to(device), cos_sin, to, inputs, kind)
        for to in (apart, together)
    ]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(apart.storage.view(torch.uint8), together.storage.view(torch.uint8))


def column_of(name: str) -> Any:
    """What plans, stores and attends."""
    plain = plain_column()
    if name == "reference":
        return SimpleNamespace(**vars(plain), attention=plain_attention.attention)
    return SimpleNamespace(
        plan=attention.plan, attention=attention.attention, rotary_and_store=rotary.rotary_and_store
    )


def plain_column() -> Any:
    from penstock.kernels.reference.attention import rotary_and_store as plain_rotary

    return SimpleNamespace(
        plan=plain_attention.plan, rotary_and_store=plain_rotary.rotary_and_store
    )


def same_numbers(got: LayerKv, wanted: LayerKv) -> None:
    """V, which nothing turns, bit by bit; K within rounding, or at most a step of e4m3 apart and
    few of them at all."""
    assert torch.equal(got.values.cpu().float(), wanted.values.float())
    a, b = got.keys.cpu().float(), wanted.keys.float()
    assert bool(a.any())
    if got.eight == 1:
        assert_close(got.keys.cpu(), wanted.keys.double(), factor=2.0)
        return
    assert ((a - b).abs() <= b.abs() * 2.0**-3 + 2.0**-8).all()
    assert float((a != b).float().mean()) < 0.02


def check_one_row(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    eight: int,
    lengths: tuple[int, ...] = (3, 70, 300),
) -> None:
    """A row's store, then its attention: what it reads ahead is not its own new token. And both in
    one launch."""
    heads, kv_heads, width = shape
    kind = AttentionKind(heads, kv_heads, width, 0, None, width**-0.5)
    qkv, angles = (
        drawn(1, (heads + 2 * kv_heads) * width, dtype=dtype),
        drawn(400, width // 2, seed=3),
    )
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    for length in lengths:
        case = make_case([length], heads=heads, kv_heads=kv_heads, width=width, dtype=dtype)
        kv, there = moved(stored_in(case.kv, eight), device), on(case, device)
        q = rotate(
            rotary,
            qkv.clone().to(device),
            cos_sin.to(device),
            there.inputs,
            kv,
            heads,
            kv_heads,
            width,
        )
        answer = one_row_attention.attend_one(q, kv, there.inputs, case.scale, None)
        naive = replace(case, q=q.cpu(), kv=worth(kv).cpu()).naive()
        assert_close(answer.cpu(), naive)
        again = moved(stored_in(case.kv, eight), device)
        for _ in range(2):  # the meeting place is left as it was
            answer = one_row_attention.rotate_and_attend_one(
                qkv.to(device), cos_sin.to(device), again, there.inputs, kind
            )
            assert_close(answer.cpu().view_as(naive), naive)
            assert torch.equal(again.storage, kv.storage)
        fixed = one_row_attention.rotate_and_attend_one(
            qkv.to(device), cos_sin.to(device), again, there.inputs, kind, None, "fixed"
        )
        wanted = to_fixed(answer.cpu()) if width % 16 == 0 else None
        assert wanted is None or (
            torch.equal(fixed.numbers.cpu(), wanted.numbers)
            and torch.equal(fixed.sums.cpu(), wanted.sums)
        )


def copied(device: str, eight: int) -> tuple[Tensor, Tensor]:
    """A cache in which block 2 was copied over block 4, and what it should be."""
    kv = moved(stored_in(make_case([90]).kv, eight), device)
    before = kv.storage.clone()
    pairs = torch.tensor([[2, 4], [-1, 1]], dtype=torch.int32, device=device)
    blocks.BlockCopier([kv.storage]).copy(pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
    before[4] = before[2]
    return kv.storage, before
