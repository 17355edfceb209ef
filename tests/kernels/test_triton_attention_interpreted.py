"""The Triton column's attention in its interpreter, in float32, against the fp64 contract; a GPU
test sweeps it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
from attention_cases import SMALL, of_columns, sinks_of
from kernels_naive import assert_close, attend, make_case

from penstock.kernels.triton.attention import attention as triton_attention
from penstock.kernels.triton.attention import prefill, prefix

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", SMALL)
def test_small_steps(name):
    told, window = SMALL[name]
    case = make_case(**told)
    assert_close(
        attend(triton_attention, case.q, case.kv, case.inputs, case.scale, window),
        case.naive(window),
    )


@pytest.mark.parametrize("name", ["rows alone", "groups and chunks", "window 20"])
def test_rows_are_found_in_the_devices_columns(name):
    told, window = SMALL[name]
    case = of_columns(make_case(**told))
    assert_close(
        attend(triton_attention, case.q, case.kv, case.inputs, case.scale, window),
        case.naive(window),
    )


@pytest.mark.parametrize(
    "name", ["one row, split", "long prefixes, in parts", "groups and chunks", "window 20"]
)
def test_sinks_take_their_share_of_the_softmax(name):
    told, window = SMALL[name]
    case = make_case(**told)
    sinks = sinks_of(case)
    got = attend(triton_attention, case.q, case.kv, case.inputs, case.scale, window, sinks)
    assert_close(got, case.naive(window, sinks=sinks))


@pytest.mark.parametrize(
    "name", ["one row, split", "long prefixes, in parts", "groups and chunks", "window 20"]
)
def test_scores_are_capped(name):
    told, window = SMALL[name]
    case = make_case(**told, loud=3.0)
    got = attend(triton_attention, case.q, case.kv, case.inputs, case.scale, window, softcap=1.5)
    assert_close(got, case.naive(window, softcap=1.5))


def test_groups_with_a_window_are_refused():
    told, _ = SMALL["groups and chunks"]
    case = make_case(**told)
    with pytest.raises(ValueError, match="sliding window"):
        attend(triton_attention, case.q, case.kv, case.inputs, case.scale, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_a_tile_holds_a_row_of_as_many_heads_as_there_may_be(width, dtype):
    for ratio in (1, 7, 64, 71, 128, 200):
        shapes = [
            prefill._shape(ratio, width, dtype, *other)
            for other in product((101_376, 232_448), (0, 2))
        ]
        for queries, *_ in [*shapes, prefix._shape(ratio, width, dtype)]:
            assert queries >= ratio and queries & (queries - 1) == 0
