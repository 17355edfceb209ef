"""Tunables: each names a keyword that its operation has, with the default it has there; set by
value, in one column."""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import triton_interpreter  # noqa: F401  before triton is imported
from attention_cases import want
from kernels_naive import assert_close, attend, make_case

from penstock.kernels.choose import CANDIDATES, choose
from penstock.kernels.tunables import TUNABLES, Tunable, known, with_values

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda tunable: tunable.name)
def test_a_tunable_is_a_keyword_of_its_operation_and_says_its_default(tunable: Tunable) -> None:
    (candidate,) = (each for each in CANDIDATES[tunable.op] if each.column == "triton")
    operation = getattr(import_module(f"penstock.kernels.triton.{candidate.module}"), tunable.op)
    keyword = inspect.signature(operation).parameters[tunable.keyword]
    assert keyword.default == tunable.default and tunable.default in tunable.candidates
    assert len(set(tunable.candidates)) == len(tunable.candidates) > 1 and tunable.help


def test_names_stand_once() -> None:
    assert len({tunable.name for tunable in TUNABLES}) == len(TUNABLES)


def test_values_are_set_where_the_column_has_them() -> None:
    def operation(x: int, small_rows: int = 16) -> int:
        return x * small_rows

    tuned = with_values(
        "linear", "triton", operation, {"linear.small_rows": 8, "attention.few_programs": 256}
    )
    assert isinstance(tuned, partial) and tuned(2) == 16
    assert with_values("linear", "reference", operation, {"linear.small_rows": 8}) is operation
    assert with_values("linear", "triton", operation, {}) is operation
    with pytest.raises(ValueError, match=r"linear\.small_rows must be one of .*, not 7"):
        with_values("linear", "triton", operation, {"linear.small_rows": 7})


def test_what_this_version_does_not_know_is_left_out() -> None:
    told = {"linear.small_rows": 4, "linear.large_rows": 4, "linear_fp8.streamed_rows": 3}
    assert known(told) == {"linear.small_rows": 4}


@pytest.mark.parametrize("programs", [256, 1024])
def test_programs_of_few_rows_change_no_answer(programs: int) -> None:
    from penstock.kernels.triton.attention import attention as column

    case = make_case([203, 7], heads=2, kv_heads=1)
    told = SimpleNamespace(
        plan=column.plan, attention=partial(column.attention, few_programs=programs)
    )
    found = attend(told, case.q, case.kv, case.inputs, case.scale)
    assert_close(found, want(case, [0, 1]))


def test_plain_torch_has_none() -> None:
    cpu = torch.device("cpu")
    assert (
        choose(cpu, torch.float32, tuned={"linear.small_rows": 4}).linear
        is choose(cpu, torch.float32).linear
    )
