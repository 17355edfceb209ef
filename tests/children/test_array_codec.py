"""Plans cross as bytes and come back as they were, whatever fields a plan has."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.children.array_codec import ArrayCodec
from penstock.errors import EngineError
from penstock.schedule.step import JOIN_RECORD, StepPlan

PLANS: ArrayCodec[StepPlan] = ArrayCodec(StepPlan, "a plan", JOIN_RECORD)


@st.composite
def arrays(draw: st.DrawFn, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Any numbers, in memory order or not."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    drawn = np.random.default_rng(draw(st.integers(0, 99))).bytes(
        int(np.prod(shape)) * dtype.itemsize
    )
    array = np.frombuffer(drawn, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


def of(hint: Any) -> st.SearchStrategy[Any]:
    """What a field of this type may hold."""
    if isinstance(hint, UnionType):
        return st.one_of([of(each) for each in get_args(hint)])
    if hint is NoneType:
        return st.none()
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: of(hints[field.name]) for field in fields(hint)})
    if get_origin(hint) is np.ndarray:
        (kind,) = get_args(get_args(hint)[1])
        return arrays(JOIN_RECORD if kind is np.void else np.dtype(kind))
    return {int: st.integers(-(2**63), 2**63 - 1), bool: st.booleans()}[hint]


def same(one: Any, other: Any) -> bool:
    if is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)
        )
    if isinstance(one, np.ndarray):  # bytes: drawn floats may be NaN
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    return bool(one == other)


@settings(max_examples=60, deadline=None)
@given(of(StepPlan))
def test_a_plan_comes_back_as_it_was(plan: StepPlan) -> None:
    back = PLANS.decode(PLANS.encode(plan))
    assert same(plan, back)
    # torch and kernels take it as it lies
    assert back.rows.flags.aligned and back.rows.flags.writeable


def a_plan() -> StepPlan:
    none, two = np.zeros(0, np.int32), np.array([4, 5], np.int32)
    return StepPlan(
        7, two, two, 0, np.zeros(1, np.int32), none.reshape(0, 0), none, none, none, None, None
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_bytes_that_are_no_plan_are_one_error(data: st.DataObject) -> None:
    whole = PLANS.encode(a_plan())
    cut = data.draw(st.integers(0, len(whole) - 1))
    flipped = data.draw(st.integers(0, len(whole) - 1))
    for broken in (
        whole[:cut],
        whole[:flipped] + bytes([whole[flipped] ^ 0xFF]) + whole[flipped + 1 :],
    ):
        try:
            PLANS.decode(broken)  # a number that is another number is nobody's to see
        except EngineError as error:
            assert "a plan cannot be read" in str(error)
