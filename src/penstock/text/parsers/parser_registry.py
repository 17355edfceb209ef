"""Tool and reasoning parsers by vLLM's names, and AnswerReader, which splits answers with them into
reasoning, calls and content. Knows the parsers; no HTTP requests, no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from penstock.errors import UsageError
from penstock.text.parsers import (
    gemma4_calls,
    hermes,
    lfm2_calls,
    llama3_json,
    qwen3_coder,
    reasoning,
    tag_grammar,
)
from penstock.text.parsers.pieces import AnswerPiece, CallParser, portions
from penstock.text.parsers.tagged import TaggedParser
from penstock.text.parsers.tags import GLM45, MINIMAX_M2, QWEN3_CODER, Tags
from penstock.text.parsers.tool import Tool
from penstock.text.parsers.whole_calls import ReadCalls, WholeCallsParser

MakeParser = Callable[[Sequence[Tool]], CallParser]


class CallFormat(NamedTuple):
    """Format of a model family's tool calls. parser: makes its parser. call_rest: makes the Lark
    rules of a call between its marks. marks: texts around calls, if any. held_parser: makes the
    parser of answers that this Lark enforced; None: the same."""

    parser: MakeParser
    call_rest: Callable[[Sequence[Tool]], str]
    marks: tuple[str, str] | None
    held_parser: MakeParser | None = None


TEMPLATE = "response_template"  # name of the parser that the model's own files define
# vLLM's names of gpt-oss's parsers: for tool calls, and for reasoning
HARMONY, HARMONY_THOUGHT = (
    "openai",
    "openai_gptoss",
)
BOTH = (HARMONY, HARMONY_THOUGHT)


def _in_tags(tags: Tags, parser: Callable[..., CallParser]) -> CallFormat:
    grammar = partial(tag_grammar.call_rest, tags=tags)
    return CallFormat(parser, grammar, (tags.begin, tags.end), partial(parser, held=True))


def _whole(
    read: ReadCalls, marks: tuple[str, str], call_rest: Callable[[Sequence[Tool]], str]
) -> CallFormat:
    return CallFormat(partial(WholeCallsParser, marks=marks, read=read), call_rest, marks)


_HERMES = CallFormat(hermes.HermesParser, hermes.call_rest, (hermes.BEGIN, hermes.END))
_GLM45 = _in_tags(GLM45, partial(TaggedParser, tags=GLM45))
FORMATS: dict[str, CallFormat] = {
    "hermes": _HERMES,
    "ernie45": _HERMES,
    "gemma4": _whole(
        gemma4_calls.read_calls, (gemma4_calls.BEGIN, gemma4_calls.END), gemma4_calls.call_rest
    ),
    "glm45": _GLM45,
    "glm47": _GLM45,
    "lfm2": _whole(lfm2_calls.read_calls, (lfm2_calls.BEGIN, lfm2_calls.END), lfm2_calls.call_rest),
    "llama3_json": CallFormat(llama3_json.Llama3JsonParser, llama3_json.call_rest, None),
    "minimax_m2": _in_tags(MINIMAX_M2, partial(TaggedParser, tags=MINIMAX_M2)),
    "qwen3_coder": _in_tags(QWEN3_CODER, qwen3_coder.Qwen3CoderParser),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParsers:
    """Names of the parsers for a server's answers, from FORMATS and reasoning.FORMATS.
    enable_auto_tool_choice: True if requests may let the model decide whether to call a tool."""

    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def harmony(self) -> bool:
        """True if answers are in gpt-oss's format (harmony.py)."""
        return self.tool_call_parser == HARMONY or self.reasoning_parser == HARMONY_THOUGHT

    def check(self) -> None:
        """Raises UsageError for unknown or contradictory parsers."""
        known: dict[str, Sequence[str]] = {
            "tool_call_parser": [*FORMATS, TEMPLATE, HARMONY],
            "reasoning_parser": [*reasoning.FORMATS, HARMONY_THOUGHT],
        }
        for name, formats in known.items():
            if (given := getattr(self, name)) is not None and given not in formats:
                raise UsageError(
                    f"{name} must be one of {', '.join(formats)}, not {given!r}", param=name
                )
        if self.tool_call_parser == TEMPLATE and self.reasoning_parser is not None:
            message = f"{TEMPLATE} reads reasoning too: leave reasoning_parser out"
            raise UsageError(message, param="reasoning_parser")
        if (
            self.harmony
            and (self.tool_call_parser or HARMONY, self.reasoning_parser or HARMONY_THOUGHT) != BOTH
        ):
            message = f"{HARMONY} and {HARMONY_THOUGHT} read one format: name no other beside them"
            raise UsageError(message, param="reasoning_parser")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            message = (
                "enable_auto_tool_choice needs a tool_call_parser: one of"
                f" {', '.join(known['tool_call_parser'])}"
            )
            raise UsageError(message, param="enable_auto_tool_choice")


NO_PARSERS = AnswerParsers()
# text that occurs only in chat templates of one format -> name of the format
_WRITTEN_SO = {
    "<arg_key>": "glm45",
    MINIMAX_M2.begin: "minimax_m2",
    lfm2_calls.BEGIN: "lfm2",
    "<function=": "qwen3_coder",
    gemma4_calls.BEGIN: "gemma4",
}


def format_of(template: str) -> str:
    """Returns the name of the format in which a chat template writes earlier calls; hermes if it
    writes none. Used if the server's user names no parser."""
    for mark, name in _WRITTEN_SO.items():
        if mark in template:
            return name
    if "<tool_call>" not in template and (
        "<|python_tag|>" in template or '"parameters": ' in template
    ):
        return "llama3_json"
    return "hermes"


class AnswerReader:
    """Splits one answer's text into pieces, as it comes. parallel: False: report only the first
    call, and drop the others. wrapped: marks that may stand around the answer. marks: marks around
    its reasoning.
    """

    def __init__(
        self,
        calls: CallParser | None = None,
        thinking: reasoning.Thinking = "closed",
        *,
        parallel: bool = True,
        wrapped: tuple[str, str] | None = None,
        marks: tuple[str, str] = reasoning.THINK,
    ) -> None:
        self._calls, self._reasoning = calls, reasoning.ReasoningParser(thinking, marks)
        self._parallel, self._wrapping = (
            parallel,
            None if wrapped is None else reasoning.Unwrapped(*wrapped),
        )
        self.called = 0  # number of tool calls that have begun

    @property
    def thought_length(self) -> int:
        """Number of characters before the answer itself, that is, reasoning and its marks."""
        return self._reasoning.length

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces of this text, in order."""
        return [
            piece for part in portions(text) for piece in self._read(*self._reasoning.feed(part))
        ]

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, False if a
        limit cut it."""
        found = self._read(*self._reasoning.end())
        if self._wrapping is not None:
            found += self._told(self._wrapping.end())
        return found + self._kept(
            self._calls.end(stopped=stopped) if self._calls is not None else []
        )

    def _read(self, thought: str, answer: str) -> list[AnswerPiece]:
        found = [AnswerPiece("reasoning", thought)] if thought else []
        return found + self._told(answer if self._wrapping is None else self._wrapping.feed(answer))

    def _told(self, answer: str) -> list[AnswerPiece]:
        if not answer:
            return []
        return (
            [AnswerPiece("content", answer)]
            if self._calls is None
            else self._kept(self._calls.feed(answer))
        )

    def _kept(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        kept = [piece for piece in pieces if self._parallel or piece.call < 1]
        self.called += sum(piece.kind == "name" for piece in kept)
        return kept
