"""How a chat's answers are parsed and constrained. Decides which tools they may or must call, and
where reasoning ends. Knows body structs and text.parsers; no tokens, no answer's JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.request import SamplingParams, StructuredOutputsParams
from penstock.server.openai.forms import ChatForm
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.prompt_ids import PromptTools, TokenizedPrompt, template_of
from penstock.text.parsers.answer_grammar import around
from penstock.text.parsers.harmony import HarmonyReader
from penstock.text.parsers.parser_registry import (
    FORMATS,
    TEMPLATE,
    AnswerParsers,
    AnswerReader,
    CallFormat,
    MakeParser,
    format_of,
)
from penstock.text.parsers.pieces import Reader
from penstock.text.parsers.reasoning import (
    MARKS,
    OPEN,
    THINK,
    WRAPPED,
    Thinking,
    thinking_behind,
    token_of,
)
from penstock.text.parsers.tool import Tool

if TYPE_CHECKING:
    from penstock.text.parsers.response_template import ResponseTemplate

MakeReader = Callable[[], Reader]  # makes the reader (parser) of one answer


def check_auto(form: ChatForm, parsers: AnswerParsers) -> None:
    """Raises HttpError if the body lets the model decide whether to call a tool, and the server was
    started without --enable-auto-tool-choice."""
    if form.called_tools and not form.must_call and not parsers.enable_auto_tool_choice:
        message = (
            "tool_choice auto needs a server started with --enable-auto-tool-choice and"
            " --tool-call-parser: say required, a tool's name, or none"
        )
        raise HttpError(message, param="tool_choice")


class AnswerReading:
    """Parsing and constraints of one chat's answers. sampling: sampling parameters without the
    constraints of tools and reasoning. prompt: the tokenized chat, whose end shows how the answer
    begins."""

    def __init__(
        self, form: ChatForm, sampling: SamplingParams, prompt: TokenizedPrompt, tools: PromptTools
    ) -> None:
        assert tools.tokenizer is not None, "chats have text"
        self._form, self._tokenizer, self._prompt = form, tools.tokenizer, prompt
        self._sampling, self._asked = sampling, sampling.structured_outputs
        self._called = form.called_tools
        self._parallel = form.parallel_tool_calls and not (
            form.must_call and form.tool_choice != "required"
        )
        source, named = template_of(form, tools.tokenizer), tools.parsers.tool_call_parser
        self._template = tools.tokenizer.response_template if named == TEMPLATE else None
        known = named if named in FORMATS else format_of(source)
        self._format: CallFormat | None = FORMATS[known] if self._called else None
        self._thinking: Thinking | None = None
        self._wrapped: tuple[str, str] | None = None  # marks that may enclose the answer's content
        self._marks_of_thought = THINK
        self._harmony = tools.parsers.harmony
        parser = None if self._harmony else tools.parsers.reasoning_parser
        if parser is None and self._template is not None and OPEN in source:
            parser = "qwen3"
        if parser is not None:
            inside = form.continue_final_message
            self._thinking = thinking_behind(prompt.ending, parser, inside_answer=inside)
            self._wrapped, self._marks_of_thought = WRAPPED.get(parser), MARKS.get(parser, THINK)

    @property
    def reader(self) -> MakeReader | None:
        """Function that makes the reader of one answer; None if the whole text is content."""
        if self._harmony:
            names = frozenset(tool.name for tool in self._called)
            return partial(HarmonyReader, self._prompt.ending, names=names, parallel=self._parallel)
        if (template := self._by_template) is not None:
            from penstock.text.parsers.response_template import TemplateReader

            return partial(
                TemplateReader, template, self._prompt.ending, self._called, parallel=self._parallel
            )
        if self._format is None and self._thinking is None:
            return None
        thinking = self._thinking or "closed"
        calls = self._format
        parser = (
            None
            if calls is None
            else (calls.held_parser if self._are_held else None) or calls.parser
        )
        return partial(
            _make_reader,
            parser,
            self._called,
            thinking,
            self._parallel,
            self._wrapped,
            self._marks_of_thought,
        )

    @property
    def _by_template(self) -> ResponseTemplate | None:
        """The model's response template, if it parses the answer. None if a grammar constrains
        calls, which are then written in another format."""
        in_format = self._form.must_call or (self._called and self._asked is not None)
        return None if in_format else self._template

    def held(self) -> SamplingParams:
        """Returns the sampling parameters with the grammar of the answer, and with special tokens
        in the text if readers need them. Raises HttpError."""
        sampling, form, whole = self._sampling, self._asked, self._around()
        if whole is not None:
            # an answer that must call a tool has no content to constrain
            if form is None or self._form.must_call:
                made = StructuredOutputsParams(around=whole)
            else:
                made = replace(form, around=whole)
            sampling = replace(sampling, structured_outputs=made)
        if (
            self._harmony
            or self._by_template is not None
            or not self._tokenizer.special_texts.isdisjoint(self._marks())
        ):
            sampling = replace(sampling, skip_special_tokens=False)
        return sampling

    def _around(self) -> str | None:
        """Returns the grammar of the whole answer, with reasoning and calls. None if only the
        answer format, or nothing, constrains it. Raises HttpError."""
        must, thinking, form = self._form.must_call, self._thinking or "closed", self._asked
        strict = self._strict
        if self._harmony and (must or strict or form is not None):
            message = (
                "answers in gpt-oss's channels are read, not held: leave out response_format,"
                " strict, and a tool_choice beside auto and none"
            )
            raise HttpError(
                message, param="tool_choice" if must else "tools", code="unsupported_parameter"
            )
        if strict and self._by_template is not None:
            message = (
                "strict tools are held here with tool_choice required or a tool's name: a"
                " response_template doesn't say how calls are written; leave strict out"
            )
            raise HttpError(message, param="tools", code="unsupported_parameter")
        behind_thought = form is not None and thinking != "closed"
        if not (self._are_held or behind_thought):
            return None
        return around(
            thinking,
            form=form is not None,
            calls=self._format,
            tools=self._called,
            parallel=self._parallel,
            must_call=must,
            special=self._tokenizer.special_texts,
            marks=self._marks_of_thought,
        )

    @property
    def _strict(self) -> bool:
        return any(tool.strict for tool in self._called)

    @property
    def _are_held(self) -> bool:
        """True if a grammar constrains every call of the answer."""
        return self._form.must_call or bool(
            self._called and (self._strict or self._asked is not None)
        )

    def _marks(self) -> set[str]:
        marks = () if self._thinking is None else self._marks_of_thought
        thoughts = set(map(token_of, marks))
        return thoughts if self._format is None else thoughts | set(self._format.marks or ())


def _make_reader(
    parser: MakeParser | None,
    tools: list[Tool],
    thinking: Thinking,
    parallel: bool,
    wrapped: tuple[str, str] | None,
    marks: tuple[str, str],
) -> AnswerReader:
    calls = None if parser is None else parser(tools)
    return AnswerReader(calls, thinking, parallel=parallel, wrapped=wrapped, marks=marks)
