"""Fifty JSON schemas of our own making: of the kinds that programs send, each with answers short
enough to end."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(properties: dict[str, Any], optional: tuple[str, ...] = (), **more: Any) -> Schema:
    """An object of these properties alone; all but the optional ones are required."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def array(items: Any, least: int, most: int, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def whole(least: int, most: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, **more}


def text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def like(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def of_format(name: str) -> Schema:
    return {"type": "string", "format": name}


YES_NO: Schema = {"type": "boolean"}
NAME = like("^[A-Z][a-z]{1,8}$")
COLOUR: Schema = {"enum": ["red", "green", "blue"]}
POINT = record({"x": whole(-9, 9), "y": whole(-9, 9)})
SCHEMAS: list[Schema] = [
    # Plain values
    {"type": "null"},
    YES_NO,
    whole(0, 0),
    whole(-120, -3),
    whole(0, 1_000_000),
    whole(0, 700, multipleOf=7),
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"const": "ä\n\"'\\"},
    {"const": {"a": [1, None]}},
    {"enum": ["a", 1, None, True, {"b": []}, [2.5]]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    # Texts
    text(12),
    text(9, minLength=3),
    text(0),
    NAME,
    like("^(yes|no|maybe)$"),
    like(r"^[0-9]{3}-[0-9]{4}$"),
    like("^[ab]*c$") | {"maxLength": 9},
    of_format("date"),
    of_format("uuid"),
    of_format("ipv4"),
    # Lists
    array(YES_NO, 0, 3),
    array(whole(0, 99), 2, 5),
    array(COLOUR, 1, 4),
    array(array(whole(0, 9), 2, 2), 2, 2),
    array({}, 0, 0),
    {"type": "array", "prefixItems": [NAME, whole(0, 9), YES_NO], "items": False, "minItems": 3},
    {
        "type": "array",
        "prefixItems": [{"const": "point"}],
        "items": whole(0, 9),
        "minItems": 2,
        "maxItems": 4,
    },
    # Objects
    POINT,
    record({}),
    record({"a": YES_NO, "b": YES_NO}, ("a", "b")),
    record({"id": whole(1, 999), "name": NAME}, ("name",)),
    record({"colour": COLOUR, "size": {"enum": ["S", "M", "L"]}, "count": whole(1, 12)}),
    record({"person": record({"name": NAME, "age": whole(0, 120)}), "member": YES_NO}),
    record({"from": POINT, "to": POINT, "via": array(POINT, 0, 1)}),
    record({"when": of_format("date"), "who": array(NAME, 1, 2)}),
    record({'quoted "key"': whole(0, 9), "ключ": YES_NO, "": {"type": "null"}}),
    record({"a": record({"b": record({"c": record({"d": whole(0, 9)})})})}),
    record({"value": {"const": 7}, "text": text(6)}),
    record({"a": YES_NO}, patternProperties={"^x[0-9]$": whole(0, 9)}, maxProperties=2),
    # Choices
    {"anyOf": [{"type": "null"}, whole(0, 9)]},
    {"anyOf": [NAME, record({"name": NAME}), array(NAME, 1, 2)]},
    {
        "anyOf": [
            record({"kind": {"const": kind}, side: whole(1, 9)})
            for kind, side in (("circle", "r"), ("box", "a"))
        ]
    },
    {"oneOf": [{"type": "string", "maxLength": 5}, YES_NO]},
    {"allOf": [whole(0, 50), {"multipleOf": 5}]},
    record({"code": {"allOf": [text(6), like("^x[0-9]+$")]}}),
    # References
    {"$ref": "#/$defs/point", "$defs": {"point": POINT}},
    record(
        {"of": {"$ref": "#/$defs/deep"}},
        **{"$defs": {"deep": array({"$ref": "#/$defs/deep"}, 0, 1)}},
    ),
    record(
        {"value": whole(0, 9), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        **{"$defs": {"node": record({"value": whole(0, 9), "next": {"type": "null"}})}},
    ),
    record({"left": {"$ref": "#/properties/right"}, "right": COLOUR}),
]
