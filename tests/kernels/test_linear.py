"""Linear against fp64; and the law that a row's result does not depend on how many rows run beside it."""

from __future__ import annotations

import pytest
import torch
from kernels_naive import assert_close

from penstock.kernels.reference.linear import linear, prepare_linear

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [*range(1, 65), 100, 127, 129, 255, 300, 512, 999, 1000, 1024]
SHAPES = [(512, 256), (256, 896), (2048, 256), (1152, 896), (896, 2432), (96, 80), (33, 48), (100, 31), (1, 7)]


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
    full = linear(x, prepared, bias)
    moved = [rows for rows in ROWS if not torch.equal(linear(x[:rows], prepared, bias), full[:rows])]
    assert moved == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_place_or_its_neighbours(dtype):
    weight, bias, x = weights(96, 256, dtype, seed=2)
    prepared = prepare_linear(weight)
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
        linear(wide, prepare_linear(turned), bias), linear(x[:50].contiguous(), prepare_linear(weight), bias)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_packing_the_law_holds_too(dtype):
    weight, bias, x = weights(96, 80, dtype)
    if dtype == torch.float16:
        x = x[:64]  # torch multiplies fp16 slowly here
    full = linear(x, weight, bias)
    assert_close(full, x.double() @ weight.double().T + bias.double())
    rows = [1, 2, 3, 5, 7, 12, 16, 17, 33, 64]
    assert [n for n in rows if not torch.equal(linear(x[:n], weight, bias), full[:n])] == []
