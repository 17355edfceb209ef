"""The float8 kernels in Triton's interpreter, in float32, in small cases; the GPU tests sweep them."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_fp8_cases as cases

pytestmark = pytest.mark.torch

CPU, F32 = "cpu", torch.float32


def test_rows_in_eight_bits():
    for rows, width in ((1, 7), (3, 64), (5, 100)):
        cases.check_rows(CPU, F32, rows, width)


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("shape", [(40, 64), (70, 100)], ids=str)
def test_products(rows, shape):
    cases.check_products(CPU, F32, rows, *shape)


def test_the_same_bits_however_k_is_split():
    cases.check_same_bits(CPU, F32, 70, 400)
