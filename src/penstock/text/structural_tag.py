"""structural_tag: text in which tags have structured content. Reads vLLM's older format and
xgrammar's newer one:

    {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}
        with or without "type": "structural_tag"
    {"format": {"type": "triggered_tags", "triggers": [...], "tags": [{"begin", "content", "end"},
        ...], "at_least_one", "stop_after_first"}}
        content: json_schema, regex or any_text

A trigger is the beginning of a tag: after it, the text must continue as one of the tags that begin
with it. Writes a Lark grammar, and the grammars of the tags' contents that it refers to. Knows no
tokenizer and no library.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from penstock.errors import UsageError

MOST_TAGS = 1_024
# most triggers: the grammar's compile time grows with their square, here to 0.1 s
MOST_TRIGGERS = 128
CONTENT = "content_"  # name of a content's grammar in Lark: @content_i for tag i
_REST = "TEXT: /(?s:.*)/\n"  # any text, but no special tokens


class _JsonContent(Struct, tag="json_schema", forbid_unknown_fields=True):
    json_schema: dict[str, Any] | bool

    @property
    def form(self) -> dict[str, Any]:
        return {"json": msgspec.json.encode(self.json_schema).decode()}


class _RegexContent(Struct, tag="regex", forbid_unknown_fields=True):
    pattern: str

    @property
    def form(self) -> dict[str, Any]:
        return {"regex": self.pattern}


class _AnyText(Struct, tag="any_text", forbid_unknown_fields=True):
    form: ClassVar[None] = None


Content = _JsonContent | _RegexContent | _AnyText


class Tag(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tag: its beginning, its end, and the format of the content between."""

    begin: str
    content: Content
    end: str
    type: Literal["tag"] = "tag"


class TriggeredTags(Struct, forbid_unknown_fields=True, kw_only=True):
    """Tags that may occur in a text, any number of times unless restricted."""

    type: Literal["triggered_tags"]
    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class _Structure(Struct, forbid_unknown_fields=True, kw_only=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["structural_tag"] = "structural_tag"
    structures: list[_Structure] | None = None
    triggers: list[str] | None = None
    format: TriggeredTags | None = None


def read_structural_tag(text: str) -> TriggeredTags:
    """Parses a request's structural tag. The older format is converted to the newer one. Raises
    UsageError."""
    try:
        asked = msgspec.json.decode(text, type=_Asked)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _wrong(str(error)) from error
    found = asked.format
    if found is None and asked.structures is not None and asked.triggers is not None:
        tags = [
            Tag(begin=each.begin, content=_JsonContent(each.schema), end=each.end)
            for each in asked.structures
        ]
        found = TriggeredTags(type="triggered_tags", triggers=asked.triggers, tags=tags)
    elif found is None or asked.structures is not None or asked.triggers is not None:
        raise _wrong("it takes structures and triggers, or a format of triggered_tags")
    if not found.tags or not found.triggers or not all(found.triggers):
        raise _wrong("it needs at least one tag, and one trigger that is not empty")
    if len(found.tags) > MOST_TAGS or len(set(found.triggers)) > MOST_TRIGGERS:
        raise _wrong(
            f"it takes {MOST_TAGS} tags and {MOST_TRIGGERS} triggers at most: let tags begin alike"
        )
    for at, tag in enumerate(found.tags):
        if _trigger_of(tag, found.triggers) is None:
            raise _wrong(f"tag {at + 1} begins with none of the triggers")
        if isinstance(tag.content, _AnyText) and not tag.end:
            raise _wrong(f"tag {at + 1} holds any text and has no end")
    return found


def tags_lark(asked: TriggeredTags, special: Container[str]) -> str:
    """Returns the Lark grammar of a whole answer. It refers to the contents of tags as @content_0
    and so on, except any_text. special: texts of the vocabulary's special tokens; a trigger or a
    tag's end that is one is named as a token in Lark."""
    used = [
        trigger
        for trigger in asked.triggers
        if any(_trigger_of(t, asked.triggers) == trigger for t in asked.tags)
    ]
    heads = {trigger: f"head_{at}" for at, trigger in enumerate(dict.fromkeys(used))}
    rules = [_head(head, trigger, special) for trigger, head in heads.items()]
    for at, tag in enumerate(asked.tags):
        trigger = _trigger_of(tag, asked.triggers)
        assert trigger is not None, "it was looked at"
        parts = [heads[trigger], _quoted(tag.begin[len(trigger) :])]
        if isinstance(tag.content, _AnyText):
            parts.append(f"body_{at}")
            rules.append(_head(f"body_{at}", tag.end, special))
        else:
            parts += [f"@{CONTENT}{at}", _mark(tag.end, special)]
        rules.append(f"tag_{at}: {' '.join(filter(None, parts))}\n")
    one = "(" + " | ".join(f"tag_{at}" for at in range(len(asked.tags))) + ")"
    if asked.stop_after_first:
        answer = one if asked.at_least_one else f"({one} | TEXT)"
    else:
        answer = f"{one}{'+' if asked.at_least_one else '*'} TEXT"
    return f"start: {answer}\n{_REST}{''.join(rules)}"


def _trigger_of(tag: Tag, triggers: list[str]) -> str | None:
    """Returns the longest trigger that the tag begins with, or None."""
    return max((each for each in triggers if tag.begin.startswith(each)), key=len, default=None)


def _head(name: str, mark: str, special: Container[str]) -> str:
    """Returns the Lark rule `name` for text up to and including the first such mark."""
    lazy = "" if _named(mark, special) else "[lazy]"
    return f"{name}{lazy}: TEXT {_mark(mark, special)}\n"


def _mark(mark: str, special: Container[str]) -> str:
    return mark if _named(mark, special) else _quoted(mark)


def _named(mark: str, special: Container[str]) -> bool:
    """Returns True if the mark is a special token that Lark can name."""
    return mark in special and mark.startswith("<") and mark.endswith(">")


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""


def _wrong(why: str) -> UsageError:
    rule = f"structured_outputs cannot be served: structural_tag: {why}"
    return UsageError(rule, param="structured_outputs", rule=rule)
