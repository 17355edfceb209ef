"""tag_grammar: grammars of tool calls written in tags. A call's tags are those of tags.py; the
arguments match their tool's schema:

    arguments: (a b? | c other*)        the arguments of each alternative of the schema, in order
    a: "<parameter=a>\\n" (text | json "\\n</parameter>\\n")

A string's enum, pattern, lengths and format become one regex up to its closing tag. Values in JSON
are enforced by llguidance. A strict schema with keywords that these rules can't enforce is refused.
Knows schemas and Lark; parsers read the calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from penstock.errors import UsageError
from penstock.request import StructuredOutputsParams
from penstock.text.grammar import WHITESPACE, check_grammar
from penstock.text.parsers.argument_text import Alternative, Shape, shapes_of
from penstock.text.parsers.schema_branches import Branch, Plain, Schema, branches, closed
from penstock.text.parsers.schema_formats import FORMATS
from penstock.text.parsers.tags import Tags
from penstock.text.parsers.tool import Tool, json_text, lark_text

_ANY = "/(?s:.*)/"
_NO_BRACKET = r"~/[ \t\r\n]*[\{\[(](?s:.*)/"
_NOT_HERE = "is not held where arguments are written in tags: leave it out, or strict"
MOST_KEPT = 16_384  # most characters of a schema whose rules are cached
_BRACKETED = {"object", "array"}
# regex of argument names that the parser reads back unchanged
_KEY = r"[^<>\s\"'](?:[^<>\n]*[^<>\s\"'])?"
# keywords of objects that these rules can't enforce
_NOT_HELD = (
    "minProperties",
    "maxProperties",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
    "enum",
    "const",
)


def call_rest(tools: Sequence[Tool], *, tags: Tags) -> str:
    """Returns Lark rules for these tools. The rule `call_rest` is the text between a call's marks.
    Raises UsageError for a tool whose schema cannot be enforced."""
    heads = [lark_text(tool.name.join(tags.function)) for tool in tools]
    bodies = " | ".join(f"{head} arguments_{at}" for at, head in enumerate(heads))
    rules = "\n".join(_rules_of(f"arguments_{at}", tool, tags) for at, tool in enumerate(tools))
    return f"call_rest: ({bodies}) {lark_text(tags.function_end)}\n{rules}\n"


def _rules_of(name: str, tool: Tool, tags: Tags) -> str:
    try:
        schema = json.dumps(tool.parameters)
        rules = _rules if len(schema) <= MOST_KEPT else _rules.__wrapped__
        return rules(name, schema, tool.strict, tags)
    except (UsageError, RecursionError) as error:
        why = error.rule if isinstance(error, UsageError) else "its schema is nested too deep"
        rule = f"calls of the tool {tool.name} cannot be held: {why}"
        raise UsageError(rule, param="tools", rule=rule) from error


# cached, since requests repeat their tools, and the rules of 20 tools with six arguments take 5 ms
@lru_cache(maxsize=256)
def _rules(name: str, parameters: str, strict: bool, tags: Tags) -> str:
    return _Arguments(
        name, Tool(name=name, parameters=json.loads(parameters), strict=strict), tags
    ).rules()


class _Arguments:
    """Makes the Lark rules of one tool's arguments. name: name of the first rule, and prefix of the
    other rules' names."""

    def __init__(self, name: str, tool: Tool, tags: Tags) -> None:
        self._name, self._tool, self._tags = name, tool, tags
        close = re.escape(tags.close[:-1]).replace("\\\n", "\n")
        last = _literal(f"(?s:.*){close}(?:\n(?s:.*))?")
        # regex part: the closing tag stands after a string, and nowhere inside it
        self._one_close = f"~{last}"
        self._rules: list[str] = []

    def rules(self) -> str:
        """Returns the tool's grammar rules as Lark text. Raises UsageError."""
        shapes = shapes_of(self._tool)
        if self._tool.strict:
            _check_strict(self._tool, shapes)
        made = [rule for shape in shapes if (rule := self._shape(shape)) is not None]
        if not made:
            raise _wrong("no arguments fit its schema")
        return "\n".join([f"{self._name}: {' | '.join(made)}", *self._rules])

    def _shape(self, shape: Shape) -> str | None:
        """Returns the expression of one alternative's arguments; None if no text can express a
        required argument."""
        parts = []
        for key, schema in shape.named.items():
            part = None
            if re.fullmatch(_KEY, key):
                part = self._argument(lark_text(key.join(self._tags.parameter)), schema)
            elif key in shape.required:
                raise _wrong(f"no tag can hold the name of its argument {key!r}")
            if part is None and key in shape.required:
                return None
            if part is not None:
                parts.append(part if key in shape.required else f"{part}?")
        if shape.others is not None:
            named = "".join(f" & ~{lark_text(key)}" for key in shape.named)
            before, behind = map(lark_text, self._tags.parameter)
            head = f"{before} (/{_KEY}/{named}) {behind}"
            part = self._argument(self._rule("head", f"({head})", terminal=True), shape.others)
            parts += [] if part is None else [f"{part}*"]
        return " ".join(parts) or '""'

    def _rule(self, kind: str, body: str, *, terminal: bool = False) -> str:
        """Adds a rule, and returns its name. terminal: make it a terminal of Lark."""
        name = f"{self._name}_{kind}_{len(self._rules)}"
        name = name.upper() if terminal else name
        lazy = "[lazy]" if kind == "text" else ""
        self._rules.append(f"{name}{lazy}: {body}")
        return name

    def _argument(self, head: str, schema: Schema) -> str | None:
        """Returns the rule of one argument; None if no text matches its schema. head: Lark of the
        opening tag."""
        alternatives = [Alternative.of(branch) for branch in branches(schema, self._tool.schema)]
        texts = [text for each in alternatives if (text := self._text(each)) is not None]
        kinds = frozenset().union(*(each.kinds for each in alternatives))
        close, others = lark_text(self._tags.close), kinds - {"string"}
        if (
            _ANY in texts
            # the rule of any text also covers numbers, booleans and null, which the parser reads as
            # such if the schema allows them
        ):
            texts, others = [_ANY], others & _BRACKETED
        if others & _BRACKETED:
            texts = [f"{text} & {_NO_BRACKET}" for text in texts]
        choices = []
        if texts == [_ANY]:
            choices.append(self._rule("text", f"{_ANY} {close}"))
        elif texts:
            choices.append(
                self._rule("text", f"((({') | ('.join(texts)})) & {self._one_close}) {close}")
            )
        if others:
            alone = schema if others == kinds else {"allOf": [schema, {"type": sorted(others)}]}
            whole = closed(alone, self._tool.schema)
            choices.append(
                f"{self._rule('json', f'%json {json_text(whole, strict=self._tool.strict, white=WHITESPACE)}')}"
                f" {close}"
            )
        return self._rule("argument", f"{head} ({' | '.join(choices)})") if choices else None

    def _text(self, alternative: Alternative) -> str | None:
        """Returns the Lark regex of an alternative's strings; None if it allows no string."""
        if "string" not in alternative.kinds:
            return None
        if alternative.values is not None:
            texts = [value for value in alternative.values if isinstance(value, str)]
            listed = [
                lark_text(text) for text in texts if self._is_listed(text, alternative.branch)
            ]
            # llguidance applies the patterns to the listed strings, since Python's search might
            # take long.
            patterns = [
                _literal(_found(found))
                for each in alternative.branch
                if (found := _lengths_and_pattern(each)[2])
            ]
            return " & ".join((f"({' | '.join(listed)})", *patterns)) if listed else None
        return (
            " & ".join(limit for plain in alternative.branch for limit in self._limits(plain))
            or _ANY
        )

    def _is_listed(self, text: str, branch: Branch) -> bool:
        """Returns True if a string of an enum doesn't contain the closing tag, and has an allowed
        length."""
        close = self._tags.close
        if f"{text}{close}".index(close) < len(text):
            return False
        lengths = [_lengths_and_pattern(plain)[:2] for plain in branch]
        return all(
            least <= len(text) and (most is None or len(text) <= most) for least, most in lengths
        )

    def _limits(self, plain: Plain) -> Iterator[str]:
        """Yields Lark regexes, all of which a string must match. Raises UsageError for an unknown
        format if the tool is strict."""
        least, most, pattern = _lengths_and_pattern(plain)
        if least or most is not None:
            yield f"/(?s:.{{{least},{'' if most is None else most}}})/"
        if pattern is not None:
            yield _literal(_found(pattern))
        if isinstance(said := plain.get("format"), str):
            if said in FORMATS:
                yield _literal(FORMATS[said])
            elif self._tool.strict:
                raise _wrong(f"the format {said} {_NOT_HERE}")


def _lengths_and_pattern(plain: Plain) -> tuple[int, int | None, str | None]:
    least, most, pattern = (plain.get(word) for word in ("minLength", "maxLength", "pattern"))
    return (
        max(0, least) if isinstance(least, int) else 0,
        most if isinstance(most, int) else None,
        pattern if isinstance(pattern, str) and _is_regex(_found(pattern)) else None,
    )


def _found(pattern: str) -> str:
    """Converts a schema's pattern, which may match anywhere in a string, to a regex that matches
    the whole string."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    at_end = re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    inner = pattern.removeprefix("^")
    return f"{begin}(?:{inner[:-1] if at_end else inner}){'' if at_end else '(?s:.*)'}"


def _literal(pattern: str) -> str:
    """Returns the regex as Lark spells it."""
    escaped = re.sub(
        r"\\.|/", lambda found: found[0] if found[0] != "/" else r"\/", pattern, flags=re.DOTALL
    )
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"


def _is_regex(pattern: str) -> bool:
    """Returns True if llguidance supports the regex."""
    try:
        check_grammar(StructuredOutputsParams(regex=pattern))
    except UsageError:
        return False
    return True


def _check_strict(tool: Tool, shapes: Sequence[Shape]) -> None:
    """Raises UsageError for schema keywords that these rules don't enforce, and for those that
    llguidance can't enforce, with its message."""
    if said := next(
        (word for word in _NOT_HELD for shape in shapes for plain in shape.plain if word in plain),
        None,
    ):
        raise _wrong(f"{said} {_NOT_HERE}")
    try:
        check_grammar(StructuredOutputsParams(json=json.dumps(tool.schema)))
    except UsageError as error:
        words = error.rule.removeprefix("structured_outputs cannot be served: ")
        raise _wrong(f"{words}: change its schema, or leave strict out") from error


def _wrong(why: str) -> UsageError:
    return UsageError(why, param="tools", rule=why)
