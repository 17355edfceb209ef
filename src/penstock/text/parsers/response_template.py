"""response_template: parses answers by a model's response_template. The template is in the model's
tokenizer_config.json. It defines regions of text that open and close at marks; each region is a
field of the message:

    fields            name -> region; the region without an opening mark holds the answer's start
                      and all text between other regions
    open, close       a region's marks: a text or a list of texts; open_pattern, close_pattern
                      are regexes
    content           format of a region: text, json, xml-inline, kv-lines; `transform` converts it
    start_anchor      text in the prompt after which the answer begins

A template comes with a model and may come from anyone, so its regexes have a time limit. It
describes how to read a call, not how to write one, so no grammar is made from it. Knows the
template alone. Source: transformers' `utils/chat_parsing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from penstock.errors import TokenizerError
from penstock.text.parsers.argument_text import Arguments
from penstock.text.parsers.json_mending import json_text_of, mended
from penstock.text.parsers.pieces import AnswerPiece, ContentBuffer, portions
from penstock.text.parsers.region_content import CONTENTS, parse_content, transformed
from penstock.text.parsers.tool import Tool

LOOKED_AT = 256  # characters that each regex searches at once, after each mark
PATIENCE = 0.1  # seconds that one search of a template's regex may take
KINDS = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
}
CALLS = "tool_calls"
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open",
    "open_pattern",
    "close",
    "close_pattern",
    "content",
    "content_args",
    "repeats",
    "join",
    "optional",
    "transform",
    "transform_each",
}
Pattern = Any  # regex.Pattern, of a library without type annotations


@dataclass(frozen=True, slots=True)
class Mark:
    """The opening or closing mark of a region, as a regex. grows: True if a match at the text's end
    may change when more text comes."""

    pattern: Pattern
    grows: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A region: a field of the message, its marks, and the format of its text."""

    name: str
    open: Mark | None
    close: Mark | None
    content: str
    content_args: Mapping[str, Any]
    transform: Any
    each: bool


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """A parsed template. regions: those with an opening mark. implicit: the region without one, or
    None."""

    regions: tuple[Region, ...]
    implicit: Region | None
    anchor: Mark


def read_template(spec: Any) -> ResponseTemplate:
    """Parses the template in tokenizer_config.json. Raises TokenizerError for an invalid or
    unsupported one."""
    if (
        not isinstance(spec, dict)
        or spec.get("version", 1) != 1
        or not isinstance(spec.get("fields"), dict)
    ):
        raise _wrong("must be an object of version 1 with fields")
    _check_keys(spec, _TEMPLATE_KEYS, "")
    regions = tuple(_read_region(name, field) for name, field in spec["fields"].items())
    implicit = [region for region in regions if region.open is None]
    anchor = _read_mark(spec, "start_anchor", "start_anchor_pattern")
    if len(implicit) > 1 or anchor is None:
        raise _wrong("must have a start_anchor, and at most one field without open")
    return ResponseTemplate(regions, implicit[0] if implicit else None, anchor)


def _read_region(name: str, field: Any) -> Region:
    if not isinstance(field, dict):
        raise _wrong(f"has a field {name} that is no object")
    _check_keys(field, _FIELD_KEYS, f" in {name}")
    content, args = field.get("content", "text"), field.get("content_args", {})
    if content not in CONTENTS or not isinstance(args, dict):
        raise _wrong(f"has a content in {name} that is none of {', '.join(CONTENTS)}")
    opening, closing = (_read_mark(field, side, f"{side}_pattern") for side in ("open", "close"))
    each = field.get("transform_each") is True
    return Region(name, opening, closing, content, args, field.get("transform"), each)


def _read_mark(field: Mapping[str, Any], literal: str, pattern: str) -> Mark | None:
    if (said := field.get(literal)) is not None:
        texts = [said] if isinstance(said, str) else said
        if (
            not isinstance(texts, list)
            or not texts
            or not all(isinstance(text, str) and text for text in texts)
        ):
            raise _wrong(f"has a {literal} that is no text")
        longest = sorted(set(texts), key=len, reverse=True)
        grows = any(one != other and one.startswith(other) for one in longest for other in longest)
        return Mark(regex.compile("|".join(map(regex.escape, longest))), grows)
    if (said := field.get(pattern)) is None:
        return None
    try:
        return Mark(regex.compile(said, regex.DOTALL), grows=True)
    except (regex.error, TypeError) as error:
        raise _wrong(f"has a {pattern} that is no regex ({error})") from error


def _check_keys(given: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(given) - known):
        raise _wrong(f"has a key {unknown[0]!r}{where} that is not known")


def _wrong(what: str) -> TokenizerError:
    return TokenizerError(
        f"the model's response_template {what}: leave --tool-call-parser response_template out"
    )


class Found(NamedTuple):
    """A mark found in a text, and the region that it opens or closes."""

    opens: bool
    region: Region
    match: Any


class TemplateReader:
    """Splits one answer's text into pieces, as it comes. prompt: the prompt's end; its part after
    start_anchor is the beginning of the answer. tools: tools that may be called; if there are none,
    calls are content. parallel: False: report only the first call."""

    def __init__(
        self, template: ResponseTemplate, prompt: str, tools: Sequence[Tool], *, parallel: bool
    ) -> None:
        self._template, self._parallel = template, parallel
        self._tools = {tool.name: tool for tool in tools}
        self._text = ""  # text that is not processed yet
        self._region = template.implicit
        self._opening = ""  # text of the open region's opening mark
        self._captures: dict[str, str] = {}
        # text of the region with calls, which is parsed once it is complete
        self._body: list[str] = []
        self._space = ContentBuffer()  # holds back white space at a region's ends, which is dropped
        self._spoken = False
        self._past = 0  # number of characters processed
        self._idle = 0  # number of consecutive marks without text between them
        self.called = self.thought_length = 0
        begun = [
            match.end() for match in template.anchor.pattern.finditer(prompt, timeout=PATIENCE)
        ]
        if begun:
            self._text = prompt[begun[-1] :]
            self._process([], ended=False)
            self._space.drop_space()
            self._body, self._past = [], -len(self._text)

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces of this text, in order. Raises TokenizerError if a regex takes too
        long."""
        found: list[AnswerPiece] = []
        for part in portions(text, LOOKED_AT):
            self._text += part
            self._process(found, ended=False)
        return found

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, so that a call
        without an end mark counts as a call. False if a limit cut it; such a call is then content.
        """
        found = self._process([], ended=True)
        if self._region is not None and self._region.name == CALLS:
            if stopped:
                self._close("", found)
            else:
                found.append(AnswerPiece("content", self._opening + "".join(self._body)))
        return found

    def _process(self, found: list[AnswerPiece], *, ended: bool) -> list[AnswerPiece]:
        try:
            while self._turn(found, ended):
                pass
        except TimeoutError as error:
            raise TokenizerError(
                "the model's response_template takes too long on this answer"
            ) from error
        return found

    def _turn(self, found: list[AnswerPiece], ended: bool) -> bool:
        """Reads to the first mark, or to text that may become one. Returns False if more text is
        needed."""
        mark, held = self._next(ended)
        if mark is None:
            self._take(held, found)
            return False
        match, spoken = mark.match, self._spoken
        self._idle = 0 if match.end() else self._idle + 1
        if self._idle > 2 * len(self._template.regions):
            raise TokenizerError(
                "the model's response_template has marks that hold no text, and comes to no end"
            )
        self._take(match.start(), found)
        self._close("" if mark.opens else match[0], found)
        self._past += match.end() - match.start()
        self._text = self._text[match.end() - match.start() :]
        if self._region is not None and KINDS.get(self._region.name) == "reasoning":
            self.thought_length = max(self._past, 0)
        named = {name: text for name, text in match.groupdict().items() if text is not None}
        self._region, self._captures = (
            (mark.region, named) if mark.opens else (self._template.implicit, {})
        )
        self._opening, self._spoken, self._body = match[0], False, []
        return (
            match.end() > match.start()
            or spoken
            or mark.opens
            or mark.region is not self._template.implicit
        )

    def _next(self, ended: bool) -> tuple[Found | None, int]:
        """Returns the first mark in the text if it is certain, else None, and the position of text
        that may become a mark. ended: True if no more text comes. Raises TimeoutError."""
        first, held = None, len(self._text)
        for opens, region, mark in self._watched():
            match = mark.pattern.search(self._text, partial=not ended, timeout=PATIENCE)
            if match is None:
                continue
            at_edge = match.end() == len(self._text)
            if not ended and (
                match.partial or (at_edge and (mark.grows or match.start() == match.end()))
            ):
                held = min(held, match.start())
                continue
            key = (match.start(), match.start() - match.end(), not opens, region.name)
            if first is None or key < first[0]:
                first = key, Found(opens, region, match)
        if first is None or (not ended and first[1].match.start() >= held):
            return None, held
        return first[1], held

    def _watched(self) -> list[tuple[bool, Region, Mark]]:
        region = self._region
        closing = (
            [(False, region, region.close)]
            if region is not None and region.close is not None
            else []
        )
        if region is not self._template.implicit:
            return closing
        return [
            (True, each, each.open) for each in self._template.regions if each.open is not None
        ] + closing

    def _take(self, end: int, found: list[AnswerPiece]) -> None:
        """Adds the text up to `end` to the open region; drops it if none is open."""
        text, self._text = self._text[:end], self._text[end:]
        self._past += end
        if self._region is None or not text:
            return
        if self._region.name == CALLS:
            self._body.append(text)
        elif (kind := KINDS.get(self._region.name)) is not None:
            text = (
                text
                if self._spoken or self._region.content_args.get("strip") is False
                else text.lstrip()
            )
            pieces = self._space.put(text)
            self._spoken = self._spoken or bool(pieces)
            found += [
                AnswerPiece("reasoning" if kind == "reasoning" else "content", piece.text)
                for piece in pieces
            ]

    def _close(self, mark: str, found: list[AnswerPiece]) -> None:
        """Ends the open region. mark: text of the mark that ended it."""
        self._space.drop_space()
        if self._region is None or self._region.name != CALLS:
            return
        body, region, captures = "".join(self._body), self._region, self._captures
        try:
            value = (
                parse_content(body, region.content, region.content_args, PATIENCE)
                if self._tools
                else None
            )
            calls = [
                (name, self._typed(name, arguments))
                for name, arguments in _calls_of(value, region, captures)
            ]
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # the region's text is no call of a known tool
            found.append(AnswerPiece("content", self._opening + body + mark))
            return
        for name, arguments in calls:
            if self._parallel or not self.called:
                found.append(AnswerPiece("name", name, self.called))
                found.append(AnswerPiece("arguments", arguments, self.called))
                self.called += 1

    def _typed(self, name: str, said: Any) -> str:
        """Returns the arguments of the tool `name` as JSON. Strings are converted to the types in
        the tool's schema. Raises KeyError for an unknown tool, ValueError if the arguments are no
        object."""
        arguments = Arguments(self._tools[name])
        if isinstance(said, dict):
            members = (
                f"{json_text_of(key)}:"
                f" {arguments.read(key, each) if isinstance(each, str) else json_text_of(each)}"
                for key, each in said.items()
            )
            return "{" + ", ".join(members) + "}"
        made = mended(said) if isinstance(said, str) else "{}" if said is None else None
        if made is None or not made.startswith("{"):
            raise ValueError("arguments are an object")
        return made


def _calls_of(value: Any, region: Region, captures: dict[str, str]) -> list[tuple[str, Any]]:
    """Returns the names and arguments of the calls in a region. Raises ValueError, KeyError,
    TypeError or AttributeError if there are none."""
    if region.each:
        told = [transformed(region.transform, {**captures, **each}) for each in value]
    else:
        told = (
            transformed(region.transform, {**captures, "content": value})
            if region.transform is not None
            else value
        )
    calls = []
    for call in told if isinstance(told, list) else [told]:
        function = call.get("function", call)
        name, arguments = (
            function["name"],
            function.get("arguments", function.get("parameters", {})),
        )
        if not isinstance(name, str) or not name:
            raise ValueError("a call has a name")
        calls.append((name, arguments))
    return calls
