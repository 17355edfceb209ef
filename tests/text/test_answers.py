"""Answers' texts: calls and reasoning found the same however the text is cut, and grammars whose
every text the parser of the same format reads back as a call that fits its schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_inputs import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import QWEN_SPLIT, byte_level, write
from tokenizers import AddedToken

from penstock.demo import model_folder
from penstock.errors import UsageError
from penstock.request import StructuredOutputsParams
from penstock.text.parsers.answer_grammar import around
from penstock.text.parsers.parser_registry import (
    FORMATS,
    AnswerParsers,
    AnswerReader,
    MakeParser,
    format_of,
)
from penstock.text.parsers.pieces import PORTION, AnswerPiece
from penstock.text.parsers.reasoning import Thinking, thinking_behind
from penstock.text.parsers.tool import Tool, check_tools
from penstock.text.tokenizer import Tokenizer

WEATHER = Tool(
    name="get_weather",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", 'New\n"York"']},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "sure": {"$ref": "#/$defs/flag"},
            "said": {"type": ["string", "null"], "enum": ["yes", "no"]},
        },
        "required": ["city", "sure"],
        "additionalProperties": False,
        "$defs": {"flag": {"type": "boolean"}},
    },
)
PING = Tool(name="ping")
LOOSE = Tool(name="loose", parameters={"type": "object"})
STRICT_CITY = Tool(
    name="city",
    strict=True,
    parameters={
        "properties": {"name": {"enum": ["Paris", "Rome"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
)
TOOLS = [WEATHER, PING, LOOSE]

Found = tuple[dict[str, str], list[list[str]]]  # texts by kind; [name, arguments] of each call


def joined(pieces: Iterable[AnswerPiece]) -> Found:
    texts: dict[str, str] = {}
    calls: list[list[str]] = []
    last = ""
    for piece in pieces:
        assert piece.kind != "arguments" or last in (
            "name",
            "arguments",
        ), "a call is told in one go"
        last = piece.kind
        if piece.kind == "name":
            assert piece.call == len(calls)
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            assert piece.call == len(calls) - 1, "arguments come behind their name"
            calls[-1][1] += piece.text
        else:
            texts[piece.kind] = texts.get(piece.kind, "") + piece.text
    return texts, calls


def read(
    reader: AnswerReader, text: str, cuts: Sequence[int] = (), *, stopped: bool = False
) -> Found:
    ends = [0, *sorted(cuts), len(text)]
    pieces = [piece for begin, end in pairwise(ends) for piece in reader.feed(text[begin:end])]
    return joined([*pieces, *reader.end(stopped=stopped)])


def held_parser(name: str) -> MakeParser:
    return FORMATS[name].held_parser or FORMATS[name].parser


HERMES: list[tuple[str, str, list[list[str]]]] = [
    ("Hello there\n", "Hello there\n", []),
    (
        (
            'Sure.\n\n<tool_call>\n{"name": "ping", "arguments": {"a": "</tool_call>\\"}", "b":'
            ' [{"c": "]"}]}}\n</tool_call>\n<tool_call>\n{"arguments": {"d": 1}, "name":'
            ' "loose"}\n</tool_call>\n'
        ),
        "Sure.",
        [["ping", '{"a": "</tool_call>\\"}", "b": [{"c": "]"}]}'], ["loose", '{"d": 1}']],
    ),
    ('<tool_call>{"name": "ping"}}\n</tool_call> done', " done", [["ping", "{}"]]),
    (
        '<tool_call>{"name": "ping", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [["ping", '{"a": 1}']],
    ),
    ('<tool_call>{"name": "ping", "arguments": null}</tool_call>', "", [["ping", "{}"]]),
    ('<tool_call>{"name": "ping", "id": 12 , "arguments": {}}</tool_call>', "", [["ping", "{}"]]),
    ("<tool_call>\nping()\n</tool_call> ok", "<tool_call>\nping()\n</tool_call> ok", []),
    ('<tool_call>\n{"name": 7}\n</tool_call>', '<tool_call>\n{"name": 7}\n</tool_call>', []),
    ('<tool_call>{"name": "ping", "arguments": {"a": "Par', "", [["ping", '{"a": "Par']]),
    ('<tool_call>{"name": "ping", "arguments": "{\\"a', "", [["ping", '"{\\"a']]),
    ('<tool_call>{"name": "pi', '<tool_call>{"name": "pi', []),
    ("a < b <tool", "a < b <tool", []),
    ('<tool_call><tool_call>{"name": "ping"}</tool_call>', "<tool_call>", [["ping", "{}"]]),
    (
        '<tool_call>{"name": "ping" "x"} x</tool_call>y',
        '<tool_call>{"name": "ping" "x"} x</tool_call>y',
        [],
    ),
    ('<tool_call>{"name": "no"}</tool_call>', '<tool_call>{"name": "no"}</tool_call>', []),
    (
        (
            '<tool_call>\n{"name": "ping", "arguments": {"a": 1}}\n{"name": "loose", "arguments":'
            " {}}\n</tool_call> ok"
        ),
        " ok",
        [["ping", '{"a": 1}'], ["loose", "{}"]],
    ),
    (
        '<tool_call>[{"name": "ping"}, {"name": "loose"}]</tool_call>',
        "",
        [["ping", "{}"], ["loose", "{}"]],
    ),
    ('<tool_call>{"name": "ping"}{"name": "no"}</tool_call>.', '{"name": "no"}.', [["ping", "{}"]]),
    ('<tool_call>{"name": "ping"} and so</tool_call>on', "and soon", [["ping", "{}"]]),
    (
        (
            "<tool_call>{'name': 'ping', 'arguments': {'a': NaN, 'b': True,\n'c':"
            " 'x\ny\\d',}}</tool_call>"
        ),
        "",
        [["ping", '{"a": "NaN", "b": true,\n"c": "x\\ny\\\\d"}']],
    ),
    ('<tool_call>{"name": "ping", "arguments": {"a": 1</tool_call>', "", [["ping", '{"a": 1}']]),
    (
        '<tool_call>{"name": "ping", "arguments": {"a": 1} {</tool_call>.',
        "{.",
        [["ping", '{"a": 1}']],
    ),
    (
        '<tool_call>{"name": "ping", "arguments": [1]}',
        '<tool_call>{"name": "ping", "arguments": [1]}',
        [],
    ),
]
LLAMA: list[tuple[str, str, list[list[str]]]] = [
    (
        '{"name": "ping", "parameters": {"a": 1}}; {"name": "loose", "parameters": {}}',
        "",
        [["ping", '{"a": 1}'], ["loose", "{}"]],
    ),
    ('<|python_tag|>{"type": "function", "name": "ping", "parameters": {}}', "", [["ping", "{}"]]),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('{"a": {"name": "ping"}} and text', '{"a": {"name": "ping"}} and text', []),
    ('  Hi {"name": "ping"}', '  Hi {"name": "ping"}', []),
    ('{"name": "ping"}\nThat was it.', "That was it.", [["ping", "{}"]]),
    ('{"na', '{"na', []),
    ("<|pyth", "<|pyth", []),
    ("", "", []),
    (
        '{"name": "ping", "parameters": {"a": Infinity, "b": 1e999}}',
        "",
        [["ping", '{"a": "Infinity", "b": "1e999"}']],
    ),
    (
        '<|python_tag|>{"name": "ping"}; <|python_tag|>{"name": "loose"}',
        "",
        [["ping", "{}"], ["loose", "{}"]],
    ),
    ('{"name": "ping", "parameters": {"a": 1}; so', "; so", [["ping", '{"a": 1}']]),
]
CODER: list[tuple[str, str, list[list[str]]]] = [
    (
        (
            'ok\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n\n"York"\n</parameter>\n<parameter=days>\n3\n'
            "</parameter>\n<parameter=sure>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
        ),
        "ok",
        [
            ["get_weather", '{"city": "New\\n\\n\\"York\\"", "days": 3, "sure": true}'],
            ["ping", "{}"],
        ],
    ),
    (
        "<function=loose>\n<parameter=x>\n{1}\n</parameter>\n</function>\n</tool_call>",
        "",
        [["loose", '{"x": "{1}"}']],
    ),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        "",
        [["get_weather", '{"city": "Par']],
    ),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n1",
        "",
        [["get_weather", '{"days": 1']],
    ),
    ("<tool_call>\nfoo", "<tool_call>\nfoo", []),
    ("x <tool_call>\n<fun", "x <tool_call>\n<fun", []),
    ("<tool_call>\n<function=>\n", "<tool_call>\n<function=>\n", []),
]
BY_NAME = {"hermes": HERMES, "ernie45": HERMES, "llama3_json": LLAMA, "qwen3_coder": CODER}
CASES = [(name, *case) for name, found in BY_NAME.items() for case in found]


@pytest.mark.parametrize("name, text, content, calls", CASES, ids=lambda value: repr(value)[:40])
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[list[str]]
) -> None:
    def reader() -> AnswerReader:
        return AnswerReader(FORMATS[name].parser(TOOLS))

    want = ({"content": content} if content else {}, calls)
    assert read(reader(), text) == want
    assert read(reader(), text, range(1, len(text))) == want
    draw = random.Random(text)
    for _ in range(20):
        assert read(reader(), text, sorted(draw.choices(range(len(text) + 1), k=3))) == want


_BITS = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "{",
    "}",
    '{"name": ',
    '"ping"',
    ', "arguments": ',
    '"',
    "\\",
    ":",
    ",",
    "[",
    "]",
    "<function=ping>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<",
    "<think>",
    "</think>",
    "1",
    "null",
    "é",
    "<|python_tag|>",
    ";",
    '{"name": "ping", "parameters": {"a": ',
    "NaN",
    "'",
    "True",
    "1e999",
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    '<invoke name="ping">',
    '<parameter name="a">',
    "</invoke>",
    "</minimax:tool_call>",
    "<|tool_call_start|>[",
    "ping(a=",
    ")]<|tool_call_end|>",
    "<tool_call>ping",
]


@settings(max_examples=examples(150), deadline=None)
@given(
    bits=st.lists(st.sampled_from(_BITS), max_size=18),
    name=st.sampled_from([*FORMATS]),
    thinking=st.sampled_from(["open", "may open", "closed"]),
    data=st.data(),
)
def test_any_text_is_read_alike_however_it_is_cut(
    bits: list[str], name: str, thinking: Thinking, data: st.DataObject
) -> None:
    text = "".join(bits)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    stopped = data.draw(st.booleans())
    whole, cut = (AnswerReader(FORMATS[name].parser(TOOLS), thinking) for _ in range(2))
    found = read(whole, text, stopped=stopped)
    assert read(cut, text, cuts, stopped=stopped) == found
    for called, arguments in found[1]:
        assert called in {tool.name for tool in TOOLS}
        assert not stopped or isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)
    assert whole.called == len(found[1]) and whole.thought_length == cut.thought_length <= len(text)


@pytest.mark.parametrize(
    "name, text, cut, whole",
    [
        (
            "hermes",
            '<tool_call>{"name": "ping", "arguments": {"a": ["x',
            '{"a": ["x',
            '{"a": ["x"]}',
        ),
        ("hermes", '<tool_call>{"name": "ping", ', "", "{}"),
        ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": {}', '{"a": {}', '{"a": {}}'),
        ("llama3_json", '{"name": "ping", "parameters": {"a": tr', '{"a": tr', '{"a": "tr"}'),
        ("llama3_json", '{"name": "ping", "parameters": {"a":', '{"a":', '{"a":null}'),
    ],
)
def test_what_the_model_left_open_is_closed(name: str, text: str, cut: str, whole: str) -> None:
    """Where a limit cut the answer, the arguments stay as far as they came."""
    for cuts in ([], range(1, len(text))):
        assert read(AnswerReader(FORMATS[name].parser(TOOLS)), text, cuts) == ({}, [["ping", cut]])
        assert read(AnswerReader(FORMATS[name].parser(TOOLS)), text, cuts, stopped=True) == (
            {},
            [["ping", whole]],
        )


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_answer_is_read_in_portions(name: str) -> None:
    """One mark may stand behind the other: at each, what is left is looked at."""
    reader, sizes = AnswerReader(FORMATS[name].parser(TOOLS)), list[int]()
    plain = reader._reasoning.feed

    def watched(part: str) -> tuple[str, str]:
        sizes.append(len(part))
        return plain(part)

    reader._reasoning.feed = watched  # type: ignore[method-assign]
    text = "<tool_call>x " * 2_000
    assert read(reader, text) == ({"content": text}, [])
    assert sum(sizes) == len(text) and max(sizes) <= PORTION < len(text)


def test_one_call_alone() -> None:
    reader = AnswerReader(FORMATS["hermes"].parser(TOOLS), parallel=False)
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n'
    assert (
        read(reader, "a" + call + call) == ({"content": "a"}, [["ping", "{}"]])
        and reader.called == 1
    )


THOUGHTS: list[tuple[Thinking, str, dict[str, str]]] = [
    (
        "may open",
        "<think>\nhm <b\n</think>\n\nHello\n",
        {"reasoning": "hm <b", "content": "Hello\n"},
    ),
    ("may open", "Hello </think>", {"content": "Hello </think>"}),
    ("may open", "<thi", {"content": "<thi"}),
    ("open", "hm\n</think>\n\nHi", {"reasoning": "hm", "content": "Hi"}),
    ("open", "<think>hm \n", {"reasoning": "hm"}),
    ("open", "<thi", {"reasoning": "<thi"}),
    ("open", " </think>\n", {}),
    ("closed", "<think>x", {"content": "<think>x"}),
]


@pytest.mark.parametrize("thinking, text, want", THOUGHTS)
def test_reasoning_is_kept_apart(thinking: Thinking, text: str, want: dict[str, str]) -> None:
    assert read(AnswerReader(None, thinking), text) == (want, [])
    assert read(AnswerReader(None, thinking), text, range(1, len(text))) == (want, [])


def test_reasoning_stands_before_calls() -> None:
    reader = AnswerReader(FORMATS["hermes"].parser(TOOLS), "open")
    text = 'a <tool_call> b</think>\n\n<tool_call>{"name": "ping"}</tool_call>'
    assert read(reader, text, range(1, len(text))) == (
        {"reasoning": "a <tool_call> b"},
        [["ping", "{}"]],
    )


@pytest.mark.parametrize(
    "prompt, name, inside, want",
    [
        ("<|im_start|>assistant\n", "qwen3", False, "may open"),
        ("<|im_start|>assistant\n", "deepseek_r1", False, "open"),
        ("<|im_start|>assistant\n<think>\n", "qwen3", False, "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "deepseek_r1", False, "closed"),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", "qwen3", False, "may open"),
        ("<think>so far", "qwen3", True, "open"),
        ("<think>so</think>far", "qwen3", True, "closed"),
        ("far", "qwen3", True, "may open"),
    ],
)
def test_where_the_prompt_ends_says_how_the_answer_begins(
    prompt: str, name: str, inside: bool, want: str
) -> None:
    assert thinking_behind(prompt, name, inside_answer=inside) == want


@pytest.mark.parametrize(
    "template, want",
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("'<tool_call>\n<function=' + name", "qwen3_coder"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_a_template_says_how_calls_are_written(template: str, want: str) -> None:
    assert format_of(template) == want


def test_parsers_are_known_by_name() -> None:
    AnswerParsers(
        enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    ).check()
    with pytest.raises(
        UsageError, match="tool_call_parser must be one of hermes, ernie45, gemma4, glm45, glm47,"
    ):
        AnswerParsers(tool_call_parser="mistral").check()
    with pytest.raises(UsageError, match="reasoning_parser must be one of qwen3, deepseek_r1"):
        AnswerParsers(reasoning_parser="r1").check()
    with pytest.raises(UsageError, match="enable_auto_tool_choice needs a tool_call_parser"):
        AnswerParsers(enable_auto_tool_choice=True).check()


@pytest.mark.parametrize(
    "tools, says",
    [
        ([PING, PING], r"tools\[1\].function.name was there before"),
        ([Tool(name="a b")], r"tools\[0\].function.name must be 1 to 128"),
        ([Tool(name="a", parameters={"type": "array"})], "must be the schema of an object"),
    ],
)
def test_tools_are_checked(tools: list[Tool], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_tools(tools)


# --- grammars: a walk over what each mask allows


@pytest.fixture(scope="module")
def compiler() -> Any:
    pytest.importorskip("llguidance")
    from penstock.text.grammar import GrammarCompiler

    tokenizer = Tokenizer.load(model_folder())
    return GrammarCompiler(tokenizer, [tokenizer.eos_token_id]), tokenizer


FORM = {
    "type": "object",
    "properties": {"z": {"type": "boolean"}},
    "required": ["z"],
    "additionalProperties": False,
}


def walked(compiler: Any, asked: StructuredOutputsParams, seed: int, start: str = "") -> str | None:
    """A text that the grammar allows, drawn token by token behind `start`; None where it did not
    come to its end."""
    from penstock.text.grammar import grammar_text

    made, tokenizer = compiler
    matcher = made.compile(grammar_text(asked)).matcher()
    draw, ids = random.Random(seed), tokenizer.encode(start, add_special_tokens=False)
    for token in ids:
        assert matcher.mask()[token // 32] >> (token % 32) & 1, "the start is allowed"
        matcher.accept(token)
    for _ in range(400):
        allowed = np.nonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))[0]
        token = int(draw.choice(allowed))
        if tokenizer.eos_token_id in allowed and (
            token == tokenizer.eos_token_id or draw.random() < 0.5
        ):
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        ids.append(token)
        matcher.accept(token)
    return None


def fit(calls: list[list[str]]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = {tool.name: tool.schema for tool in TOOLS}
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_must_be_a_call_is_one_that_fits(compiler: Any, name: str, parallel: bool) -> None:
    calls = FORMATS[name]
    tools = [WEATHER, PING]
    asked = StructuredOutputsParams(
        around=around("closed", calls=calls, tools=tools, parallel=parallel, must_call=True)
    )
    counts = []
    for seed in range(16):
        text = walked(compiler, asked, seed)
        if text is not None:
            texts, found = read(AnswerReader(held_parser(name)(tools)), text)
            fit(found)
            assert texts == {}
            counts.append(len(found))
    assert len(counts) > 3 and min(counts) == 1 and (max(counts) > 1) == parallel


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_or_a_form(compiler: Any, name: str) -> None:
    asked = StructuredOutputsParams(
        json=FORM, around=around("closed", form=True, calls=FORMATS[name], tools=[PING])
    )
    seen = set()
    for seed in range(12):
        text = walked(compiler, asked, seed)
        if text is not None:
            texts, found = read(AnswerReader(held_parser(name)([PING])), text)
            assert bool(found) != bool(texts)
            seen.add(bool(found))
            assert found or set(json.loads(texts["content"])) == {"z"}
    assert seen == {True, False}


@pytest.mark.parametrize(
    "name, start",
    [
        ("hermes", 'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city":'),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city":'),
        ("qwen3_coder", "Well.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"),
    ],
)
def test_a_call_that_a_free_text_begins_is_held(compiler: Any, name: str, start: str) -> None:
    calls = FORMATS[name]
    asked = StructuredOutputsParams(
        around=around("closed", calls=calls, tools=[WEATHER], parallel=False)
    )
    whole = 0
    for seed in range(6):
        text = walked(compiler, asked, seed, start)
        if text is not None:
            _, found = read(AnswerReader(held_parser(name)([WEATHER])), text)
            assert len(found) == 1
            fit(found)
            whole += 1
    assert whole > 1
    free = walked(compiler, asked, 1, "Hello")
    assert free is None or read(AnswerReader(held_parser(name)([WEATHER])), free)[1] == []


def test_a_text_between_tags_is_free(compiler: Any) -> None:
    note = Tool(
        name="note", parameters={"type": "object", "properties": {"text": {"type": "string"}}}
    )
    calls = FORMATS["qwen3_coder"]
    asked = StructuredOutputsParams(
        around=around("closed", calls=calls, tools=[note], must_call=True, parallel=False)
    )
    start = '<tool_call>\n<function=note>\n<parameter=text>\na "b" </tool_call> {\n\n</parameter>\n'
    text = walked(compiler, asked, 1, start)
    assert text is not None
    _, found = read(AnswerReader(held_parser("qwen3_coder")([note])), text)
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        ("note", {"text": 'a "b" </tool_call> {\n'})
    ]


@pytest.mark.parametrize("special", [False, True], ids=["added", "special"])
def test_marks_that_are_tokens_of_their_own(tmp_path: Path, special: bool) -> None:
    """As in Qwen's vocabulary; or special ones, which no text spells."""
    pytest.importorskip("llguidance")
    from penstock.text.grammar import GrammarCompiler, check_grammar

    made, marks = (
        byte_level(QWEN_SPLIT, ["<|endoftext|>"]),
        ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    )
    made.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    write(
        tmp_path, made, {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_texts == {"<|endoftext|>", *(marks if special else ())}
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id]), tokenizer
    for thinking, start in (
        ("open", "hm</think>"),
        ("may open", "<think>hm</think>\n\n"),
        ("closed", ""),
    ):
        for must, more in ((True, ""), (False, "Hi <tool_call>")):
            asked = StructuredOutputsParams(
                around=around(
                    thinking,
                    calls=FORMATS["hermes"],
                    tools=[STRICT_CITY],
                    parallel=False,
                    must_call=must,
                    special=tokenizer.special_texts,
                )
            )
            check_grammar(asked)
            text = walked(compiler, asked, 1, start + more)
            assert text is not None
            texts, found = read(
                AnswerReader(FORMATS["hermes"].parser([STRICT_CITY]), thinking), text
            )
            assert [name for name, _ in found] == ["city"] and texts.get("reasoning") == (
                "hm" if start else None
            )
            assert json.loads(found[0][1])["name"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    "thinking, start", [("open", "hm </think>"), ("may open", "<think>hm </think>\n\n")]
)
def test_a_form_begins_behind_the_thought(compiler: Any, thinking: Thinking, start: str) -> None:
    asked = StructuredOutputsParams(json=FORM, around=around(thinking, form=True))
    texts = [
        text for seed in range(4) if (text := walked(compiler, asked, seed, start)) is not None
    ]
    assert texts
    for text in texts:
        found, _ = read(AnswerReader(None, thinking), text)
        assert found["reasoning"] == "hm" and set(json.loads(found["content"])) == {"z"}
