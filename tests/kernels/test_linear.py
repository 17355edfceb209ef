"""Linear against fp64; and a row that is the same in any company, where that is promised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels_naive import assert_close
from row_promise import needs_same_bits
from torch import Tensor

from penstock.kernels.reference.linear import linear as linears
from penstock.kernels.reference.linear.linear import linear, prepare_linear
from penstock.kernels.reference.sampling import row_calls
from penstock.kernels.reference.sampling.row_calls import RowCalls, multiplied

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [*range(1, 65), 100, 127, 129, 255, 300, 512, 999, 1000, 1024]
SHAPES = [
    (512, 256),
    (256, 896),
    (2048, 256),
    (1152, 896),
    (896, 2432),
    (96, 80),
    (33, 48),
    (100, 31),
    (1, 7),
]


def weights(out, inner, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return (
        (torch.randn(out, inner, generator=rng) / inner**0.5).to(dtype),
        torch.randn(out, generator=rng).to(dtype),
        torch.randn(1024, inner, generator=rng).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out, inner", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_against_fp64(dtype, out, inner, with_bias):
    weight, bias, x = weights(out, inner, dtype)
    bias = bias if with_bias else None
    prepared = prepare_linear(weight)
    for rows in (0, 1, 2, 17, 64, 1024):
        want = x[:rows].double() @ weight.double().T + (bias.double() if with_bias else 0)
        got = linear(x[:rows], prepared, bias)
        assert got.dtype == dtype
        assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out, inner", SHAPES)
def test_a_row_does_not_depend_on_the_number_of_rows(dtype, out, inner):
    weight, bias, x = weights(out, inner, dtype, seed=1)
    prepared = prepare_linear(weight)
    needs_same_bits(prepared)
    full = linear(x, prepared, bias)
    moved = [
        rows for rows in ROWS if not torch.equal(linear(x[:rows], prepared, bias), full[:rows])
    ]
    assert moved == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_place_or_its_neighbours(dtype):
    weight, bias, x = weights(96, 256, dtype, seed=2)
    prepared = prepare_linear(weight)
    needs_same_bits(prepared)
    full = linear(x, prepared, bias)
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear(x[order], prepared, bias), full[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_and_transposed_weights(dtype):
    weight, bias, x = weights(64, 96, dtype)
    wide = torch.cat([x, x], dim=1)[:50, 96:]
    turned = weight.T.contiguous().T
    assert not wide.is_contiguous() and not turned.is_contiguous()
    assert torch.equal(
        linear(wide, prepare_linear(turned), bias),
        linear(x[:50].contiguous(), prepare_linear(weight), bias),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_packing_the_law_holds_too(dtype):
    weight, bias, x = weights(96, 80, dtype)
    if dtype == torch.float16:
        x = x[:64]  # torch multiplies fp16 slowly here
    full = linear(x, weight, bias)
    assert_close(full, x.double() @ weight.double().T + bias.double())
    needs_same_bits(weight)
    rows = [1, 2, 3, 5, 7, 12, 16, 17, 33, 64]
    assert [n for n in rows if not torch.equal(linear(x[:n], weight, bias), full[:n])] == []


def stand_in(
    off: Callable[[Tensor], Tensor], seen: list[int] | None = None
) -> Callable[[Tensor], row_calls.Multiply]:
    """A library whose products are exact everywhere, and off by `off` of the number of each row in
    its call [T] and the call's rows. seen: takes how many rows each call has."""

    def product(weight: Tensor) -> row_calls.Multiply:
        def multiply(x: Tensor) -> Tensor:
            if seen is not None:
                seen.append(x.shape[0])
            return x[:, :1] * weight[:, 0] + off(torch.arange(x.shape[0]))[:, None]

        return multiply

    return product


@pytest.mark.parametrize(
    ("off", "found"),
    [
        (lambda rows: rows * 0.0, RowCalls(None, True)),
        (
            lambda rows: rows * 0.0 + (len(rows) < 40),
            RowCalls(32, True),
        ),  # a kernel of its own for few rows
        (
            lambda rows: (rows >= 24) * 1.0,
            RowCalls(16, True),
        ),  # sums cut elsewhere for the last rows of a call
        (lambda rows: rows * 1.0, RowCalls(None, False)),
    ],
)
def test_calls_have_a_fixed_number_of_rows_where_a_library_moves(off, found) -> None:
    assert row_calls._tried(torch.float64, stand_in(off)) == found


@pytest.mark.parametrize(
    ("packs", "amx", "asked"), [(False, True, 0), (True, False, 0), (True, True, 1)]
)
def test_rows_are_tried_where_packed_products_may_move_them(packs, amx, asked, monkeypatch) -> None:
    """oneDNN raises at bfloat16 without AVX-512; without AMX nothing moves."""
    tried: list[torch.dtype] = []
    monkeypatch.setattr(linears, "_packs", lambda dtype: packs)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    calls = lambda dtype, threads: tried.append(dtype) or RowCalls(None, False)  # noqa: E731
    monkeypatch.setattr(linears, "packed_calls", calls)
    assert linears.moves_rows(torch.bfloat16) is (asked > 0)
    assert tried == [torch.bfloat16] * asked


def test_calls_of_fixed_rows_leave_every_row_in_its_place() -> None:
    seen: list[int] = []
    x, weight = torch.randn(75, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    multiply = stand_in(lambda rows: rows * 0.0, seen)(weight)
    for rows in (1, 16, 17, 32, 75):
        assert torch.equal(
            multiplied(x[:rows], RowCalls(16, True), multiply), x[:rows, :1] * weight[:, 0]
        )
    assert set(seen) == {16}
