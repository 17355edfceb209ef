"""Products with four-bit floats in Triton's interpreter, in float32, in small cases; the GPU tests
sweep them."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_kernel_cases_fp4 as cases

from penstock.kernels.triton.linear.fp4_scales import short_scales

pytestmark = pytest.mark.torch

CPU, F32 = "cpu", torch.float32
KINDS = ("nvfp4", "mxfp4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 96, 288, 512, 1312])
@pytest.mark.parametrize("rows", [1, 11])
def test_products(rows, k, kind):
    cases.check_products(CPU, F32, rows, 70, k, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("octets", [32, 64, 128])
def test_the_same_bits_however_k_is_split(octets, kind):
    cases.check_products(CPU, F32, 18, 40, 544, kind, cases.Slices(32, 16, octets, 3, 3, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [96, 544])
def test_many_rows(k, kind, monkeypatch):
    monkeypatch.setattr("penstock.kernels.triton.linear.linear_groups.WIDENED_AT_ONCE", 2000)
    cases.check_many_rows(CPU, F32, 5, 150, k, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_one_row(kind):
    cases.check_lone(CPU, F32, 48, 288, kind)
    cases.check_gate(CPU, F32, 64, 24, kind)


def test_no_rows():
    matrix, _ = cases.matrix_of(CPU, F32, 40, 64, "nvfp4")
    assert cases.linear_fp4.linear_fp4(torch.empty(0, 64), matrix).shape == (0, 40)


def test_powers_too_small_beside_a_row_s_largest_are_nothing():
    """By hand: groups of ones, 2 ** 24 and 2 ** 25 below the first; a larger power of a group of
    zeros counts not."""
    numbers = cases.pack_four(torch.full((1, 128), 2, dtype=torch.uint8))
    numbers[0, 48:] = 0
    kept, scale, by = short_scales(
        numbers, torch.tensor([[120, 96, 95, 200]], dtype=torch.uint8), None
    )
    assert by.tolist() == [2.0**-8] and scale.tolist() == [[30 << 3, 6 << 3, 0, 0]]
    assert torch.equal(kept[:, :32], numbers[:, :32]) and not kept[:, 32:].any()


def test_every_e4m3_is_a_finite_scale_in_float16_and_bfloat16():
    """31 as an exponent is infinity there, and infinity times the zeros of a group whose scale is 0
    no number."""
    octets = torch.tensor([each for each in range(256) if each & 0x7F != 0x7F], dtype=torch.uint8)
    scale = octets.view(torch.float8_e4m3fn)[:, None].expand(-1, 2).contiguous()
    numbers = torch.full((len(octets), 16), 0x22, dtype=torch.uint8)  # ones
    kept, short, by = short_scales(numbers, scale, torch.ones(len(octets)))
    assert (short >> 3).max() <= 30
    worth = (1 + (short & 7).double() / 8) * 2.0 ** ((short >> 3).double() - 29) * by[:, None]
    ones = torch.where(kept[:, :1] == 0, 0.0, torch.where(kept[:, :1] == 0xAA, -1.0, 1.0))
    assert torch.equal(worth * ones, scale.double())
