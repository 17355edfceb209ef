"""Products with integer weights, plain torch: right against float64 in every layout, dtype and
awkward shape, a row's result the same in any company, and the packing undone by its own
description."""

from __future__ import annotations

import pytest
import torch
from row_promise import needs_same_bits
from torch import Tensor

from penstock.kernels.choose import choose
from penstock.kernels.int_matrix import pack_four, unpack_four
from penstock.kernels.reference.linear.linear_int import (
    FourMatrix,
    IntMatrix,
    VnniMatrix,
    has_fbgemm,
    linear_int,
    pack_vnni,
    sums_are_exact,
)

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# bits, group (None: the row), zeros
LAYOUTS = [
    (8, None, False),
    (8, 32, False),
    (8, None, True),
    (8, 64, True),
    (4, 32, False),
    (4, 64, True),
    (4, None, False),
    (4, 128, True),
]


def matrix(
    out: int, into: int, bits: int, group: int | None, zeros: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Numbers in our layout, scales, zeros or None, and what they are worth in float64."""
    rng = torch.Generator().manual_seed(out + into + bits)
    groups = into // (group or into)
    unsigned = torch.randint(0, 2**bits, (out, into), generator=rng)
    scale = (torch.rand(out, groups, generator=rng) * 0.01 + 0.001).to(dtype)
    zero = (
        torch.randint(0, 2**bits + 1, (out, groups), generator=rng)
        if zeros
        else torch.full((out, groups), 2 ** (bits - 1))
    )
    worth = (
        (unsigned.view(out, groups, -1) - zero[..., None]).double() * scale.double()[..., None]
    ).view(out, into)
    if bits == 4:
        return pack_four(unsigned.to(torch.uint8)), scale, zero.to(dtype) if zeros else None, worth  # type: ignore[return-value]
    return (unsigned - 128).to(torch.int8), scale, (zero - 128).to(dtype) if zeros else None, worth  # type: ignore[return-value]


@pytest.mark.parametrize("bits, group, zeros", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out, into", [(48, 128), (33, 256), (1, 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_what_the_numbers_are_worth(
    bits, group, zeros, dtype, out, into, biased
) -> None:
    *stored, worth = matrix(out, into, bits, group, zeros, dtype)
    ops = choose(CPU, dtype)
    prepared = ops.prepare_linear_int(*stored, dtype)
    rng = torch.Generator().manual_seed(3)
    x = (
        torch.randn(7, into, generator=rng) * torch.tensor([1, 1e-3, 1, 300, 1, 1, 0])[:, None]
    ).to(dtype)
    x[2, 5] = 500  # an outlier, beside which the others keep their worth
    bias = torch.randn(out, generator=rng).to(dtype) if biased else None
    right = x.double() @ worth.T + (0 if bias is None else bias.double())
    found = ops.linear_int(x.clone(), prepared, bias)
    assert found.dtype == dtype and found.shape == (7, out)
    size = x.double().norm(dim=1, keepdim=True) * worth.norm(dim=1) + right.abs()
    assert ((found.double() - right).abs() / size.clamp(min=1e-9)).max() < {4: 2e-6, 2: 8e-3}[
        dtype.itemsize
    ]


def test_the_way_that_is_taken() -> None:
    def kind(bits: int, group: int | None, zeros: bool, dtype: torch.dtype, out: int = 48) -> type:
        *stored, _ = matrix(out, 128, bits, group, zeros, dtype)
        return type(choose(CPU, dtype).prepare_linear_int(*stored, dtype))

    assert kind(4, 32, True, torch.bfloat16) is FourMatrix
    assert (
        kind(4, 32, True, torch.bfloat16, out=33) is kind(4, 32, True, torch.float32) is IntMatrix
    )
    assert kind(8, 32, False, torch.bfloat16) is kind(8, None, False, torch.float32) is IntMatrix
    if torch.cpu._is_vnni_supported():
        assert (
            kind(8, None, False, torch.bfloat16)
            is kind(8, None, False, torch.float16)
            is VnniMatrix
        )


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "bits, group, zeros", [(8, None, False), (4, 64, False), (4, 64, True), (8, 64, True)]
)
def test_rows_are_bit_equal_in_any_company(dtype, threads, bits, group, zeros) -> None:
    out, into = (64, 4864) if threads == 2 else (448, 896)  # long rows: sums of more than 24 bits
    *stored, _ = matrix(out, into, bits, group, zeros, dtype)
    ops = choose(CPU, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prepared = ops.prepare_linear_int(*stored, dtype)
        if (
            isinstance(prepared, IntMatrix) and dtype != torch.float16
        ):  # which is widened to float32
            needs_same_bits(torch.empty(0, dtype=dtype))
        x = torch.randn(150, into, generator=torch.Generator().manual_seed(4)).to(dtype)
        bias = torch.randn(out, generator=torch.Generator().manual_seed(5)).to(dtype)
        for added in (None, bias):
            everyone = ops.linear_int(x, prepared, added)
            for rows in (
                slice(0, 1),
                slice(7, 8),
                slice(5, 8),
                slice(3, 20),
                slice(60, 125),
                slice(149, 150),
            ):
                assert torch.equal(ops.linear_int(x[rows], prepared, added), everyone[rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(
    not torch.cpu._is_vnni_supported() or not has_fbgemm() or not sums_are_exact(False),
    reason="a CPU without VNNI, oneDNN told to do without it, or no FBGEMM",
)
@pytest.mark.parametrize("count", [1, 3, 64, 130])
def test_both_libraries_give_the_same_bits(count: int) -> None:
    rng = torch.Generator().manual_seed(count)
    numbers = torch.randint(-128, 128, (80, 4864), generator=rng).to(torch.int8)
    scale = torch.rand(80, generator=rng) * 1e-5
    x = torch.randn(count, 4864, generator=rng).bfloat16()
    one, other = (pack_vnni(numbers.clone(), scale, torch.bfloat16, by) for by in (True, False))
    assert torch.equal(linear_int(x, one), linear_int(x, other))


def test_infinities_and_nans_stay_in_their_rows() -> None:
    *stored, _ = matrix(48, 128, 8, None, False, torch.bfloat16)
    ops = choose(CPU, torch.bfloat16)
    prepared = ops.prepare_linear_int(*stored, torch.bfloat16)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    sound = ops.linear_int(x, prepared, None)
    x[1, 3], x[2, 9] = float("nan"), float("inf")
    found = ops.linear_int(x, prepared, None)
    assert torch.equal(found[0], sound[0]) and torch.equal(found[3], sound[3])
    assert not found[1].isfinite().any() and not found[2].isfinite().any()


def test_four_bits_lie_as_they_are_said_to() -> None:
    numbers = torch.randint(
        0, 16, (3, 96), generator=torch.Generator().manual_seed(2), dtype=torch.uint8
    )
    packed = pack_four(numbers)
    assert packed.shape == (3, 48) and torch.equal(unpack_four(packed), numbers)
    for row in range(3):
        for byte in range(48):
            span, place = divmod(byte, 16)
            low, high = (
                int(numbers[row, 32 * span + place]),
                int(numbers[row, 32 * span + 16 + place]),
            )
            assert int(packed[row, byte]) == low + 16 * high
