"""The law that matters most: a row's result does not depend on the rows beside it. Bit for bit,
with 1 and 3 threads.

Rows that stand alone are held bit for bit; rows of a prefix group are held against the fp64
contract and against themselves alone, within the dtype's tolerance (their sums are cut elsewhere).
"""

from __future__ import annotations

import pytest
import torch
from kernels_naive import Case, assert_close, make_case, rotate
from kernels_naive import attend as attend_by

from penstock.kernels.choose import choose
from penstock.kernels.inputs import DecodeInputs, StepInputs

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def only(case: Case, rows: list[int]) -> StepInputs:
    """The same rows of the same cache, alone: no groups, nothing skipped."""
    decode = case.inputs.decode
    return StepInputs(
        positions=case.inputs.positions[rows],
        slots=case.inputs.slots[rows],
        rows=len(rows),
        decode=DecodeInputs(
            rows=decode.rows[rows],
            position=decode.position[rows],
            table=decode.table,
            length=decode.length,
            skip=torch.zeros(len(rows), dtype=torch.int32),
            max_own=int(decode.length[rows].max()) + 1,
            groups=None,
        ),
        prefill=None,
    )


def attend(case: Case, rows: list[int], window: int | None = None) -> torch.Tensor:
    ops = choose(torch.device("cpu"), case.q.dtype, "auto")
    return attend_by(ops, case.q[rows], case.kv, only(case, rows), case.scale, window)


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (7, 1), (14, 2), (3, 3)])
@pytest.mark.parametrize("window", [None, 100])
def test_rows_alone_are_bit_equal_in_any_company(dtype, threads, heads, kv_heads, window):
    lengths = [
        1,
        15,
        16,
        17,
        31,
        48,
        100,
        160,
        190,
        192,
        193,
        208,
        250,
        300,
        384,
        385,
        400,
        599,
        600,
        1500,
    ]
    case = make_case(lengths, heads=heads, kv_heads=kv_heads, dtype=dtype, seed=1, extra_width=3)
    everyone = attend(case, list(range(len(lengths))), window)
    for row in range(len(lengths)):
        assert torch.equal(attend(case, [row], window)[0], everyone[row]), lengths[row]
    for some in ([0, 19], [5, 6, 7], [12, 3, 18, 10], [9, 11]):
        assert torch.equal(attend(case, some, window), everyone[some])


@pytest.mark.parametrize("width", [32, 80, 256])
def test_rows_alone_are_bit_equal_at_other_widths(dtype, threads, width):
    lengths = [3, 30, 64, 200, 210, 390, 2, 129] * 20
    case = make_case(lengths, heads=4, kv_heads=1, width=width, dtype=dtype, seed=2)
    everyone = attend(case, list(range(len(lengths))))
    for some in ([0], [3], [4], [5, 77], list(range(40, 57)), list(range(159, 90, -1))):
        assert torch.equal(attend(case, some), everyone[some])


def test_elementwise_operations_are_bit_equal_in_any_company(dtype, threads):
    ops = choose(torch.device("cpu"), dtype, "auto")
    rng = torch.Generator().manual_seed(0)
    for width in (64, 80, 100, 897):
        x = (torch.randn(301, 2 * width, generator=rng) * 3).to(dtype)
        y = (torch.randn(301, 2 * width, generator=rng) * 3).to(dtype)
        weight = torch.randn(2 * width, generator=rng).to(dtype)
        gated, normed = ops.silu_mul(x.clone()), ops.rms_norm(x, weight, 1e-6)
        added, total = ops.add_rms_norm(x.clone(), y.clone(), weight, 1e-6)
        for rows in (slice(0, 1), slice(7, 8), slice(5, 40), slice(133, 301)):
            assert torch.equal(ops.silu_mul(x[rows].clone()), gated[rows])
            assert torch.equal(ops.rms_norm(x[rows], weight, 1e-6), normed[rows])
            got = ops.add_rms_norm(x[rows].clone(), y[rows].clone(), weight, 1e-6)
            assert torch.equal(got[0], added[rows]) and torch.equal(got[1], total[rows])


@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_is_bit_equal_in_any_company(dtype, threads, width, normed):
    heads, kv_heads = 5, 2
    ops = choose(torch.device("cpu"), dtype, "auto")
    case = make_case(
        [(7 * i) % 250 + 1 for i in range(160)],
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        dtype=dtype,
    )
    rng = torch.Generator().manual_seed(0)
    angles = torch.randn(256, width // 2, generator=rng)
    table = torch.stack([angles.cos(), angles.sin()], dim=1)
    qkv = torch.randn(160, (heads + 2 * kv_heads) * width, generator=rng).to(dtype)
    norms = (
        [torch.randn(width, generator=rng).to(dtype) for _ in range(2)] if normed else [None, None]
    )

    def run(rows):
        kv = torch.zeros_like(case.kv)
        q = rotate(
            ops, qkv[rows], table, only(case, rows), kv, heads, kv_heads, width, *norms, 1e-6
        )
        at = case.inputs.slots[rows]
        return q, kv[at // 16, :, :, at % 16]

    q, k = run(list(range(160)))
    for rows in ([0], [11], [3, 159], list(range(40, 137))):
        some_q, some_k = run(rows)
        assert torch.equal(some_q, q[rows]) and torch.equal(some_k, k[rows])


def test_grouped_rows_agree_with_themselves_alone(dtype, threads):
    lengths = [33 + (5 * i) % 61 for i in range(90)] + [1, 200, 17]
    case = make_case(
        lengths, groups=[(1, 16), (2, 32), (17, 32), (70, 32)], heads=4, kv_heads=2, dtype=dtype
    )
    ops = choose(torch.device("cpu"), dtype, "auto")
    together = attend_by(ops, case.q, case.kv, case.inputs, case.scale, None)
    alone = attend(case, list(range(len(lengths))))
    assert_close(together, alone.double())
    assert torch.equal(together[90:], alone[90:])
