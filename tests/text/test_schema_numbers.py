"""Whole numbers of schemas past 2^53: what a form lets pass fits its schema, however the library
reads the bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from penstock.errors import UsageError
from penstock.request import StructuredOutputsParams
from penstock.text.grammar import check_grammar, grammar_text
from penstock.text.schema_numbers import EXACT, LARGEST, hold_numbers

BYTES = LLTokenizer("byte")


def fits(grammar: str, text: str) -> bool:
    matcher, ids = LLMatcher(BYTES, grammar), BYTES.tokenize_str(text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


NAMES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ENDS = st.one_of(
    st.integers(-(2**64), 2**64),
    st.integers(EXACT - 3, EXACT + 9),
    st.floats(-1e25, 1e25),
    st.integers(-9, 9),
)


@given(
    bounds=st.dictionaries(st.sampled_from(NAMES), ENDS, max_size=3),
    near=st.integers(-3, 3),
    data=st.data(),
)
def test_what_passes_fits_and_all_but_the_ends_passes(
    bounds: dict[str, Any], near: int, data: st.DataObject
) -> None:
    schema = {"type": "integer", **bounds}
    try:
        grammar = grammar_text(StructuredOutputsParams(json=schema))
        matcher = LLMatcher(BYTES, grammar)
    except UsageError as error:
        assert "cannot be held to exactly" in error.rule
        return
    if matcher.is_error():  # a range with nothing in it
        return
    value = int(data.draw(st.sampled_from([*bounds.values(), 0, EXACT]))) + near
    if fits(grammar, str(value)):
        assert Draft202012Validator(schema).is_valid(value), (schema, value)
    elif Draft202012Validator(schema).is_valid(value) and abs(value) <= EXACT:
        pytest.fail(f"{value} fits {schema} and does not pass")


@pytest.mark.parametrize(
    ("bounds", "passes", "fails"),
    [
        (
            {"minimum": EXACT + 1, "maximum": EXACT + 7},
            [EXACT + 2, EXACT + 5, EXACT + 6],
            [EXACT, EXACT + 8],
        ),
        (
            {"minimum": -(2**63), "maximum": 2**63 - 1},
            [0, -5, 10**18, LARGEST],
            [2**63, -(2**63) - 1],
        ),
        ({"minimum": 2**60}, [2**60, 2**61], [2**60 - 1, 5]),
        ({"exclusiveMaximum": -(2**60)}, [-(2**60) - 256], [-(2**60), -(2**60) + 1]),
        ({"minimum": 0, "maximum": 1e30}, [0, 7, 2**62], [-1]),
        ({"minimum": 0, "maximum": 300}, [0, 300], [301]),
    ],
)
def test_bounds(bounds: dict[str, Any], passes: list[int], fails: list[int]) -> None:
    for schema, text in (
        ({"type": "integer", **bounds}, "{}"),
        (
            {
                "type": "array",
                "items": {"anyOf": [{"type": ["integer", "null"], **bounds}]},
                "minItems": 1,
            },
            "[{}]",
        ),
    ):
        grammar = grammar_text(StructuredOutputsParams(json=schema))
        assert [fits(grammar, text.format(value)) for value in passes] == [True] * len(passes)
        assert [fits(grammar, text.format(value)) for value in fails] == [False] * len(fails)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": EXACT + 1, "maximum": EXACT + 1},
        {"type": "integer", "minimum": 2**64, "maximum": 2**65},
        {"properties": {"a": {"const": EXACT + 1}}},
        {"enum": ["x", EXACT + 3]},
        {"enum": [10**400]},
        {"const": -(10**400)},
        {"const": 2**1024 - 1},
        {"type": "integer", "minimum": 10**400},
    ],
)
def test_numbers_that_cannot_be_held_to_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be held to exactly"):
        grammar_text(StructuredOutputsParams(json=json.dumps(schema)))


@pytest.mark.parametrize("bound", ["minimum", "exclusiveMaximum"])
def test_a_number_past_all_floats_is_refused_in_the_librarys_words(bound: str) -> None:
    with pytest.raises(UsageError, match="number out of range") as refused:
        check_grammar(StructuredOutputsParams(json=json.dumps({"type": "number", bound: 10**400})))
    assert str(refused.value).count("cannot be served") == 1


def test_other_schemas_stay() -> None:
    schema = {
        "properties": {"minimum": {"type": "string"}, "a": {"type": "number", "maximum": 1e300}},
        "enum": [1, 2.5],
    }
    assert hold_numbers(schema) == schema


@pytest.mark.parametrize(("more", "blank"), [({}, True), ({"disable_any_whitespace": True}, False)])
def test_white_space_between_the_parts_is_one_blank_at_most(
    more: dict[str, Any], blank: bool
) -> None:
    grammar = grammar_text(
        StructuredOutputsParams(json={"type": "object", "required": ["a"]}, **more)
    )
    assert (
        fits(grammar, '{"a":[1,2],"b":{}}') and fits(grammar, '{"a": [1, 2], "b" : { } }') == blank
    )
    for loose in ('{  "a":1}', '{\n"a":1}', '{"a":\t1}', '{"a":1 \n}', ' {"a":1}', '{"a":1} '):
        assert not fits(grammar, loose), loose
