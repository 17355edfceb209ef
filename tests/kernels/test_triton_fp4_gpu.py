"""Products with four-bit floats, compiled: awkward shapes and those of an 8B model, one row to
many."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

KINDS = ("nvfp4", "mxfp4")
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 33, 64, 65, 128, 200, 256, 300])
@pytest.mark.parametrize(
    "shape", [(70, 32), (129, 96), (200, 1312), (1000, 2880), (48, 4096)], ids=str
)
def test_products(rows, shape, kind, dtype):
    from triton_kernel_cases_fp4 import check_products

    check_products("cuda", dtype, rows, *shape, kind)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 128, 512])
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], ids=str
)
def test_products_of_an_8b_model(rows, shape):
    from triton_kernel_cases_fp4 import check_products

    check_products("cuda", torch.bfloat16, rows, *shape, "nvfp4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("octets", [32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "outputs", "warps"),
    [(8, 32, 1), (16, 64, 2), (32, 64, 4), (64, 128, 4), (128, 128, 8)],
)
def test_the_same_bits_however_k_is_split(rows, outputs, warps, octets, kind):
    from triton_kernel_cases_fp4 import Slices, check_products

    for split in (1, 2, 4):
        cut = Slices(rows, outputs, octets, split, 3, warps)
        check_products("cuda", torch.bfloat16, rows, 300, 2080, kind, cut)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [96, 2880])
def test_many_rows(k, kind, dtype, monkeypatch):
    from triton_kernel_cases_fp4 import check_many_rows

    monkeypatch.setattr("penstock.kernels.triton.linear.linear_groups.WIDENED_AT_ONCE", 200_000)
    check_many_rows("cuda", dtype, 300, 1000, k, kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inner", "k"), [(48, 288), (160, 1312), (14336, 4096)])
def test_one_row(inner, k, kind, dtype):
    from triton_kernel_cases_fp4 import check_gate, check_lone

    check_lone("cuda", dtype, inner, k, kind)
    check_gate("cuda", dtype, k, inner, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_take_less_than_three_tenths_of_bfloat16_s(kind):
    from triton_kernel_cases_fp4 import matrix_of

    matrix, worth = matrix_of("cuda", torch.bfloat16, 512, 4096, kind)
    assert matrix.nbytes < 0.29 * 2 * worth.numel()


def test_a_gpu_widens_them_for_float32_alone():
    from penstock.kernels.choose import choose, widens_fp4

    there = torch.device("cuda")
    assert [widens_fp4(choose(there, dtype)) for dtype in (*DTYPES, torch.float32)] == [
        False,
        False,
        True,
    ]
