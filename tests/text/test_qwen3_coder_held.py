"""Calls in qwen3_coder's tags that are held: a text that the grammar takes is read back as
arguments that fit the schema, and what doesn't fit isn't taken. What a strict schema says and no
grammar holds is refused by its name."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from penstock.errors import UsageError
from penstock.request import StructuredOutputsParams
from penstock.text.grammar import check_grammar
from penstock.text.parsers.answer_grammar import around
from penstock.text.parsers.parser_registry import FORMATS, AnswerReader
from penstock.text.parsers.tool import Tool

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
CODER = FORMATS["qwen3_coder"]
Json = dict[str, Any]


def obj(properties: Json, *required: str, **more: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def lark_of(tool: Tool) -> str:
    return around("closed", calls=CODER, tools=[tool], must_call=True, parallel=False)


def written(*arguments: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def read(tool: Tool, text: str) -> Any:
    """The arguments of a held call."""
    assert CODER.held_parser is not None
    whole, cut = (AnswerReader(CODER.held_parser([tool])) for _ in range(2))
    pieces = whole.feed(text) + whole.end(stopped=True)
    parts = [piece for letter in text for piece in cut.feed(letter)] + cut.end(stopped=True)
    arguments, again = (
        "".join(piece.text for piece in each if piece.kind == "arguments")
        for each in (pieces, parts)
    )
    assert arguments == again and [piece.text for piece in pieces if piece.kind == "name"] == ["f"]
    assert not any(piece.kind == "content" for piece in pieces)
    return json.loads(arguments)


class Held:
    """A tool's grammar over single bytes."""

    def __init__(self, parameters: Json, *, strict: bool = False) -> None:
        self.tool = Tool(name="f", parameters=parameters, strict=strict)
        self.lark = lark_of(self.tool)
        self.tokenizer = llguidance.LLTokenizer("byte")

    def takes(self, text: str) -> bool:
        matcher = llguidance.LLMatcher(self.tokenizer, self.lark)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


ENUM = {"type": "string", "enum": ["red", "blue"]}
A = obj({"k": {"type": "integer"}}, "k", additionalProperties=False)
B = obj({"s": {"type": "boolean"}}, "s", additionalProperties=False)
KIDS = {"type": "array", "items": {"$ref": "#/$defs/Node"}}
NODE = {
    "$ref": "#/$defs/Node",
    "$defs": {"Node": obj({"v": {"type": "integer"}, "kids": KIDS}, "v")},
}
Texts = tuple[tuple[str, str], ...]
CASES: dict[
    str, tuple[Json, list[tuple[Texts, Json]], list[Texts]]
] = {  # schema, what is taken and read, what is not
    "an optional enum": (
        obj({"c": {"anyOf": [ENUM, {"type": "null"}]}}, "c"),
        [((("c", "red"),), {"c": "red"}), ((("c", "null"),), {"c": None})],
        [(("c", "green"),), (("c", '"red"'),), ()],
    ),
    "an enum of mixed kinds": (
        obj({"c": {"enum": ["x", "1", 1, 2.5, None, True, {"a": 1}]}}, "c"),
        [
            ((("c", "x"),), {"c": "x"}),
            ((("c", "1"),), {"c": "1"}),
            ((("c", "2.5"),), {"c": 2.5}),
            ((("c", "null"),), {"c": None}),
            ((("c", "true"),), {"c": True}),
            ((("c", '{"a":1}'),), {"c": {"a": 1}}),
        ],
        [(("c", "zebra"),), (("c", "3"),), (("c", "false"),), (("c", "None"),)],
    ),
    "a number in bounds, or a word": (
        obj({"i": {"anyOf": [{"type": "integer", "maximum": 5}, {"const": "max"}]}}),
        [((("i", "5"),), {"i": 5}), ((("i", "max"),), {"i": "max"}), ((), {})],
        [(("i", "6"),), (("i", "many"),)],
    ),
    "a number in bounds, or any text": (
        obj({"i": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string"}]}}),
        [
            ((("i", "5"),), {"i": 5}),
            ((("i", "6"),), {"i": "6"}),
            ((("i", "5 kg"),), {"i": "5 kg"}),
        ],
        [],
    ),
    "a text or an object": (
        obj({"i": {"type": ["string", "object"], "required": ["a"]}}),
        [
            ((("i", 'say {"b":1}'),), {"i": 'say {"b":1}'}),
            ((("i", '{"a":1}'),), {"i": {"a": 1}}),
        ],
        [(("i", '{"b":1}'),), (("i", "{"),)],
    ),
    "types in a list": (
        obj(
            {
                "i": {"type": ["integer", "null"]},
                "j": {"type": ["boolean", "array"], "items": {"type": "integer"}},
            }
        ),
        [
            ((("i", "null"), ("j", "[1,2]")), {"i": None, "j": [1, 2]}),
            ((("j", "true"),), {"j": True}),
        ],
        [(("i", "x"),), (("j", '["x"]'),)],
    ),
    "others by their schema": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [((("kk", "1"), ("b-2 c", "-7")), {"kk": 1, "b-2 c": -7}), ((), {})],
        [(("kk", "word"),), (("kk", "1.5"),)],
    ),
    "others beside names": (
        obj({"a": {"type": "boolean"}}, additionalProperties=ENUM),
        [
            (
                (("a", "true"), ("ab", "red"), ("b", "blue")),
                {"a": True, "ab": "red", "b": "blue"},
            )
        ],
        [(("ab", "green"),), (("b", "red"), ("a", "red"))],
    ),
    "a $ref at the top": (
        {"$ref": "#/$defs/A", "$defs": {"A": A}},
        [((("k", "3"),), {"k": 3})],
        [(), (("s", "true"),)],
    ),
    "anyOf at the top": (
        {"anyOf": [A, B]},
        [((("k", "3"),), {"k": 3}), ((("s", "false"),), {"s": False})],
        [(), (("k", "x"),), (("k", "3"), ("s", "true"))],
    ),
    "anyOf of what is required": (
        obj(
            {"a": {"type": "string"}, "b": {"type": "string"}},
            anyOf=[{"required": ["a"]}, {"required": ["b"]}],
        ),
        [
            ((("a", "x"),), {"a": "x"}),
            ((("b", "y"),), {"b": "y"}),
            ((("a", "x"), ("b", "y")), {"a": "x", "b": "y"}),
        ],
        [()],
    ),
    "anyOf told apart by a kind": (
        {
            "anyOf": [
                obj({"kind": {"const": "n"}, "v": {"type": "integer"}}, "kind", "v"),
                obj({"kind": {"const": "t"}, "v": {"type": "string"}}, "kind", "v"),
            ]
        },
        [
            ((("kind", "n"), ("v", "5")), {"kind": "n", "v": 5}),
            ((("kind", "t"), ("v", "5")), {"kind": "t", "v": "5"}),
        ],
        [(("kind", "n"), ("v", "x"))],
    ),
    "allOf at the top": (
        {
            "type": "object",
            "allOf": [
                obj({"a": {"type": "integer"}}, "a"),
                obj({"a": {"minimum": 3}, "b": ENUM}, "b"),
            ],
        },
        [((("a", "3"), ("b", "red")), {"a": 3, "b": "red"})],
        [(("a", "2"), ("b", "red")), (("a", "3"),)],
    ),
    "allOf that closes": (
        {"allOf": [A, obj({"other": {"type": "integer"}})]},
        [((("k", "1"),), {"k": 1})],
        [(("k", "1"), ("other", "1"))],
    ),
    "required without a property": (
        obj({"z": {"type": "string"}}, "z", "y"),
        [((("z", "a"), ("y", "b")), {"z": "a", "y": "b"})],
        [(("z", "a"),), (("y", "b"),)],
    ),
    "a property that is false, or true": (
        obj({"a": False, "b": {"not": {}}, "c": True}, additionalProperties=False),
        [((("c", "[1]"),), {"c": "[1]"}), ((), {})],
        [(("a", "1"),), (("b", "1"),)],
    ),
    "the whole schema again": (
        obj(
            {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "v",
            "next",
        ),
        [
            (
                (("v", "1"), ("next", '{"v":2,"next":null}')),
                {"v": 1, "next": {"v": 2, "next": None}},
            )
        ],
        [(("v", "1"), ("next", '{"v": 2}'))],
    ),
    "a property again": (
        obj(
            {
                "a/b": ENUM,
                "c": {"$ref": "#/properties/a~1b"},
                "d": {"type": "array", "items": {"$ref": "#/properties/c"}},
            }
        ),
        [((("c", "red"), ("d", '["blue"]')), {"c": "red", "d": ["blue"]})],
        [(("c", "green"),), (("d", '["green"]'),)],
    ),
    "a definition that holds itself": (
        NODE,
        [
            (
                (("v", "1"), ("kids", '[{"v":2,"kids":[]}]')),
                {"v": 1, "kids": [{"v": 2, "kids": []}]},
            )
        ],
        [(("v", "1"), ("kids", '[{"v": "x"}]'))],
    ),
    "null where OpenAPI says so": (
        obj({"a": {"type": "integer", "nullable": True}, "b": {**ENUM, "nullable": True}}),
        [
            ((("a", "null"), ("b", "null")), {"a": None, "b": None}),
            ((("a", "1"), ("b", "red")), {"a": 1, "b": "red"}),
        ],
        [(("b", "green"),)],
    ),
    "what is said of texts": (
        obj(
            {
                "p": {"type": "string", "pattern": "^[a-c]+$"},
                "q": {"type": "string", "pattern": "[0-9]"},
                "l": {"type": "string", "minLength": 2, "maxLength": 3},
                "d": {"type": "string", "format": "date"},
                "e": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
            }
        ),
        [
            (
                (("p", "abc"), ("q", "no 7"), ("l", "ééé"), ("d", "2024-02-29"), ("e", "null")),
                {"p": "abc", "q": "no 7", "l": "ééé", "d": "2024-02-29", "e": None},
            ),
            ((("e", "a.b@c.org"),), {"e": "a.b@c.org"}),
        ],
        [
            (("p", "abd"),),
            (("q", "no"),),
            (("l", "a"),),
            (("l", "abcd"),),
            (("d", "today"),),
            (("e", "me"),),
        ],
    ),
    "tags in texts": (
        obj({"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "string"}}}),
        [
            (
                (
                    (
                        "a",
                        (
                            "he said </parameter>"
                            " and\n<parameter=b>\n</function>\n</tool_call>\nwent on"
                        ),
                    ),
                ),
                {
                    "a": (
                        "he said </parameter>"
                        " and\n<parameter=b>\n</function>\n</tool_call>\nwent on"
                    )
                },
            ),
            (
                (("a", ""), ("b", '["</parameter></function>"]')),
                {"a": "", "b": ["</parameter></function>"]},
            ),
            ((("a", "\n x \n"),), {"a": "\n x \n"}),
        ],
        [],
    ),
    "a tag's line is no text": (
        obj({"a": {"enum": ["x\n</parameter>\ny", "x\n</parameter>", "z"]}}),
        [((("a", "z"),), {"a": "z"})],
        [(("a", "x\n</parameter>\ny"),), (("a", "x\n</parameter>"),)],
    ),
    "an enum with a pattern, which a search would take ages for": (
        obj({"a": {"enum": ["a" * 60 + "b", "a" * 50, "ab1"], "pattern": "^(a+)+$"}}),
        [((("a", "a" * 50),), {"a": "a" * 50})],
        [(("a", "a" * 60 + "b"),), (("a", "ab1"),)],
    ),
    "no arguments": (obj({}), [((), {})], [(("a", "1"),)]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_fits_its_schema(name: str) -> None:
    schema, good, bad = CASES[name]
    held = Held(schema)
    for arguments, want in good:
        text = written(*arguments)
        assert held.takes(text) and read(held.tool, text) == want
        if "OpenAPI" not in name:
            jsonschema.validate(want, held.tool.schema)
    for arguments in bad:
        assert not held.takes(written(*arguments))


CITY = obj({"a": {"type": "string"}, "b": {"type": "string"}}, additionalProperties=False)
UNHELD: list[tuple[str, Any]] = [
    ("minProperties", 1),
    ("maxProperties", 1),
    ("dependentRequired", {"a": ["b"]}),
    ("not", {"required": ["a"]}),
    ("propertyNames", {"maxLength": 3}),
    ("if", {"required": ["a"]}),
    ("patternProperties", {"^x": {}}),
    ("dependentSchemas", {"a": {}}),
    ("unevaluatedProperties", False),
    ("enum", [{"a": "x"}]),
    ("const", {"a": "x"}),
]


@pytest.mark.parametrize("keyword, value", UNHELD)
def test_a_strict_schema_that_is_not_held_is_refused_by_name(keyword: str, value: Any) -> None:
    with pytest.raises(
        UsageError, match=rf"calls of the tool f cannot be held: .*{keyword}.*leave .*strict"
    ):
        Held({**CITY, keyword: value}, strict=True)
    assert Held({**CITY, keyword: value}).takes(written(("a", "x"))), (
        "without strict it is passed over"
    )
    within = {"$defs": {"T": {**CITY, keyword: value}}, "$ref": "#/$defs/T"}
    with pytest.raises(UsageError, match=keyword):
        Held(within, strict=True)


@pytest.mark.parametrize(
    "schema, says",
    [
        (obj({"a": {"type": "string", "not": {"const": "x"}}}), "not"),
        (obj({"a": {"type": "array", "uniqueItems": True}}), "uniqueItems"),
        (obj({"a": {"type": "string", "format": "regex"}}), "regex"),
        (obj({"a": {"type": "string", "pattern": "(?=x)y"}}), "look-around"),
        ({"oneOf": [CITY, {**CITY, "required": ["a"]}]}, "oneOf"),
    ],
)
def test_strict_passes_over_nothing_and_without_it_what_can_be_held_is(
    schema: Json, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Held(schema, strict=True)
    held = Held(schema)
    check_grammar(StructuredOutputsParams(around=held.lark))
    assert held.takes(written(("a", "[]" if says == "uniqueItems" else "word")))


@pytest.mark.parametrize(
    "schema, says",
    [
        (obj({"a": {"$ref": "#/$defs/no"}}), "its .ref '#/.defs/no' names nothing in its schema"),
        (
            obj({"a": {"$ref": "https://x.org/y"}}),
            "names nothing in its schema, and nothing is fetched",
        ),
        (obj({"a": False}, "a"), "no arguments fit its schema"),
        (obj({"a": {"$ref": "#/properties/a"}}, "a"), "no arguments fit its schema"),
        (obj({}, "a", additionalProperties=False), "no arguments fit its schema"),
        (obj({"a>b": {}}, "a>b"), "no tag can hold the name of its argument 'a>b'"),
        (
            {"allOf": [{"anyOf": [{"required": [key]} for key in "abcd"]}] * 5},
            "more than 256 alternatives",
        ),
    ],
)
def test_what_can_never_be_called_is_said(schema: Json, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Held(schema)


def _drawn(held: Held, draw: random.Random) -> str | None:
    """A text that the grammar allows, byte by byte; None where it did not come to its end."""
    matcher = llguidance.LLMatcher(held.tokenizer, held.lark)
    likely = [
        text.encode()
        for text in ("\n</parameter>\n", "</function>\n", "5", "null", "red", "}", "]", '"', ",")
    ]
    made, wanted = b"", b""
    while not matcher.is_accepting() and len(made) < 400:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if not (wanted and bits[wanted[0]]):
            wanted = draw.choice([text for text in likely if bits[text[0]]] or [b""])
        if not wanted or draw.random() < 0.04:
            wanted = bytes(
                [
                    int(
                        draw.choice(
                            [each for each in np.nonzero(bits[:127])[0] if each > 31 or each == 10]
                        )
                    )
                ]
            )
        assert matcher.consume_token(wanted[0])
        made, wanted = made + wanted[:1], wanted[1:]
    return made.decode() if matcher.is_accepting() else None


@pytest.mark.parametrize("name", CASES)
def test_texts_drawn_at_random_fit_the_schema(name: str) -> None:
    held, whole = Held(CASES[name][0]), 0
    for seed in range(8):
        text = _drawn(held, random.Random(seed))
        if text is not None:
            whole += 1
            arguments = read(held.tool, text)
            if "OpenAPI" not in name:
                jsonschema.validate(arguments, held.tool.schema)
    assert whole


FORMATTED = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["1900-02-29", "2023-04-31", "2023-13-01", "23-1-1"],
    ),
    "time": (["10:20:30Z", "23:59:59.5+01:00"], ["25:00:00Z", "10:20:30"]),
    "date-time": (["2024-02-29T10:20:30Z"], ["2024-02-29", "2024-02-30T10:20:30Z"]),
    "duration": (["P1Y2M3D", "PT5M", "P1DT2H", "P3W"], ["P", "PT", "1D"]),
    "email": (["a.b+c@d.org"], ["a@", "@b", "a..b@c"]),
    "hostname": (["a.b-c.de"], ["-a", "a..b"]),
    "ipv4": (["1.2.3.255"], ["256.1.1.1", "1.2.3"]),
    "ipv6": (
        ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
        ["1:2", "1::2::3", "1:2:3:4:5:6:7:8:9"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "uri": (["https://a.b/c?d=e#f", "mailto:a@b"], ["abc", "://x", "a b:c"]),
}


@pytest.mark.parametrize("name", FORMATTED)
def test_formats_of_texts(name: str) -> None:
    held = Held(obj({"a": {"type": "string", "format": name}}), strict=True)
    good, bad = FORMATTED[name]
    assert all(held.takes(written(("a", text))) for text in good)
    assert not any(held.takes(written(("a", text))) for text in bad)
