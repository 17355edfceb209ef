"""gpt-oss's channels, read whole and letter by letter: the same pieces, whatever stands where."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.text.parsers.harmony import HarmonyReader
from penstock.text.parsers.parser_registry import AnswerParsers

PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Let me see <b>.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 1 < 2."
WEATHER = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|>'
)
FIRST = "<|start|>assistant to=functions.ping<|channel|>commentary<|message|>{}<|call|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
Told = dict[str, str | list[tuple[str, str]]]


def read(
    text: str, size: int, prompt: str = PROMPT, parallel: bool = True, stopped: bool = False
) -> Told:
    reader = HarmonyReader(prompt, names={"get_weather", "ping"}, parallel=parallel)
    told: Told = {"reasoning": "", "content": "", "calls": []}
    calls: list[list[str]] = []
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.end(stopped=stopped)
    for piece in pieces:
        assert piece.text
        if piece.kind == "name":
            assert piece.call == len(calls)
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[piece.call][1] += piece.text
        else:
            told[piece.kind] += piece.text  # type: ignore[operator]
    assert reader.called == len(calls) and reader.thought_length == len(told["reasoning"])
    return {**told, "calls": [(name, arguments) for name, arguments in calls]}


CASES: list[tuple[str, Told]] = [
    (THOUGHT + FINAL, {"reasoning": "Let me see <b>.", "content": "It is 1 < 2.", "calls": []}),
    (
        THOUGHT + WEATHER,
        {
            "reasoning": "Let me see <b>.",
            "content": "",
            "calls": [("get_weather", '{"city": "Rome"}')],
        },
    ),
    (
        THOUGHT + PREAMBLE + WEATHER + FIRST,
        {
            "reasoning": "Let me see <b>.",
            "content": "I look it up.",
            "calls": [("get_weather", '{"city": "Rome"}'), ("ping", "{}")],
        },
    ),
    (
        FINAL.removeprefix("<|start|>assistant"),
        {"reasoning": "", "content": "It is 1 < 2.", "calls": []},
    ),
    (
        "no channels, <|strange|> as it is",
        {"reasoning": "", "content": "no channels, <|strange|> as it is", "calls": []},
    ),
    (
        THOUGHT[:40],
        {"reasoning": THOUGHT[:40].partition("<|message|>")[2], "content": "", "calls": []},
    ),
    (
        THOUGHT.removesuffix("<|end|>") + FINAL,
        {"reasoning": "Let me see <b>.", "content": "It is 1 < 2.", "calls": []},
    ),
    (
        WEATHER[: -len('"}<|call|>')],
        {"reasoning": "", "content": "", "calls": [("get_weather", '{"city": "Rome')]},
    ),
    (THOUGHT + "<|start|>assi", {"reasoning": "Let me see <b>.", "content": "", "calls": []}),
    ("", {"reasoning": "", "content": "", "calls": []}),
]


@pytest.mark.parametrize(("text", "told"), CASES)
def test_pieces_are_the_same_however_they_come(text: str, told: Told) -> None:
    for size in (1, 3, 7, 1000):
        assert read(text, size) == told


def told(*calls: tuple[str, str], content: str = "", reasoning: str = "") -> Told:
    return {"reasoning": reasoning, "content": content, "calls": [*calls]}


TO = "<|channel|>commentary to=functions.get_weather <|constrain|>json"
ROME = ("get_weather", '{"city": "Rome"}')
MENDED: list[tuple[str, Told]] = [
    (
        (
            ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city":'
            ' "Rome"}<|call|>'
        ),
        told(ROME),
    ),
    (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
        told(ROME),
    ),
    (' to=functions.get_weather<|channel|>analysis<|message|>{"city": "Rome"}<|call|>', told(ROME)),
    ('<|channel|>commentary to=get_weather<|message|>{"city": "Rome"}', told(ROME)),
    (THOUGHT + FIRST + WEATHER, told(("ping", "{}"), ROME, reasoning="Let me see <b>.")),
    (TO + "<|message|><|call|>", told(("get_weather", "{}"))),
    (TO + "<|message|> \n", told(("get_weather", "{}"))),
    (TO + "<|call|>", told(("get_weather", "{}"))),
    (TO + '{"city": "Rome"}<|call|>', told(ROME)),
    (
        TO + "<|message|>{'city': NaN, 'a': ['x<|call|>",
        told(("get_weather", '{"city": "NaN", "a": ["x"]}')),
    ),
    (TO + '<|message|>{"city": "Rome"} or so<|call|>', told(ROME, content=" or so")),
    (TO + "<|message|>Rome<|call|>", told(content="Rome")),
    (TO.replace("get_weather", "no_tool") + "<|message|>{}<|call|>", told(content="{}")),
    ("<|channel|>final It is 1 < 2.<|return|>", told(content="It is 1 < 2.")),
    ("<|channel|>final\n\nIt is.", told(content="It is.")),
    ('<|channel|>final<|constrain|>json{"a": 1}<|return|>', told(content='{"a": 1}')),
    ("<|channel|>final " + "word " * 300, told(content="word " * 300)),
    ("<|channel|>analysis Hm.<|end|>" + FINAL, told(content="It is 1 < 2.", reasoning="Hm.")),
    (
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>It is.",
        told(content="It is.", reasoning="Hm."),
    ),
    (THOUGHT + "It is.", told(content="It is.", reasoning="Let me see <b>.")),
    (THOUGHT + "<|start|>assistant It is.", told(content="It is.", reasoning="Let me see <b>.")),
    ("<|message|>It is.", told(content="It is.")),
    ("to be, or to=5", told(content="to be, or to=5")),
    ("to=5 is <", told(content="to=5 is <")),
]


@pytest.mark.parametrize(("text", "want"), MENDED)
def test_headers_and_texts_as_models_write_them(text: str, want: Told) -> None:
    for size in (1, 3, 7, 10_000):
        assert read(text, size, stopped=True) == want


def test_a_call_that_a_limit_cuts_stays_as_far_as_it_came() -> None:
    for size in (1, 100):
        assert read(TO + '<|message|>{"city": "Ro', size) == told(("get_weather", '{"city": "Ro'))
        assert (
            read(TO + "<|message|>", size)
            == read(TO.removesuffix("eather <|constrain|>json"), size)
            == told()
        )


def test_one_call_where_one_is_asked_for() -> None:
    assert read(WEATHER + FIRST, 5, parallel=False)["calls"] == [
        ("get_weather", '{"city": "Rome"}')
    ]


def test_an_answer_that_was_begun_goes_on() -> None:
    begun = "<|start|>assistant<|channel|>final<|message|>"
    assert read(" behind it<|return|>", 4, begun) == {
        "reasoning": "",
        "content": " behind it",
        "calls": [],
    }


def test_a_header_without_an_end_is_content() -> None:
    text = "<|channel|>" + "x" * 2000
    assert read(text, 100)["content"] == text


def test_beginnings_of_messages_without_an_end_end() -> None:
    """A start that is no header is met once: it held the loop for ever."""
    for size in (1, 100, 10_000):
        content = read("<|start|>" * 400, size)["content"]
        assert content == "", "they hold no text"


def test_no_other_parser_stands_beside_it() -> None:
    AnswerParsers(tool_call_parser="openai", reasoning_parser="openai_gptoss").check()
    AnswerParsers(reasoning_parser="openai_gptoss").check()
    with pytest.raises(UsageError, match="read one format"):
        AnswerParsers(tool_call_parser="hermes", reasoning_parser="openai_gptoss").check()
    with pytest.raises(UsageError, match="read one format"):
        AnswerParsers(tool_call_parser="openai", reasoning_parser="qwen3").check()
