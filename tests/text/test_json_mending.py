"""JSON as models write it: what is JSON goes through as it stands, what can be mended is, and
whatever came is closed to JSON; the same however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fuzz_inputs import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.parsers.json_mending import JsonMender, json_text_of, mended


def finite(text: str) -> Any:
    """Reads JSON as RFC 8259 has it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


MENDED = [
    ("{'a': True, 'b': None, 'c': [False, none]}", '{"a": true, "b": null, "c": [false, null]}'),
    (
        '{"a": NaN, "b": -Infinity, "c": 1e999, "d": 1e-9}',
        '{"a": "NaN", "b": "-Infinity", "c": "1e999", "d": 1e-9}',
    ),
    ("[1, 2,]", "[1, 2]"),
    ('{"a": [1,\n],}', '{"a": [1\n]}'),
    ("{a: b, c-d: 1}", '{"a": "b", "c-d": 1}'),
    ('"one\ntwo\tthree"', '"one\\ntwo\\tthree"'),
    (r'"\d+ \' \u12 \n \u00e9"', r'"\\d+ ' + r"' \\u12 \n \u00e9" + '"'),
    ("""'it\\'s "so"'""", '"it\'s \\"so\\""'),
    ("(1, ('x',))", '[1, ["x"]]'),
    ('{"a": [1, {"b": 2]}', '{"a": [1, {"b": 2}]}'),
    ("05", '"05"'),
    ("word", '"word"'),
    ('{1: "x"}', '{"1": "x"}'),
    ('"\\ud800"', '"\\ud800"'),
    (" [ ] ", "[ ]"),
]


@pytest.mark.parametrize("text, want", MENDED)
def test_it_is_mended(text: str, want: str) -> None:
    assert mended(text) == want
    finite(want)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "two words",
        "[1, 2",
        '{"a"}',
        '{"a": }',
        "[,]",
        "{]",
        '{"a": 1} x',
        "{'a': 'it's'}",
        "1}",
    ],
)
def test_what_no_mending_makes_json_is_none(text: str) -> None:
    assert mended(text) is None


@pytest.mark.parametrize(
    "text, want",
    [
        ('{"a": [1, "b', '{"a": [1, "b"]}'),
        ('{"a', '{"a": null}'),
        ('{"a":', '{"a": null}'),
        ('{"a": 1,', '{"a": 1}'),
        ("[tru", '["tru"]'),
        ('["\\u00', '[""]'),
        ("", "null"),
    ],
)
def test_what_is_open_is_closed(text: str, want: str) -> None:
    mender = JsonMender()
    made = mender.feed(text) + mender.close()
    assert finite(made) == finite(want)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(value=_JSON, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_json_goes_through_as_it_stands(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert mended(text) == text


_BITS = [
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"',
    "'",
    ":",
    ",",
    "\\",
    "\\u12",
    "\n",
    " ",
    "a",
    "1",
    "-",
    "NaN",
    "True",
    "é",
    "<",
]


@settings(max_examples=examples(150), deadline=None)
@given(bits=st.lists(st.sampled_from(_BITS), max_size=16))
def test_whatever_came_is_closed_to_json_however_it_was_cut(bits: list[str]) -> None:
    text = "".join(bits)
    whole, cut = JsonMender(), JsonMender()
    made, parts, rest = whole.feed(text), "", ""
    for at, letter in enumerate(text):
        parts += cut.feed(letter)
        if cut.over:
            rest = cut.rest + text[at + 1 :]
            break
    assert (parts, rest, cut.done, cut.broken) == (made, whole.rest, whole.done, whole.broken)
    finite(made if whole.done else made + whole.close())


@pytest.mark.parametrize(
    "value", [{"a": [float("nan"), float("-inf"), 1.5]}, "\ud800", ["\u2028é"], None]
)
def test_a_value_of_python_is_json_that_can_be_sent(value: Any) -> None:
    text = json_text_of(value)
    assert text.encode()
    assert finite(text) == ({"a": ["NaN", "-Infinity", 1.5]} if isinstance(value, dict) else value)
