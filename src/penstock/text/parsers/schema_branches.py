"""schema_branches: splits a JSON Schema into its alternatives. Resolves `$ref`, and combines
`anyOf`, `oneOf` and `allOf`:

    branches(schema, root)    [[plain, ...], ...]: an instance matches all plain schemas of a branch
    closed(schema, root)      the schema with the targets of its $refs included

Nothing is fetched from elsewhere: a `$ref` must point into its own document. Knows schemas; no
calls, no grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from penstock.errors import UsageError

Schema = Any  # a JSON schema, which is a mapping or a bool
Plain = Mapping[str, Any]  # a schema without the keywords in TAKEN_APART
Branch = list[Plain]

MOST_BRANCHES = 256
MOST_LOOKS = 2_000  # most schemas visited for one list of alternatives
TAKEN_APART = ("$ref", "allOf", "anyOf", "oneOf", "nullable")
# keywords whose values are data, not schemas
_DATA = ("enum", "const", "default", "examples", "example")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
_DOCUMENT = ("$defs", "definitions", "$id", "$schema")


def branches(schema: Schema, root: Schema) -> list[Branch]:
    """Returns the alternatives of a schema, each a list of plain schemas that all must match.
    Returns [] if nothing matches the schema. root: the document that its $refs point into. Raises
    UsageError for a $ref without a target, and for too many alternatives."""
    return _Walk(root).branches(schema, ())


class _Walk:
    def __init__(self, root: Schema) -> None:
        self._root, self._looks = root, 0

    def branches(self, schema: Schema, refs: tuple[str, ...]) -> list[Branch]:
        """Returns the alternatives of a schema. refs: the $refs followed so far; a $ref that leads
        back to itself has no alternatives."""
        self._looks += 1
        if self._looks > MOST_LOOKS:
            raise _too_many()
        if not isinstance(schema, dict) or schema.get("not") in (
            {},
            True,
        ):  # the library zod writes the schema `false` as {"not": {}}
            return [[]] if not isinstance(schema, dict) and schema is not False else []
        found: list[Branch] = [
            [{key: value for key, value in schema.items() if key not in TAKEN_APART}]
        ]
        if isinstance(ref := schema.get("$ref"), str):
            found = _both(
                found, [] if ref in refs else self.branches(target(ref, self._root), (*refs, ref))
            )
        for part in list_of(schema, "allOf"):
            found = _both(found, self.branches(part, refs))
        for key in ("anyOf", "oneOf"):
            if parts := list_of(schema, key):
                found = _both(
                    found, [branch for part in parts for branch in self.branches(part, refs)]
                )
        if schema.get("nullable") is True:  # `nullable` is OpenAPI's keyword
            found.append([{"type": "null"}])
        return found


def _both(one: list[Branch], other: list[Branch]) -> list[Branch]:
    if len(one) * len(other) > MOST_BRANCHES:
        raise _too_many()
    return [left + right for left in one for right in other]


def list_of(schema: Plain, key: str) -> Sequence[Any]:
    """Returns the list under a keyword; an empty one if there is none."""
    value = schema.get(key)
    return value if isinstance(value, list) else ()


def target(ref: str, root: Schema) -> Schema:
    """Returns the target of a $ref: a JSON pointer into its own document. Raises UsageError."""
    found = root
    path, *steps = unquote(ref).split("/")
    for step in (each.replace("~1", "/").replace("~0", "~") for each in steps):
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            path = ""
    if path != "#":
        raise _wrong(f"its $ref {ref!r} names nothing in its schema, and nothing is fetched")
    return found


def closed(schema: Schema, root: Schema) -> dict[str, Any]:
    """Returns the schema with the targets of its $refs included, so that it no longer needs `root`.
    Raises UsageError."""
    names: dict[str, str] = {}
    waiting: list[str] = []

    def copied(part: Any) -> Any:
        if isinstance(part, list):
            return [copied(each) for each in part]
        if not isinstance(part, dict):
            return part
        made = {
            key: kept(key, value)
            for key, value in part.items()
            if key not in (*_DOCUMENT, "nullable")
        }
        return {"anyOf": [made, {"type": "null"}]} if part.get("nullable") is True else made

    def kept(key: str, value: Any) -> Any:
        if key == "$ref" and isinstance(value, str):
            if value not in names:
                names[value] = str(len(names))
                waiting.append(value)
            return f"#/$defs/{names[value]}"
        if key in _BY_NAME and isinstance(value, dict):
            return {name: copied(each) for name, each in value.items()}
        return value if key in _DATA else copied(value)

    made = copied(schema) if isinstance(schema, dict) else {}
    found = {}
    while waiting:
        ref = waiting.pop()
        found[names[ref]] = copied(target(ref, root))
    version = {"$schema": root["$schema"]} if isinstance(root, dict) and "$schema" in root else {}
    return {**version, **made, **({"$defs": found} if found else {})}


def _too_many() -> UsageError:
    return _wrong(f"it has more than {MOST_BRANCHES} alternatives, or is nested too deep")


def _wrong(why: str) -> UsageError:
    return UsageError(why, param="tools", rule=why)
