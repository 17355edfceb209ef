"""Calls in GLM 4.5's, MiniMax-M2's, LFM2's and Gemma 4's forms, and Ernie's answers: read however
the text is cut, and held by grammars whose texts are read back."""

from __future__ import annotations

import json
from functools import cache
from time import process_time
from typing import Any

import pytest

from penstock.text.parsers.answer_grammar import around
from penstock.text.parsers.parser_registry import FORMATS, AnswerReader, format_of
from penstock.text.parsers.reasoning import MARKS, WRAPPED, thinking_behind
from penstock.text.parsers.tagged import MOST_TAG
from penstock.text.parsers.tool import Tool

Json = dict[str, Any]
PROPERTIES: Json = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "what": {"type": "array", "items": {"type": "string"}},
    "any": {},
}
F = Tool(name="get_weather", parameters={"type": "object", "properties": PROPERTIES})
PING = Tool(name="ping")

GLM = (
    "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris &"
    " <b>\nRome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>what</arg_key>\n"
    '<arg_value>["sun"]</arg_value>\n</tool_call>\n<tool_call>ping\n</tool_call>'
)
GLM47 = (
    "I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris & <b>\nRome</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>what</arg_key>"
    '<arg_value>["sun"]</arg_value></tool_call><tool_call>ping</tool_call>'
)
MINIMAX = (
    'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris &'
    ' <b>\nRome</parameter>\n<parameter name="days">3</parameter>\n<parameter'
    ' name="what">["sun"]</parameter>\n</invoke>\n<invoke'
    ' name="ping">\n</invoke>\n</minimax:tool_call>'
)
LFM2 = (
    "I look.\n<|tool_call_start|>[get_weather(city='Paris & <b>\\nRome', days=3, what=[\"sun\"]),"
    " ping()]<|tool_call_end|>"
)
LFM2_JSON = (
    'I look.<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris & <b>\\nRome",'
    ' "days": 3, "what": ["sun"]}}, {"name": "ping", "arguments": {}}]<|tool_call_end|>'
)
ERNIE = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris & <b>\\nRome",'
    ' "days": 3, "what": ["sun"]}}\n</tool_call>\n<tool_call>\n{"name": "ping", "arguments":'
    " {}}\n</tool_call>\n"
)
GEMMA4 = (
    'I look.<|tool_call>call:get_weather{city:<|"|>Paris &'
    ' <b>\nRome<|"|>,days:3,what:[<|"|>sun<|"|>]}<tool_call|><|tool_call>call:ping{}<tool_call|>'
)
GEMMA4_JSON = (
    'I look.\n<|tool_call>call:get_weather{"city": "Paris & <b>\\nRome", "days": 3, "what":'
    ' ["sun"]}<tool_call|>\n<|tool_call> call:ping {} <tool_call|>'
)
WRITTEN = [
    ("glm45", GLM),
    ("glm47", GLM47),
    ("glm45", GLM47),
    ("minimax_m2", MINIMAX),
    ("lfm2", LFM2),
    ("lfm2", LFM2_JSON),
    ("ernie45", ERNIE),
    ("gemma4", GEMMA4),
    ("gemma4", GEMMA4_JSON),
]
MEANT = [("get_weather", {"city": "Paris & <b>\nRome", "days": 3, "what": ["sun"]}), ("ping", {})]


def read(
    name: str, text: str, step: int = 0, *, stopped: bool = True, held: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls: names and arguments as they are written. step: letters at once; 0:
    all."""
    made = FORMATS[name].held_parser if held else FORMATS[name].parser
    assert made is not None
    reader = AnswerReader(made([F, PING]))
    parts = [text[at : at + step] for at in range(0, len(text), step)] if step else [text]
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.end(stopped=stopped)
    content, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if piece.kind == "name":
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            calls[piece.call] = (calls[piece.call][0], calls[piece.call][1] + piece.text)
        else:
            content += piece.text
    return content, calls


@pytest.mark.parametrize("step", [0, 1, 2, 7])
@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_calls_are_read_however_the_text_is_cut(name: str, text: str, step: int) -> None:
    content, calls = read(name, text, step)
    assert content == "I look." and [(called, json.loads(said)) for called, said in calls] == MEANT


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_wherever_a_limit_cuts_a_call_it_began_or_its_text_is_content(name: str, text: str) -> None:
    for at in range(len(text)):
        whole, parts = read(name, text[:at], stopped=False), read(name, text[:at], 1, stopped=False)
        assert whole == parts, at
        for called, said in whole[1]:
            assert called in ("get_weather", "ping") and said[:1] in ("", "{")
        if not whole[1]:
            assert text[:at].startswith(whole[0].rstrip())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "glm45",
            "<tool_call>unknown\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
        ),
        ("glm45", "<tool_call> and so on"),
        ("glm45", "<tool_call>get_weather is a tool</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="unknown">\n</invoke>\n</minimax:tool_call>',
        ),
        ("minimax_m2", "the tag <minimax:tool_call> opens calls"),
        ("lfm2", "<|tool_call_start|>[unknown(a=1)]<|tool_call_end|> so"),
        ("lfm2", "<|tool_call_start|>[get_weather(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get_weather(city=open('x'))]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get_weather(**{'a': 1})]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>" + "(" * 5000 + "<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get_weather(days=" + "-" * 50_000 + "1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get_weather(days=b'1')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
    ],
)
@pytest.mark.parametrize("step", [0, 3])
def test_what_is_no_call_of_a_tool_stays_content(name: str, text: str, step: int) -> None:
    assert read(name, text, step) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
            '{"city": "Par',
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par</arg_va",
            '{"city": "Par',
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par</arg_value>",
            '{"city": "Par"',
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="get_weather"><parameter name="days">3',
            '{"days": 3',
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="get_weather"><parameter name="what">["a',
            '{"what": ["a',
        ),
    ],
)
def test_a_call_that_a_limit_cuts_has_what_came(name: str, text: str, arguments: str) -> None:
    assert read(name, text, stopped=False) == ("", [("get_weather", arguments)])
    closed = read(name, text, stopped=True)[1]
    assert len(closed) == 1 and isinstance(json.loads(closed[0][1]), dict), "the model ended it"


def test_a_text_may_name_the_tag_that_closes_it() -> None:
    value = "close by </arg_value> and go on"
    text = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    assert json.loads(read("glm45", text, 1)[1][0][1]) == {"city": value}


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "lfm2", "ernie45", "gemma4"])
def test_what_a_grammar_takes_is_read_back(name: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    lark = around("closed", calls=FORMATS[name], tools=[F, PING], must_call=True, parallel=False)
    value = "a </arg_value> or </parameter> amid"
    said = {
        "glm45": (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>"
        ),
        "minimax_m2": (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter'
            ' name="city">{}</parameter>\n<parameter'
            ' name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
        "lfm2": (
            '<|tool_call_start|>[{{"name": "get_weather", "arguments": {{"city":"{}","days":3}}}}]'
            "<|tool_call_end|>"
        ),
        "ernie45": (
            '<tool_call>\n{{"name": "get_weather", "arguments":'
            ' {{"city":"{}","days":3}}}}\n</tool_call>'
        ),
        "gemma4": '<|tool_call>call:get_weather{{"city":"{}","days":3}}<tool_call|>',
    }[name].format(value)

    def takes(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, lark)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert (
        takes(said)
        and not takes(said.replace("3", "three"))
        and not takes(said.replace("get_weather", "unknown"))
    )
    held = FORMATS[name].held_parser is not None
    for step in (0, 1, 5):
        content, calls = read(name, said, step, held=held)
        assert (content, json.loads(calls[0][1])) == ("", {"city": value, "days": 3})


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ('{%- set toolcall_begin_token = "<minimax:tool_call>" -%}<invoke name="', "minimax_m2"),
        ("<|tool_call_start|>[", "lfm2"),
        ("{{- '<|tool_call>call:' + function['name'] -}}", "gemma4"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
        ('<tool_call>\n{"name": ', "hermes"),
    ],
)
def test_a_template_says_which_form_its_model_writes(template: str, name: str) -> None:
    assert format_of(template) == name


@pytest.mark.parametrize(
    ("name", "prompt", "begins"),
    [
        ("glm45", "<|assistant|>", "may open"),
        ("glm45", "<|assistant|>\n<think></think>", "closed"),
        ("minimax_m2", "]~b]ai\n<think>\n", "open"),
        ("minimax_m2", "]~b]ai\n", "open"),
        ("ernie45", "<|im_start|>assistant\n<think>\n", "open"),
        ("ernie45", "<|im_start|>assistant\n", "may open"),
        ("gemma4", "<|turn>model\n", "may open"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "closed"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "open"),
    ],
)
def test_how_an_answer_begins(name: str, prompt: str, begins: str) -> None:
    assert thinking_behind(prompt, name) == begins


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        (
            "I think.\n</think>\n\n<response>\nIt is <b>.\n\nSo.\n</response>\n",
            "I think.",
            "It is <b>.\n\nSo.",
        ),
        ("I think.\n</think>\n\nIt is so.", "I think.", "It is so."),
        ("I think.\n</think>\n\n<response>\nIt is", "I think.", "It is"),
        ("I think.\n</think>\n\n<resp", "I think.", "<resp"),
        ("I think.\n</think>\n\n<response>\nIt is\n</respon", "I think.", "It is\n</respon"),
    ],
)
def test_ernie_s_answers_stand_between_marks(
    text: str, thought: str, content: str, step: int
) -> None:
    reader = AnswerReader(None, "open", wrapped=WRAPPED["ernie45"])
    parts = [text[at : at + step] for at in range(0, len(text), step)] if step else [text]
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.end()
    assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == thought
    assert (
        "".join(piece.text for piece in pieces if piece.kind == "content").rstrip("\n") == content
    )


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<|channel>thought\nI think.<channel|>It is so.", "I think.", "It is so."),
        ("<|channel>thought\n<channel|>It is so.", "", "It is so."),
        ("<|channel>thought\nI think", "I think", ""),
        ("<|chan is a word.", "", "<|chan is a word."),
    ],
)
def test_gemma_thinks_in_a_channel(text: str, thought: str, content: str, step: int) -> None:
    reader = AnswerReader(None, "may open", marks=MARKS["gemma4"])
    parts = [text[at : at + step] for at in range(0, len(text), step)] if step else [text]
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.end()
    said = {
        kind: "".join(piece.text for piece in pieces if piece.kind == kind)
        for kind in ("reasoning", "content")
    }
    assert said == {"reasoning": thought, "content": content}


@pytest.mark.parametrize(
    "text",
    [
        'call:get_weather{city:<|"|>Paris}',
        "call:get_weather{city}",
        "call:get_weather",
        "call:get_weather{city:1,]}",
        "call:unknown{}",
        "call:get_weather{a:1} call:ping{}",
        "call:get_weather{a:" + "[" * 200 + "]" * 200 + "}",
    ],
)
def test_what_is_no_call_of_gemma_s_stays_in_the_content(text: str) -> None:
    whole = f"So: <|tool_call>{text}<tool_call|>"
    assert read("gemma4", whole) == (whole, [])


@pytest.mark.parametrize("step", [0, 1, 100])
def test_a_tag_that_goes_on_and_on_is_none(step: int) -> None:
    for space, called in ((MOST_TAG - 100, True), (MOST_TAG, False)):
        text = f"<tool_call>get_weather{' ' * space}<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>"
        assert bool(read("glm45", text, step)[1]) is called


def processor_seconds(name: str, text: str, step: int) -> float:
    begun = process_time()
    read(name, text, step)
    return process_time() - begun


@cache
def plain_seconds(name: str, step: int) -> float:
    """Processor time that this machine takes for a text of such a flood's length without a mark."""
    return processor_seconds(name, "a" * 20_000, step)


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "lfm2", "gemma4"])
@pytest.mark.parametrize(
    "flood", [" ", "a ", "\n", "<", "</arg_value> ", "</parameter>\n", "-", "(", '"']
)
@pytest.mark.parametrize("step", [1, 64])
def test_a_flood_is_read_in_time(name: str, flood: str, step: int) -> None:
    """However long a text goes on without a mark, each of its letters is looked at a few times."""
    heads = {
        "glm45": (
            "<tool_call>",
            "<tool_call>get_weather\n",
            "<tool_call>get_weather\n<arg_key>",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>",
        ),
        "minimax_m2": (
            "<minimax:tool_call>",
            '<minimax:tool_call><invoke name="get_weather">',
            '<minimax:tool_call><invoke name="get_weather"><parameter name="city">',
        ),
        "gemma4": (
            "<|tool_call>",
            "<|tool_call>call:get_weather{",
            '<|tool_call>call:get_weather{city:<|"|>',
        ),
        "lfm2": (
            "<|tool_call_start|>[",
            "<|tool_call_start|>[get_weather(city='",
            "<|tool_call_start|>",
        ),
    }[name]
    for head in heads:
        took = processor_seconds(name, head + flood * (20_000 // len(flood)), step)
        assert took < 60 * plain_seconds(name, step) + 0.5, head
