"""Calls as Qwen3-Coder writes them in practice: tags left out, Python's literals, prose that names
the tags. However the text is cut the same is read, and only JSON leaves as arguments."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from penstock.text.parsers.parser_registry import FORMATS, AnswerReader
from penstock.text.parsers.tool import Tool

Json = dict[str, Any]
PROPERTIES: Json = {
    "a": {"type": "string"},
    "b": {"type": "integer"},
    "n": {"type": "number"},
    "f": {"type": "boolean"},
    "l": {"type": "array", "items": {"type": "string"}},
    "o": {"type": "object"},
    "c": {"$ref": "#/$defs/C"},
    "al": {"allOf": [{"$ref": "#/$defs/C"}]},
    "on": {"anyOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]},
    "ob": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "os": {"type": ["string", "null"]},
    "si": {"type": ["string", "integer"], "maximum": 9},
    "so": {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]},
    "e": {"enum": ["x", 1, None]},
    "any": {},
}
F = Tool(
    name="f",
    parameters={"type": "object", "properties": PROPERTIES, "$defs": {"C": {"enum": ["1", "2"]}}},
)
G = Tool(name="g", parameters={"type": "object"})
KINDS = Tool(
    name="kinds",
    parameters={
        "anyOf": [
            {
                "properties": {"kind": {"const": "n"}, "v": {"type": "integer"}},
                "required": ["kind", "v"],
            },
            {
                "properties": {"kind": {"const": "t"}, "v": {"type": "string"}},
                "required": ["kind", "v"],
            },
        ]
    },
)


def finite(text: str) -> Any:
    """Reads JSON as RFC 8259 has it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def read(text: str, *, stopped: bool = True, step: int = 0) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls: names and arguments. step: letters at once; 0: all."""
    reader = AnswerReader(FORMATS["qwen3_coder"].parser([F, G, KINDS]))
    parts = [text[at : at + step] for at in range(0, len(text), step)] if step else [text]
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.end(stopped=stopped)
    content, calls = "", list[tuple[str, str]]()
    assert ("content", "arguments") not in pairwise(piece.kind for piece in pieces), (
        "a call is told in one go"
    )
    for piece in pieces:
        if piece.kind == "name":
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
        else:
            content += piece.text
    return content, calls


def p(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(body: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


OPEN = "<tool_call>\n<function=f>\n"
LEFT_OUT: list[tuple[str, str, list[Json]]] = [  # text, content, arguments
    (call("<parameter=a>\nalpha\n" + p("b", "5")), "", [{"a": "alpha", "b": 5}]),
    (call("<parameter=b>\n5\n" + p("a", "alpha")), "", [{"a": "alpha", "b": 5}]),
    (call("<parameter=a>\nbeta\n"), "", [{"a": "beta"}]),
    (OPEN + p("b", "51") + "</tool_call>\nDone now.", "\nDone now.", [{"b": 51}]),
    (OPEN + p("b", "52") + "</tool_call>\n" + call(p("a", "g")), "", [{"b": 52}, {"a": "g"}]),
    (OPEN + p("b", "5") + call(p("a", "g")), "", [{"b": 5}, {"a": "g"}]),
    (
        OPEN + "<parameter=a>\nx\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "",
        [{"a": "x"}, {}],
    ),
    (OPEN + "<parameter=a>\nx\n</tool_call>\n" + call(p("b", "1")), "", [{"a": "x"}, {"b": 1}]),
    (
        OPEN
        + p("a", "1")
        + "</function>\n<function=f>\n"
        + p("b", "2")
        + "</function>\n</tool_call>",
        "",
        [{"a": "1"}, {"b": 2}],
    ),
    (
        OPEN + p("a", "1") + "<function=f>\n" + p("b", "2") + "</function>\n</tool_call>",
        "",
        [{"a": "1"}, {"b": 2}],
    ),
    ("I look. " + call(p("a", "x")).removeprefix("<tool_call>\n"), "I look.", [{"a": "x"}]),
    ("Well.\n" + call(p("a", "x")).removeprefix("<tool_call>\n"), "Well.", [{"a": "x"}]),
    (OPEN + p("a", "x") + "</function>", "", [{"a": "x"}]),
    (OPEN + p("a", "x"), "", [{"a": "x"}]),
    (OPEN + "<parameter=a>\nx", "", [{"a": "x"}]),
    (OPEN, "", [{}]),
    (OPEN + "</tool_call>", "", [{}]),
    (OPEN + p("a", "x") + "Done.", "Done.", [{"a": "x"}]),
    (OPEN + "<parameter=a>\nx\n</function>\nDone.", "Done.", [{"a": "x"}]),
    (OPEN + "<parameter=a>\nx\n</tool_call>\nDone.", "\nDone.", [{"a": "x"}]),
    (call("<parameter=a\nxyz\n</parameter>\n" + p("b", "53")), "", [{"a": "xyz", "b": 53}]),
    (
        call("<parameter=a\nxyz\n</parameter\n" + p("b", "5")).replace("=f>", "=f"),
        "",
        [{"a": "xyz", "b": 5}],
    ),
    (call(p("a", "x")).replace("</function>", "</function"), "", [{"a": "x"}]),
    (call("<parameter=a>x</parameter><parameter=b>5</parameter>"), "", [{"a": "x", "b": 5}]),
    (call("<parameter=a>x<parameter=b>5</parameter>"), "", [{"a": "x", "b": 5}]),
    (call('<parameter="a">\nx\n</parameter>\n').replace("=f", "='f'"), "", [{"a": "x"}]),
    (call(p("b", "5") + "</parameter>\n"), "", [{"b": 5}]),
    (call(p("b", "5") + "so much\n" + p("a", "x")), "so much", [{"b": 5, "a": "x"}]),
    (call("<parameter=q>\n1\n<parameter=r>\n2\n", "g"), "", [{"q": "1", "r": "2"}]),
]


@pytest.mark.parametrize("text, content, arguments", LEFT_OUT)
def test_tags_that_are_left_out(text: str, content: str, arguments: list[Json]) -> None:
    said, calls = read(text)
    assert (said.strip(), [finite(each) for _, each in calls]) == (content.strip(), arguments)
    for step in (1, 3, 7):
        assert read(text, step=step) == (said, calls)


VALUES: list[tuple[str, str, Any]] = [
    ("l", "['aa', \"b'b\", 'it\\'s']", ["aa", "b'b", "it's"]),
    ("l", "('aa',)", ["aa"]),
    ("l", '["a", "b"', ["a", "b"]),
    ("l", '["a", "b",]', ["a", "b"]),
    ("l", "a, b", "a, b"),
    ("o", "{'xx': True, 'yy': None, 'z': (1, 2)}", {"xx": True, "yy": None, "z": [1, 2]}),
    (
        "o",
        '{"s": "</parameter>\\n</function>", "t": "a\nb"}',
        {"s": "</parameter>\n</function>", "t": "a\nb"},
    ),
    ("o", "{'a': NaN, 'b': -Infinity}", {"a": "NaN", "b": "-Infinity"}),
    ("o", "{a: b}", {"a": "b"}),
    ("n", "NaN", "NaN"),
    ("n", "Infinity", "Infinity"),
    ("n", "-Infinity", "-Infinity"),
    ("n", "1e999", "1e999"),
    ("n", "1.5e3", 1500.0),
    ("n", "9" * 5000, "9" * 5000),
    ("b", "05", "05"),
    ("b", "five or 6", "five or 6"),
    ("b", " 7 ", 7),
    ("b", "", ""),
    ("f", "True", True),
    ("f", "FALSE", False),
    ("b", "None", None),
    ("c", "1", "1"),
    ("al", "2", "2"),
    ("on", "1", "1"),
    ("on", "null", None),
    ("on", "None", None),
    ("c", '"2"', "2"),
    ("ob", "None", None),
    ("ob", "3", 3),
    ("os", "null", None),
    ("os", "None", None),
    ("os", "none", "none"),
    ("os", "3", "3"),
    ("si", "3", 3),
    ("si", "30", "30"),
    ("si", "3 kg", "3 kg"),
    ("si", "True", "True"),
    ("so", "{'a': 1}", {"a": 1}),
    ("so", "[1]", [1]),
    ("so", "{not", "{not"),
    ("so", "5", "5"),
    ("e", "1", 1),
    ("e", "x", "x"),
    ("e", "None", None),
    ("e", "y", "y"),
    ("any", "[1]", "[1]"),
    ("any", "5", "5"),
    ("zz", "5", "5"),
    ("a", '"quoted"', '"quoted"'),
    ("a", 'it\'s {"fine"}', 'it\'s {"fine"}'),
    ("a", "\n\tindented\n", "\n\tindented\n"),
    ("a", "", ""),
]


@pytest.mark.parametrize("key, text, value", VALUES)
def test_a_value_is_what_its_schema_has(key: str, text: str, value: Any) -> None:
    content, calls = read(call(p(key, text)))
    assert content == "" and finite(calls[0][1]) == {key: value}
    assert read(call(p(key, text)), step=1) == (content, calls)


TEXTS = [
    "he said </parameter> and went on",
    "he said\n</parameter>\nand went on",
    "a line of <parameter=b> and\n  <parameter=unknown>\nmore",
    (
        "def f():\n    return '</function>'\n</function>\n\n# </tool_call>\n<tool_call> and"
        " <function=f>"
    ),
    "<tool_call>\n<function=unknown>\n<parameter=x>",
    '"\\ud800" and \\n and \u2028',
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_may_speak_of_tags(text: str) -> None:
    whole = call(p("a", text) + p("b", "5"))
    assert [finite(arguments) for _, arguments in read(whole)[1]] == [{"a": text, "b": 5}]
    assert read(whole, step=1) == read(whole)


PROSE = [
    "Models write `<function=name>` and `<parameter=key>` in their calls; that is all.",
    "With `<tool_call>` and <function=f> and <parameter=a> a call begins, `</tool_call>` ends it.",
    "<function=f> begins a line,\n<function=f>\nand so does this",
    "<tool_call>\n<function=f>\nis how it begins.",
    call(p("a", "x"), "unknown"),
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "<tool_call>\n\n</tool_call>\n",
    "a < b <tool_call",
    "<tool_call>\n<function=unknown>\n" + call(p("a", "x"), "unknown") + "\n",
]


@pytest.mark.parametrize("text", PROSE)
def test_what_is_no_call_of_a_tool_stays_content(text: str) -> None:
    for step in (0, 1, 5):
        assert read(text, step=step) == (text, [])


def test_a_call_behind_one_of_no_tool_is_read() -> None:
    unknown = call(p("a", "x"), "unknown")
    assert read(f"{unknown}\n{call(p('b', '1'))}") == (unknown, [("f", '{"b": 1}')])


def test_what_came_before_tells_alternatives_apart() -> None:
    assert read(call(p("kind", "n") + p("v", "5"), "kinds"))[1] == [
        ("kinds", '{"kind": "n", "v": 5}')
    ]
    assert read(call(p("kind", "t") + p("v", "5"), "kinds"))[1] == [
        ("kinds", '{"kind": "t", "v": "5"}')
    ]


CUT = [
    (OPEN, "{"),
    (OPEN + "<param", "{"),
    (OPEN + "<parameter=a>\n", '{"a": "'),
    (OPEN + "<parameter=a>\nx y", '{"a": "x y'),
    (OPEN + "<parameter=a>\nx\n</para", '{"a": "x'),
    (OPEN + "<parameter=a>\nx\n</parameter>\n", '{"a": "x"'),
    (OPEN + p("a", "x") + "</function", '{"a": "x"'),
    (OPEN + "<parameter=b>\n12", '{"b": 12'),
    (OPEN + "<parameter=l>\n['a', 'b", '{"l": ["a", "b'),
    (OPEN + "<parameter=on>\n1", '{"on": "1'),
    (OPEN + "<parameter=e>\nnul", '{"e": nul'),
]


@pytest.mark.parametrize("text, arguments", CUT)
def test_a_call_that_a_limit_cuts_stays_as_far_as_it_came(text: str, arguments: str) -> None:
    for step in (0, 1):
        assert read(text, stopped=False, step=step) == ("", [("f", arguments)])
