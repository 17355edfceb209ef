"""What a body holds, counted before it is parsed: exactly for valid JSON, at least what a parser
makes of any other."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fuzz_inputs import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.openai.forms import read_chat, read_completion, read_object
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.openai.json_budget import PART, check_values

MANY = 1 << 40
TEXTS = st.text() | st.text('",[]{}\\:ab\n')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)


def allows(body: bytes, part: int = PART, **most: int) -> bool:
    limits = HttpLimits(**{"max_values": MANY, "max_texts": MANY, "max_lists": MANY, **most})
    try:
        check_values(body, limits, part)
    except HttpError as error:
        assert error.status == 400 and error.code is None
        return False
    return True


def count(value: Any) -> tuple[int, int, int]:
    """Commas, texts, lists and objects of a value, as a person counts them."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    counted = [count(each) for each in inner]
    commas, texts, lists = (sum(column) for column in zip((0, 0, 0), *counted, strict=True))
    return commas + max(len(value) - 1, 0), texts, lists + 1


@settings(max_examples=examples(100))
@given(value=JSON, tight=st.booleans(), ascii_only=st.booleans(), part=st.integers(1, 40))
def test_the_count_is_exact(value: Any, tight: bool, ascii_only: bool, part: int) -> None:
    separators = (",", ":") if tight else None
    body = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode(
        "utf-8", "surrogatepass"
    )
    commas, texts, lists = count(value)
    assert allows(body, part, max_values=commas + 1, max_texts=texts, max_lists=lists)
    if commas:
        assert not allows(body, part, max_values=commas)
    if texts:
        assert not allows(body, part, max_texts=texts - 1)
    if lists:
        assert not allows(body, part, max_lists=lists - 1)


@settings(max_examples=examples(100))
@given(
    value=JSON, tail=st.text('",[]{}\\:a1 ').map(str.encode) | st.binary(), cut=st.integers(0, 20)
)
def test_a_parser_makes_no_more_before_it_finds_the_fault(
    value: Any, tail: bytes, cut: int
) -> None:
    """Whatever follows, what came whole is counted in full."""
    whole = json.dumps([value, 1]).encode()
    body = whole[: len(whole) - cut] + tail
    for end in range(len(whole) - cut, 0, -1):
        try:
            commas, texts, lists = count(msgspec.json.decode(body[:end] + b"]"))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        assert not lists or not allows(body, max_lists=lists - 1)
        assert not texts or not allows(body, max_texts=texts - 1)
        assert not commas or not allows(body, max_values=commas)
        return


def test_a_large_text_of_marks_is_taken() -> None:
    body = b'{"prompt": "' + b'[{,\\"' * 1_000_000 + b'"}'
    assert len(read_completion(body).prompt) == 4_000_000


def test_what_models_users_send_is_taken() -> None:
    ids = b"12345," * 999_999 + b"7"
    assert len(read_completion(b'{"prompt": [' + ids + b"]}").prompt) == 1_000_000
    several = json.dumps({"prompt": [[99_999] * 400] * 2_048}).encode()
    assert len(read_completion(several).prompt) == 2_048
    parts = [{"type": "text", "text": "a"}] * 5_000
    chat = json.dumps(
        {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "b"}] * 2}
    ).encode()
    assert len(read_chat(chat).messages) == 4
    bias = json.dumps(
        {"prompt": "x", "logit_bias": {str(token): 1 for token in range(262_144)}}
    ).encode()
    assert len(read_completion(bias).logit_bias or ()) == 262_144


def test_the_count_comes_before_the_parser() -> None:
    few = HttpLimits(max_values=30, max_texts=20, max_lists=20)
    for body, what in (
        (b"[1]," * 21, "20 lists and objects"),
        (b"{" * 21, "20 lists and objects"),
        (b'"" ' * 21, "20 texts"),
        (b'"",' * 21, "20 texts"),
        (b"1," * 30, "30 values"),
    ):
        with pytest.raises(HttpError) as refused:
            read_object(body, few)  # none of them is JSON
        assert str(refused.value) == f"the body holds more than {what}: send it in parts"


def test_prompts_messages_and_parts_have_bounds() -> None:
    few = HttpLimits(max_prompts=3, max_messages=3, max_parts=3)

    def chat(*contents: Any) -> bytes:
        return json.dumps(
            {"messages": [{"role": "user", "content": each} for each in contents]}
        ).encode()

    part = {"type": "text", "text": "a"}
    for prompt in (["a"] * 3, [[1]] * 3, [1] * 9, "aaaa"):
        assert read_completion(json.dumps({"prompt": prompt}).encode(), few).prompt == prompt
    assert len(read_chat(chat("a" * 9, [part, part], [part]), few).messages) == 3
    for prompt in (["a"] * 4, [[1]] * 4, [None] * 4, [True] * 4, [[]] * 4):
        with pytest.raises(HttpError, match="more than 3 prompts") as refused:
            read_completion(json.dumps({"prompt": prompt}).encode(), few)
        assert refused.value.param == "prompt"
    for body, what in (
        (chat(*"abcd"), "3 messages"),
        (chat([part, part], "a", [part, part]), "3 parts"),
    ):
        with pytest.raises(HttpError, match=f"more than {what}") as refused:
            read_chat(body, few)
        assert refused.value.param == "messages"
    with pytest.raises(HttpError, match="more than 3 messages"):  # whatever they are
        read_chat(b'{"messages": [1, 2, 3, {"content": [4]}]}', few)
