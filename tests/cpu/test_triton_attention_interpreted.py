"""The Triton column's attention in Triton's interpreter, in float32, against the fp64 contract; tests/gpu sweeps it."""

from __future__ import annotations

import pytest
import triton_interpreter  # noqa: F401  (before the kernels)
from attention_cases import SMALL, of_columns
from kernels_naive import assert_close, make_case

from penstock.kernels.triton.attention import attention


@pytest.mark.parametrize("name", SMALL)
def test_small_steps(name):
    told, window = SMALL[name]
    case = make_case(**told)
    assert_close(attention(case.q, case.kv, case.inputs, case.scale, window), case.naive(window))


@pytest.mark.parametrize("name", ["rows alone", "groups and chunks", "window 20"])
def test_rows_are_found_in_the_devices_columns(name):
    told, window = SMALL[name]
    case = of_columns(make_case(**told))
    assert_close(attention(case.q, case.kv, case.inputs, case.scale, window), case.naive(window))


def test_groups_with_a_window_are_refused():
    told, _ = SMALL["groups and chunks"]
    case = make_case(**told)
    with pytest.raises(ValueError, match="sliding window"):
        attention(case.q, case.kv, case.inputs, case.scale, 8)
