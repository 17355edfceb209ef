"""region_content: parses regions of a response_template. A region's content is JSON or a dialect of
it, tags, or lines with keys and values; transforms convert the result. Knows texts; no marks, no
message. Source: transformers' `utils/chat_parsing`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import regex

CONTENTS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
_KEY = regex.compile(r"(?<=[{,])\s*(\w+):")
_PLACE = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
Args = Mapping[str, Any]


def parse_content(text: str, kind: str, args: Args, patience: float) -> Any:
    """Returns the value of a region's text. kind: format of the content. args: the template's
    arguments for this format. patience: seconds per regex of the template. Raises ValueError for
    invalid text, TimeoutError, and KeyError if the template lacks an argument."""
    if kind == "json":
        return _json(text, args)
    if kind == "xml-inline":
        found = {}
        for match in regex.finditer(
            args["tag_pattern"], text, flags=regex.DOTALL, timeout=patience
        ):
            found[match["key"]] = _value(match["value"], args, patience)
        return found
    if kind == "kv-lines":
        pairs = (
            line.split(args.get("kv_sep", ":"), 1)
            for line in text.split(args.get("line_sep", "\n"))
        )
        return {
            pair[0].strip(): _value(pair[1].strip(), args, patience)
            for pair in pairs
            if len(pair) == 2
        }
    plain = text.strip() if args.get("strip", True) else text
    if kind == "bool":
        return plain.lower() in ("true", "1")
    return int(plain) if kind == "int" else float(plain) if kind == "float" else plain


def _value(text: str, args: Args, patience: float) -> Any:
    inner = args.get("value_parser")
    return (
        text
        if inner is None
        else parse_content(text, inner.get("name", "text"), inner.get("args", {}), patience)
    )


def _json(text: str, args: Args) -> Any:
    """Returns the value of JSON text. args["string_delims"]: further string delimiters.
    args["unquoted_keys"]: True if keys may have no quotes."""
    strings: list[str] = []

    def kept(match: Any) -> str:
        strings.append(match[1])
        return f'"\x01{len(strings) - 1}\x02"'

    plain = text
    for begin, end in args.get("string_delims", []):
        plain = regex.sub(
            regex.escape(begin) + "(.*?)" + regex.escape(end), kept, plain, flags=regex.DOTALL
        )
    if args.get("unquoted_keys"):
        plain = _KEY.sub(r'"\1":', plain)
    for at, string in enumerate(strings):
        plain = plain.replace(f'"\x01{at}\x02"', json.dumps(string))
    try:
        return json.loads(plain)
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def transformed(transform: Any, scope: Args) -> Any:
    """Returns the transform with `{name}` and `{name.key}` replaced by their values in `scope`.
    Raises KeyError or TypeError."""
    if isinstance(transform, dict):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    place = _PLACE.fullmatch(transform) if isinstance(transform, str) else None
    if place is None:
        return transform
    value: Any = scope
    for key in place[1].split("."):
        value = value[key]
    return value
