"""Attention against the fp64 contract: decode rows, prefix groups, windows, chunks; and that rows stay out of each other."""

from __future__ import annotations

import pytest
import torch
from kernels_naive import assert_close, make_case

from penstock.kernels.choose import choose

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(case, window=None):
    ops = choose(torch.device("cpu"), case.q.dtype, "auto")
    return ops.attention(case.q, case.kv, case.inputs, case.scale, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (4, 1), (7, 1), (8, 1)])
def test_decode_and_chunks_over_shapes(dtype, width, heads, kv_heads):
    case = make_case(
        [1, 16, 33, 40, 70, 48, 90, 17],
        groups=[(2, 0), (3, 32)],
        chunks=[(0, 5), (16, 3), (21, 19)],
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        dtype=dtype,
    )
    assert_close(attend(case), case.naive())


def test_groups_with_a_window_are_refused():
    case = make_case([40, 41], groups=[(2, 32)])
    with pytest.raises(ValueError, match="window"):
        attend(case, window=8)
