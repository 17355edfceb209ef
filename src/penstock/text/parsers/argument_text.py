"""argument_text: converts arguments written as text to JSON. Models write them as bare text between
tags; the tool's schema decides whether `5` becomes a number or a string.

    Arguments(tool).read(key, text)    returns the argument's JSON

Knows tools and schemas; no tags.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from penstock.errors import UsageError
from penstock.text.parsers.json_mending import SPACE, json_text_of, mended
from penstock.text.parsers.schema_branches import Branch, Plain, Schema, branches, list_of
from penstock.text.parsers.tool import Tool

_NUMBERS = frozenset(("integer", "number"))
# keywords from which the type of a schema without `type` is inferred
_INFERRED = {
    "object": ("properties", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_BOUNDS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda number, step: not step or number % step == 0,
}
_PYTHONS = ("None", "True", "False")


@dataclass(frozen=True, slots=True)
class Shape:
    """One alternative of a tool's arguments, if the schema has several (anyOf). named: schemas of
    arguments by name, in order. required: names that must be present. others: schema of all other
    arguments; None: none are allowed. plain: the schemas that this alternative was made from."""

    named: Mapping[str, Schema]
    required: frozenset[str]
    others: Schema | None
    plain: Branch

    def schema_of(self, key: str) -> Schema | None:
        """Returns an argument's schema; None if the argument is not allowed."""
        return self.named.get(key, self.others)


def shapes_of(tool: Tool) -> list[Shape]:
    """Returns the alternatives of a tool's arguments; an empty list if nothing matches its schema.
    Raises UsageError."""
    found = (_shape(branch) for branch in branches(tool.schema, tool.schema))
    return [shape for shape in found if shape is not None]


def _shape(branch: Branch) -> Shape | None:
    if "object" not in Alternative.of(branch).kinds:
        return None
    required = dict.fromkeys(
        key for plain in branch for key in list_of(plain, "required") if isinstance(key, str)
    )
    keys = dict.fromkeys(key for plain in branch for key in _properties(plain)) | required
    named = {key: _all([_property(plain, key) for plain in branch]) for key in keys}
    if any(named[key] is False for key in required):
        return None
    others = _all([plain.get("additionalProperties", True) for plain in branch])
    said = any("additionalProperties" in plain for plain in branch)
    closed = any("properties" in plain for plain in branch) and not said
    patterned = any("patternProperties" in plain for plain in branch)
    return Shape(
        {key: schema for key, schema in named.items() if schema is not False},
        frozenset(required),
        None if closed or patterned or others is False else others,
        branch,
    )


def _properties(plain: Plain) -> Mapping[str, Schema]:
    said = plain.get("properties")
    return said if isinstance(said, dict) else {}


def _property(plain: Plain, key: str) -> Schema:
    said = _properties(plain)
    return said[key] if key in said else plain.get("additionalProperties", True)


def _all(schemas: list[Schema]) -> Schema:
    """Returns one schema that requires all of the given ones."""
    said = [schema for schema in schemas if schema is not True and schema != {}]
    if len(said) < 2:
        return said[0] if said else True
    return False if False in said else {"allOf": said}


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative of a single argument's schema. kinds: its JSON types; string if it names
    none, number for integers too. values: all allowed values if the schema lists them, else None.
    """

    kinds: frozenset[str]
    values: list[Any] | None
    branch: Branch

    @classmethod
    def of(cls, branch: Branch) -> Alternative:
        """Makes the alternative from a branch, a list of schemas that all must match
        (schema_branches.py)."""
        kinds: frozenset[str] | None = None
        values: list[Any] | None = None
        for plain in branch:
            if (said := _said(plain)) is not None:
                kinds = said if kinds is None else kinds & said
            if (listed := _listed(plain)) is not None:
                values = (
                    listed
                    if values is None
                    else [value for value in values if _is_in(value, listed)]
                )
        if values is not None:
            values = [value for value in values if kinds is None or _kind(value) in kinds]
            kinds = frozenset(map(_kind, values))
        elif kinds is None:
            kinds = _inferred(branch)
        return cls(kinds, values, branch)

    @property
    def others(self) -> frozenset[str]:
        """Returns the allowed JSON types except string."""
        return self.kinds - {"string"}

    def fits(self, made: str) -> bool:
        """Returns True if a JSON text matches this alternative. Lists and objects are checked only
        by their type."""
        if made[0] in "{[" and self.values is None:
            return {"{": "object", "[": "array"}[made[0]] in self.kinds
        try:
            value = json.loads(made)
        except RecursionError:
            return False
        if self.values is not None:
            return _is_in(value, self.values)
        return _kind(value) in self.kinds and all(_in_bounds(plain, value) for plain in self.branch)


def _said(plain: Plain) -> frozenset[str] | None:
    said = plain.get("type")
    if not isinstance(said, str | list):
        return None
    kinds = frozenset(
        kind for kind in ([said] if isinstance(said, str) else said) if isinstance(kind, str)
    )
    return kinds | _NUMBERS if "number" in kinds else kinds


def _listed(plain: Plain) -> list[Any] | None:
    listed = plain.get("enum")
    if "const" in plain:
        return (
            [plain["const"]]
            if not isinstance(listed, list) or _is_in(plain["const"], listed)
            else []
        )
    return listed if isinstance(listed, list) else None


def _inferred(branch: Branch) -> frozenset[str]:
    for kind, words in _INFERRED.items():
        if any(word in plain for plain in branch for word in words):
            return _NUMBERS if kind == "number" else frozenset((kind,))
    return frozenset(("string",))


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _is_in(value: Any, listed: Iterable[Any]) -> bool:
    return any(value == each and _kind(value) == _kind(each) for each in listed)


def _in_bounds(plain: Plain, value: Any) -> bool:
    if _kind(value) not in _NUMBERS:
        return True
    number = Fraction(str(value))
    for word, keeps in _BOUNDS.items():
        said = plain.get(word)
        if (
            isinstance(said, int | float)
            and not isinstance(said, bool)
            and not keeps(number, Fraction(str(said)))
        ):
            return False
    return True


class ArgumentText:
    """Converts one argument's text to JSON. free: True if any string is allowed. named: strings
    that the schema lists. others: allowed types other than string."""

    def __init__(self, alternatives: list[Alternative]) -> None:
        self.alternatives = alternatives
        self.free = any("string" in each.kinds and each.values is None for each in alternatives)
        self.named = {
            value for each in alternatives for value in each.values or () if isinstance(value, str)
        }
        self.others = frozenset(kind for each in alternatives for kind in each.others)

    def read(self, text: str) -> str:
        """Returns the argument's JSON: a number, object and so on if the text is one and the schema
        allows it, else a string."""
        plain = text.strip(SPACE)
        made = (
            None
            if text in self.named or not (self.others or self.named)
            else mended(plain, close=not self.free)
        )
        if made is not None and (
            made == plain or plain in _PYTHONS or made[0] in "{[" or not self.free
        ):
            only_text = made.startswith('"') and self.free
            if not only_text and (self.fits(made) or not (self.free or self.named)):
                return made
        return json_text_of(plain if plain in self.named and not self.free else text)

    def fits(self, made: str) -> bool:
        """Returns True if a JSON text matches the schema. Lists and objects are checked only by
        their type."""
        return any(each.fits(made) for each in self.alternatives)


class Arguments:
    """Reads the arguments of one call in order. Each argument may exclude some alternatives of the
    schema. names: argument names in the schema. others: True if further arguments are allowed."""

    def __init__(self, tool: Tool) -> None:
        self._root = tool.schema
        try:
            self._shapes = shapes_of(tool)
        except (UsageError, RecursionError):  # an invalid schema makes all arguments strings
            self._shapes = []
        self.names = {key for shape in self._shapes for key in shape.named}
        self.others = not self._shapes or any(shape.others is not None for shape in self._shapes)

    def text(self, key: str) -> ArgumentText:
        """Returns the converter of an argument.
        Arguments that the schema doesn't know are strings."""
        found = [each for shape in self._shapes for each in self._alternatives(shape, key)]
        return ArgumentText(found or [Alternative.of([])])

    def read(self, key: str, text: str) -> str:
        """Returns the JSON of an argument. key: its name. text: what the model wrote."""
        made = self.text(key).read(text)
        if len(self._shapes) > 1:
            fitting = [
                each
                for each in self._shapes
                if ArgumentText(self._alternatives(each, key)).fits(made)
            ]
            self._shapes = fitting or self._shapes
        return made

    def _alternatives(self, shape: Shape, key: str) -> list[Alternative]:
        schema = shape.schema_of(key)
        try:
            return (
                []
                if schema is None
                else [Alternative.of(branch) for branch in branches(schema, self._root)]
            )
        except (UsageError, RecursionError):
            return []
