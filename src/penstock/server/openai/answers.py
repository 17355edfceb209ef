"""Makes OpenAI's answers from deltas: one JSON body at the end, or server-sent events. Structs of
answer_objects.py are encoded, what all events or choices share only once. Knows a call, deltas and
JSON; no engine, no HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from penstock.errors import PenstockError
from penstock.request import Delta, PositionLogprobs
from penstock.server.openai.answer_objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionDetails,
    MessageDelta,
    PromptDetails,
    TokenCounts,
)
from penstock.server.openai.http_errors import body_of
from penstock.server.openai.logprobs_json import (
    Listed,
    TokenSpellings,
    chat_logprobs,
    completion_logprobs,
    completion_object,
    prompt_logprobs,
)

if TYPE_CHECKING:
    from penstock.server.openai.prompt_ids import TokenizedPrompt
    from penstock.server.openai.translate import Call

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class BaseAnswer:
    """Base class of all answers. The index of a choice is: prompt index * n + sample index.
    positions: the prompt_logprobs of the choice's prompt, or None.

    whole, chunk: structs of a body and of an event. choice_of, part_of: structs of a choice in
    them, made of its index and content. entries: name of their list.
    """

    prefix = ""
    whole: Any = None
    chunk: Any = None
    choice_of: Any = None
    part_of: Any = None
    entries = "choices"
    only_text = True  # True if the content of an event is text alone

    def __init__(self, call: Call, model: str, spellings: TokenSpellings) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created, self.model = int(time.time()), model
        self._call = call
        self._spell = spellings.of(as_ids=call.tokens_as_ids)
        self._tokenizer = spellings.tokenizer
        # True if an event between the first and the last only has content
        self._bare = call.logprobs is None and not call.return_token_ids
        self._begun: set[int] = set()  # choices of which an event was made
        # choice -> number of its tokens so far, if every event reports it
        self._made: dict[int, int] = {}
        # prompt index -> fields about the prompt in each of its choices
        self._about_prompts: dict[int, dict[str, Raw]] = {}

    # -- what subclasses define

    tells_prompt = True  # True if return_token_ids returns the prompt's ids too

    def _head(self) -> dict[str, Any]:
        """Returns the first fields of the body and of each event."""
        return {"id": self.id, "created": self.created, "model": self.model}

    def _opening(self, choice: int, prompt: TokenizedPrompt) -> str:
        return ""

    def _content(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> Any:
        """Returns the content of a choice that is sent whole."""
        raise NotImplementedError

    def _part(self, text: str, *, first: bool) -> Any:
        """Returns the content of an event."""
        raise NotImplementedError

    def _logprobs(
        self, choice: int, prompt: TokenizedPrompt, delta: Delta, positions: Any, *, first: bool
    ) -> bytes:
        raise NotImplementedError

    # -- answers sent whole

    def choice(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        """Returns the JSON of a finished choice from the sample's only delta."""
        at = choice // self._call.sampling.n
        prompt = self._call.prompts[at]
        content = self._content(choice, prompt, delta)
        made = self._ended(self.choice_of, choice, content, prompt, delta, positions, first=True)
        about = self._about_prompts.get(at)
        if about is None:
            about = self._about_prompts[at] = self._about_prompt(prompt, positions)
        for name, value in about.items():
            setattr(made, name, value)
        return _encode(made)

    def body(self, choices: list[bytes], usage: TokenCounts) -> list[bytes]:
        """Returns the body in pieces. choices: JSON of each choice, in order."""
        head, tail = self._around(self.whole, usage)
        pieces = [head]
        for choice in choices:
            pieces += (choice, b",")
        pieces[-1] = tail
        return pieces

    def _around(self, kind: Any, usage: TokenCounts | UnsetType | None) -> tuple[bytes, bytes]:
        """Returns the JSON before and behind the choices of a body or an event."""
        empty = _encode(kind(**self._head(), **{self.entries: []}, usage=usage))
        head, entries, tail = empty.partition(b'"%b":[]' % self.entries.encode())
        return head + entries[:-1], b"]" + tail

    def _ended(
        self,
        kind: Any,
        choice: int,
        content: Any,
        prompt: TokenizedPrompt,
        delta: Delta,
        positions: Any,
        *,
        first: bool,
    ) -> Any:
        """Returns a choice with all its fields, for a body or an event. kind: its struct."""
        call, logprobs = self._call, None
        if call.logprobs is not None:
            logprobs = Raw(self._logprobs(choice, prompt, delta, positions, first=first))
        finish, stop = self._finish(choice, delta), delta.stop_reason
        made = kind(choice, content, logprobs, finish_reason=finish, stop_reason=stop)
        if delta.weights_version is not None:
            made.weights_version = delta.weights_version
        if call.return_token_ids:
            made.token_ids = self._ids(delta)
        return made

    def _about_prompt(self, prompt: TokenizedPrompt, positions: Any) -> dict[str, Raw]:
        """Returns the fields about the prompt in each of its choices. They are encoded once for all
        n choices."""
        about = {}
        if self._call.return_token_ids:
            about["prompt_token_ids"] = Raw(_encode(prompt.ids))
        if self._call.prompt_logprobs is not None and positions is not None:
            about["prompt_logprobs"] = Raw(_encode(prompt_logprobs(positions, self._spell)))
        return about

    # -- answers sent as events

    def event(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        """Returns the event of one delta; b"" if it is empty, as when the text is held back."""
        call, first = self._call, choice not in self._begun
        plain = not first and self._bare and delta.finish_reason is None
        if plain and self.only_text and not call.continuous_usage:
            if not delta.text:
                return b""
            head, between, tail = self._around_text
            return b"".join((head, b"%d" % choice, between, _encode(delta.text), tail))
        usage = self._counted(choice, delta) if call.continuous_usage else None
        content = self._shown(choice, delta, first=first, needed=not plain)
        if content is None:
            return b""
        if plain:
            made = self.part_of(choice, content)
        else:
            self._begun.add(choice)
            prompt = call.prompts[choice // call.sampling.n]
            made = self._ended(self.part_of, choice, content, prompt, delta, positions, first=first)
            if first and call.return_token_ids and self.tells_prompt:
                made.prompt_token_ids = prompt.ids
        head, tail = self._frame
        if usage is not None:  # continuous_usage implies include_usage: the frame ends in a null
            tail = tail.replace(b'"usage":null', b'"usage":' + _encode(usage), 1)
        return b"".join((head, _encode(made), tail))

    def _framed(self, usage: TokenCounts | UnsetType | None) -> tuple[bytes, bytes]:
        head, tail = self._around(self.chunk, usage)
        return b"data: " + head, tail + b"\n\n"

    @cached_property
    def _frame(self) -> tuple[bytes, bytes]:
        """The bytes before and behind the choice of an event without counts."""
        return self._framed(None if self._call.include_usage else UNSET)

    @cached_property
    def _around_text(self) -> tuple[bytes, bytes, bytes]:
        """The bytes of an event of text alone: before its index, before its text, and behind it.
        With them such an event takes 0.4 us less than by its struct."""
        head, tail = self._frame
        begin, _, rest = _encode(self.part_of(0, self._part("", first=False))).partition(b"0")
        between, _, end = rest.partition(b'""')
        return head + begin, between, end + tail

    def _shown(self, choice: int, delta: Delta, *, first: bool, needed: bool) -> Any:
        """Returns the content of an event; None if it is empty and not needed."""
        if not needed:
            return self._part(delta.text, first=False) if delta.text else None
        prompt = self._call.prompts[choice // self._call.sampling.n]
        return self._part(
            self._first_text(choice, prompt, delta) if first else self._text(delta), first=first
        )

    def _counted(self, choice: int, delta: Delta) -> TokenCounts:
        """Returns the choice's token counts, including this delta, as in vLLM."""
        made = self._made[choice] = self._made.get(choice, 0) + len(self._ids(delta))
        asked = len(self._call.prompts[choice // self._call.sampling.n].ids)
        return TokenCounts(asked, made, asked + made)

    def last(self, usage: TokenCounts) -> bytes:
        """Returns the end of a stream, with the usage event if it was requested."""
        return (b"".join(self._framed(usage)) if self._call.include_usage else b"") + DONE

    def error_event(self, error: PenstockError) -> bytes:
        """Returns an error as the last event, since the HTTP status has been sent already."""
        return b"data: " + body_of(error) + b"\n\n"

    def usage(
        self, completion_tokens: int, cached_tokens: int, right: int, wrong: int
    ) -> TokenCounts:
        """Returns the token counts. A prompt counts once, whatever n is. right, wrong: drafts."""
        asked = self._call.prompt_tokens
        made = 0 if self._call.only_prompt else completion_tokens
        details = CompletionDetails(right, wrong) if right or wrong else UNSET
        return TokenCounts(asked, made, asked + made, PromptDetails(cached_tokens), details)

    def _first_text(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> str:
        return self._opening(choice, prompt) + self._text(delta)

    def _text(self, delta: Delta) -> str:
        return "" if self._call.only_prompt else delta.text

    def _ids(self, delta: Delta) -> list[int]:
        return [] if self._call.only_prompt else delta.token_ids

    def _finish(self, choice: int, delta: Delta) -> str | None:
        whole = delta.finish_reason not in (None, "abort")
        return "length" if self._call.only_prompt and whole else delta.finish_reason


class CompletionAnswer(BaseAnswer):
    """The answer of /v1/completions."""

    prefix = "cmpl"
    whole, chunk = Completion, CompletionChunk
    choice_of = part_of = CompletionChoice

    def __init__(self, call: Call, model: str, spellings: TokenSpellings) -> None:
        super().__init__(call, model, spellings)
        # choice -> number of characters of the tokens in logprobs so far, until the last delta
        self._offsets: dict[int, int] = {}
        self._prompt_texts: dict[int, str] = {}
        self._prompt_lists: dict[int, Listed] = {}

    def _opening(self, choice: int, prompt: TokenizedPrompt) -> str:
        if not self._call.echo:
            return ""
        if prompt.text is not None:
            return prompt.text
        at = choice // self._call.sampling.n
        if at not in self._prompt_texts and self._tokenizer is not None:
            self._prompt_texts[at] = self._tokenizer.decode(prompt.ids)
        return self._prompt_texts[at]

    def _content(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> str:
        return self._first_text(choice, prompt, delta)

    def _part(self, text: str, *, first: bool) -> str:
        return text

    def _logprobs(
        self, choice: int, prompt: TokenizedPrompt, delta: Delta, positions: Any, *, first: bool
    ) -> bytes:
        parts: list[Listed] = []
        end = self._offsets.get(choice, 0)
        if first and self._call.echo:
            # the request was aborted before the prompt was scored
            if positions is None and delta.finish_reason == "abort":
                positions = [None] * len(prompt.ids)
            parts.append(self._prompt_listed(choice // self._call.sampling.n, prompt, positions))
            end = parts[-1].end
        if not self._call.only_prompt:
            parts.append(
                completion_logprobs(delta.token_ids, delta.logprobs or [], self._spell, end)
            )
            end = parts[-1].end
        if self._call.stream:
            self._offsets[choice] = end
        return completion_object(parts)

    def _prompt_listed(self, at: int, prompt: TokenizedPrompt, positions: Any) -> Listed:
        found = self._prompt_lists.get(at)
        if found is None:
            # Offsets are counted from the text's end, since the prompt's text may lack a BOS or a
            # space that its first tokens spell.
            spelt = sum(len(self._spell.text(token)) for token in prompt.ids)
            begin = len(self._opening(at * self._call.sampling.n, prompt)) - spelt
            found = self._prompt_lists[at] = completion_logprobs(
                prompt.ids, positions or [], self._spell, begin
            )
        return found


class ChatAnswer(BaseAnswer):
    """The answer of /v1/chat/completions. The first event of a choice has the role."""

    prefix = "chatcmpl"
    whole, chunk = ChatCompletion, ChatCompletionChunk
    choice_of, part_of = ChatChoice, ChatChunkChoice

    def _content(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> ChatMessage:
        return ChatMessage(content=delta.text)

    def _part(self, text: str, *, first: bool) -> MessageDelta:
        return MessageDelta("assistant", text) if first else MessageDelta(content=text)

    def _logprobs(
        self, choice: int, prompt: TokenizedPrompt, delta: Delta, positions: Any, *, first: bool
    ) -> bytes:
        return chat_logprobs(
            delta.token_ids, delta.logprobs or [], self._spell, self._call.logprobs or 0
        )
