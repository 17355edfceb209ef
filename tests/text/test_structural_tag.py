"""Structural tags: which texts a grammar made of them takes, token by token,
and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock import demo
from penstock.errors import UsageError
from penstock.request import StructuredOutputsParams
from penstock.text.structural_tag import read_structural_tag
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch
pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def triggered(*tags: tuple[str, dict[str, Any], str], **more: Any) -> dict[str, Any]:
    made = [{"begin": begin, "content": content, "end": end} for begin, content, end in tags]
    return {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": made, **more}}


DIGITS = ("<f=a>", {"type": "regex", "pattern": "[0-9]{3}"}, ";")
WORDS = ("<f=w>", {"type": "any_text"}, "</f>")
TURN = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<|turn|>"],
        "tags": [
            {
                "begin": "<|turn|>a",
                "content": {"type": "regex", "pattern": "[0-9]"},
                "end": "<|end_of_turn|>",
            }
        ],
    }
}
TAKES = [
    (OLD, ["no tag, but < and <f", 'so <f=a>{"city":"Rome"}</f> and <f=b>17</f>.', ""]),
    (triggered(DIGITS, WORDS), ["<f=a>123; <f=w>what < you will</f>", "x"]),
    (triggered(DIGITS, at_least_one=True), ["well <f=a>123; x"]),
    (triggered(DIGITS, stop_after_first=True), ["<f=a>123;", "none"]),
    (TURN, ["text", "text <|turn|>a7<|end_of_turn|> text"]),
]
BARS = [
    (OLD, ['<f=a>{"city":"Paris"}</f>', "<f=c>1</f>", "<f=b>true</f>", "<f=b>17"]),
    (triggered(DIGITS, WORDS), ["<f=a>12;", "<f=w>endless"]),
    (triggered(DIGITS, at_least_one=True), ["none"]),
    (triggered(DIGITS, stop_after_first=True), ["<f=a>123; more"]),
    (TURN, ["text <|turn|>b", "text <|turn|>a7 text", "<|end_of_turn|>"]),
]
REFUSED = [
    (triggered(*(WORDS for _ in range(1025))), "it takes 1024 tags and 128 triggers at most"),
    (
        {
            "format": {
                **triggered(WORDS)["format"],
                "triggers": ["<f=", *(f"<{n}" for n in range(128))],
            }
        },
        "it takes 1024 tags and 128 triggers at most",
    ),
    ({}, "structures and triggers, or a format"),
    ({"x": 1}, "unknown field `x`"),
    (OLD | {"triggers": ["<g"]}, "tag 1 begins with none of the triggers"),
    (OLD | {"triggers": [""]}, "one trigger that is not empty"),
    (OLD | {"structures": []}, "at least one tag"),
    (OLD | triggered(DIGITS), "structures and triggers, or a format"),
    ({"format": {"type": "or", "elements": []}}, "Invalid enum value 'or'"),
    (triggered(("<f=", {"type": "qwen_xml_parameter"}, "")), "Invalid value 'qwen_xml_parameter'"),
    (triggered(("<f=", {"type": "any_text"}, "")), "any text and has no end"),
]


@pytest.fixture(scope="module")
def compiler() -> tuple[Any, Tokenizer]:
    from penstock.text.grammar import GrammarCompiler

    tokenizer = Tokenizer.load(demo.model_folder())
    assert tokenizer.eos_token_id is not None
    return GrammarCompiler(tokenizer, [tokenizer.eos_token_id]), tokenizer


def takes(compiler: tuple[Any, Tokenizer], tag: dict[str, Any], text: str) -> bool:
    """Whether an answer may be this text and end there."""
    from penstock.text.grammar import grammar_text

    made, tokenizer = compiler
    asked = StructuredOutputsParams(structural_tag=tag)
    matcher = made.compile(grammar_text(asked, made.special)).matcher()
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        if not np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[token]:
            return False
        matcher.accept(token)
    return True


@pytest.mark.parametrize(("tag", "texts"), TAKES, ids=lambda value: str(value)[:40])
def test_a_tag_takes_its_texts(
    compiler: tuple[Any, Tokenizer], tag: dict[str, Any], texts: list[str]
) -> None:
    assert [text for text in texts if not takes(compiler, tag, text)] == []


@pytest.mark.parametrize(("tag", "texts"), BARS, ids=lambda value: str(value)[:40])
def test_a_tag_bars_all_others(
    compiler: tuple[Any, Tokenizer], tag: dict[str, Any], texts: list[str]
) -> None:
    assert [text for text in texts if takes(compiler, tag, text)] == []


@pytest.mark.parametrize(("tag", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_malformed_is_one_line(tag: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_structural_tag(json.dumps(tag))
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_a_tag_stands_behind_a_thought(compiler: tuple[Any, Tokenizer]) -> None:
    from penstock.text.grammar import grammar_text

    made, tokenizer = compiler
    asked = StructuredOutputsParams(structural_tag=OLD, around='start: "hm " @form\n')
    matcher = made.compile(grammar_text(asked, made.special)).matcher()
    for token in tokenizer.encode('hm <f=a>{"city":"Oslo"}</f>', add_special_tokens=False):
        assert np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[token]
        matcher.accept(token)
