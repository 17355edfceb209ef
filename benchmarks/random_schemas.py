"""Makes JSON schemas, all different, whose answers end even if a model draws at random.

Every text, list and number is bounded, every property is required. Equal seeds give equal schemas.
Knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

NAMES = (
    "name",
    "city",
    "street",
    "title",
    "summary",
    "author",
    "owner",
    "label",
    "note",
    "colour",
    "code",
    "unit",
    "kind",
    "state",
    "reason",
    "source",
    "target",
    "group",
    "branch",
    "version",
    "amount",
    "price",
    "count",
    "weight",
    "height",
)
WORDS = (
    "open",
    "closed",
    "new",
    "used",
    "red",
    "green",
    "low",
    "high",
    "north",
    "south",
    "draft",
    "final",
    "none",
)
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4")


def made_schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns schemas of objects with three to eight properties, some of which are lists and
    objects."""
    draw = random.Random(seed)
    return [_object(draw, draw.randint(3, 8), deep=2) for _ in range(count)]


def long_schema(items: int) -> dict[str, Any]:
    """Returns the schema of a list of at least `items` records,
    whose answer fills any max_tokens."""
    record = {
        "name": {"type": "string", "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "state": {"enum": list(WORDS[:4])},
        "checked": {"type": "boolean"},
    }
    return {"type": "array", "items": _closed(record), "minItems": items}


def record_of(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the schema of an object with these parts."""
    return _closed({f"part{at}": part for at, part in enumerate(parts)})


def _object(draw: random.Random, count: int, deep: int) -> dict[str, Any]:
    return _closed({name: _value(draw, deep) for name in draw.sample(NAMES, count)})


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _value(draw: random.Random, deep: int) -> dict[str, Any]:
    kind = draw.randrange(8 if deep else 6)
    if kind == 6:
        low = draw.randint(0, 2)
        return {
            "type": "array",
            "items": _value(draw, 0),
            "minItems": low,
            "maxItems": low + draw.randint(1, 4),
        }
    if kind == 7:
        return _object(draw, draw.randint(1, 4), deep - 1)
    if kind == 0:
        low = draw.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(1, 5000)}
    return {
        1: {"type": "string", "maxLength": draw.randint(8, 60)},
        2: {"enum": draw.sample(WORDS, draw.randint(2, 6))},
        3: {"type": ["boolean", "null"]},
        4: {"type": "string", "format": draw.choice(FORMATS)},
        5: {
            "type": "string",
            "pattern": f"^[A-Z]{{{draw.randint(1, 3)}}}-[0-9]{{{draw.randint(2, 6)}}}$",
        },
    }[kind]
