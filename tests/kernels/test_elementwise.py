"""Norms, gate, rotary and store, embedding and block copies against fp64 or by exact values."""

from __future__ import annotations

import pytest
import torch
from kernels_naive import assert_close, make_case, naive_rms_norm, naive_rotate, rotate, stored

from penstock.kernels.choose import choose

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [0, 1, 2, 17, 64, 1024]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def ops(dtype):
    return choose(torch.device("cpu"), dtype, "auto")


def draw(*shape, dtype=torch.float32, seed=0, by=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * by).to(dtype)


@pytest.mark.parametrize("width", [1, 7, 64, 80, 256, 897])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm(ops, dtype, width, eps):
    weight = draw(width, dtype=dtype, seed=1)
    for rows in ROWS:
        x = draw(rows, width, dtype=dtype, by=3.0)
        kept = x.clone()
        assert_close(ops.rms_norm(x, weight, eps), naive_rms_norm(x, weight, eps))
        assert torch.equal(x, kept)
    zeros = torch.zeros(3, width, dtype=dtype)
    assert torch.equal(ops.rms_norm(zeros, weight, eps), zeros)


@pytest.mark.parametrize("width", [7, 64, 896])
def test_add_rms_norm_gives_the_norm_and_the_next_residual(ops, dtype, width):
    weight = draw(width, dtype=dtype, seed=1)
    for rows in ROWS:
        x, residual = draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype, seed=2)
        total = residual + x
        normed, following = ops.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(following, total)
        assert_close(normed, naive_rms_norm(total, weight, 1e-6))


def test_what_joins_the_residual_may_pass_a_norm_first(ops, dtype):
    weight, first = draw(64, dtype=dtype, seed=1), draw(64, dtype=dtype, seed=3)
    x, residual = draw(5, 64, dtype=dtype, by=3.0), draw(5, 64, dtype=dtype, seed=2)
    apart = residual.clone()
    normed, following = ops.add_rms_norm(x, residual, weight, 1e-6, "wide", first)
    wanted, total = ops.add_rms_norm(ops.rms_norm(x, first, 1e-6), apart, weight, 1e-6)
    assert torch.equal(following, total) and torch.equal(normed, wanted)


@pytest.mark.parametrize("width", [1, 5, 64, 896, 1001])
def test_silu_mul_takes_the_gate_first(ops, dtype, width):
    for rows in ROWS:
        gate_up = draw(rows, 2 * width, dtype=dtype, by=4.0)
        gate, up = gate_up.double()[:, :width], gate_up.double()[:, width:]
        assert_close(ops.silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (7, 1), (3, 3)])
@pytest.mark.parametrize("normed", [None, "first", "turned first"])
def test_rotary_and_store(ops, dtype, width, heads, kv_heads, normed):
    case = make_case(
        [1, 16, 17, 40], chunks=[(5, 13)], heads=heads, kv_heads=kv_heads, width=width, dtype=dtype
    )
    tokens = len(case.positions)
    angles = draw(64, width // 2, seed=3)
    table = torch.stack([angles.cos(), angles.sin()], dim=1)
    norms = [draw(width, dtype=dtype, seed=s) for s in (4, 5)] if normed else [None, None]
    qkv = draw(tokens, (heads + 2 * kv_heads) * width, dtype=dtype, seed=6)
    parts = qkv.clone().view(tokens, heads + 2 * kv_heads, width)
    kv = case.kv.clone()
    turned_first = normed == "turned first"
    q = rotate(
        ops,
        qkv,
        table,
        case.inputs,
        kv,
        heads,
        kv_heads,
        width,
        *norms,
        1e-6,
        turned_first=turned_first,
    )
    assert q.shape == (tokens, heads, width) and q.dtype == dtype
    for token, (where, position) in enumerate(zip(case.tables, case.positions, strict=True)):
        cos, sin = table[position].double()
        for head in range(heads + kv_heads):
            x = parts[token, head].double()
            if turned_first:
                x = naive_rotate(x, cos, sin)
            if normed:
                x = naive_rms_norm(x, norms[0 if head < heads else 1], 1e-6)
            want = x if turned_first else naive_rotate(x, cos, sin)
            got = (
                q[token, head]
                if head < heads
                else stored(kv, where, position, head - heads, 0).to(dtype)
            )
            assert_close(got, want, factor=2.0)
        for head in range(kv_heads):
            assert torch.equal(
                stored(kv, where, position, head, 1), parts[token, heads + kv_heads + head].double()
            )
    written = torch.zeros(kv.shape[0] * 16, dtype=torch.bool)
    written[case.inputs.slots] = True
    untouched = ~written.view(-1, 16)[:, None, None, :, None].expand_as(kv)
    assert torch.equal(kv[untouched], case.kv[untouched])


def test_embed_takes_any_integer_ids(ops, dtype):
    table = draw(50, 24, dtype=dtype)
    for ids in (
        torch.tensor([3, 0, 49, 3]),
        torch.tensor([7], dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
    ):
        assert torch.equal(ops.embed(ids, table), table[ids.long()])


def test_copy_blocks_reads_all_before_it_writes(ops, dtype):
    layers = [draw(6, 2, 2, 16, 32, dtype=dtype, seed=s) for s in range(3)]
    before = [kv.clone() for kv in layers]
    ops.copy_blocks(
        layers,
        torch.tensor([1, 2, 5], dtype=torch.int32),
        torch.tensor([2, 3, 4], dtype=torch.int32),
    )
    for kv, was in zip(layers, before, strict=True):
        assert torch.equal(kv, was[[0, 1, 1, 2, 5, 5]])
    ops.copy_blocks(layers, torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    assert torch.equal(layers[0][2], before[0][1])


def test_choose_tells_the_column_of_each_operation_and_refuses_what_nothing_serves():
    ops = choose(torch.device("cpu"), torch.bfloat16, "reference")
    assert set(ops.why) == {
        name for name in type(ops).__slots__ if name not in ("dtype", "one_row", "why", "binaries")
    }
    assert {column for column, _ in ops.why.values()} == {"reference"}
    with pytest.raises(ValueError, match="float64"):
        choose(torch.device("cpu"), torch.float64, "auto")
    with pytest.raises(ValueError, match="nonesuch"):
        choose(torch.device("cpu"), torch.float32, "nonesuch")
