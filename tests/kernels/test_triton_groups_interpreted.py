"""Products with weights in groups in Triton's interpreter, in float32, in small cases; the GPU
tests sweep them."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_kernel_cases_groups as cases

pytestmark = pytest.mark.torch

CPU, F32 = "cpu", torch.float32
# bits, inputs, group (None: the row), zeros
LAYOUTS = [
    (4, 256, 128, False),
    (4, 192, 64, True),
    (4, 128, 32, True),
    (4, 96, 32, False),
    (4, 96, None, True),
    (8, 100, None, False),
    (8, 128, 64, True),
    (cases.FLOAT8, 200, 128, False),
]


@pytest.mark.parametrize("bits, k, group, zeros", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 11])
def test_products(rows, bits, k, group, zeros):
    cases.check_products(CPU, F32, rows, bits, 70, k, group, zeros)


def test_no_rows():
    matrix, _ = cases.matrix_of(CPU, F32, 4, 40, 64)
    assert cases.linear_groups.linear_int(torch.empty(0, 64), matrix).shape == (0, 40)


@pytest.mark.parametrize("bits", [4, cases.FLOAT8])
def test_the_same_bits_however_k_is_split(bits):
    cut = cases.Pieces(32, 16, 3, 3, 4)
    cases.check_products(CPU, F32, 18, bits, 40, 400 if bits == 1 else 384, 128, False, cut)


@pytest.mark.parametrize("bits, k, group, zeros", LAYOUTS)
def test_many_rows(bits, k, group, zeros, monkeypatch):
    monkeypatch.setattr(cases.linear_groups, "WIDENED_AT_ONCE", 2000)
    cases.check_many_rows(CPU, F32, 5, bits, 150, k, group, zeros)


@pytest.mark.parametrize("bits, zeros", [(4, True), (4, False), (8, False)])
def test_one_row(bits, zeros):
    cases.check_one_row(CPU, F32, bits, 64, 24, zeros)


@pytest.mark.parametrize("k", [64, 1104])
def test_a_row_in_fixed_point(k):
    cases.check_fixed_row(CPU, F32, k)


@pytest.mark.parametrize("n, k, group", [(33, 256, 32), (40, 384, 64), (20, 1280, 128)])
def test_lone_products(n, k, group):
    cases.check_lone_products(CPU, F32, n, k, group)


@pytest.mark.parametrize("inner, k, group", [(48, 256, 128), (32, 192, 32)])
def test_lone_gate(inner, k, group):
    cases.check_lone_gate(CPU, F32, inner, k, group)
