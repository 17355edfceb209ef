"""Encodes deltas as OpenAI's answers. Makes one JSON body at the end, or server-sent events, as
bytes that are joined from pieces encoded once. Knows a call, deltas and JSON; no engine, no HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import PenstockError
from penstock.request import Delta, PositionLogprobs
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
_GOING_ON = b',"logprobs":null,"finish_reason":null,"stop_reason":null'


class BaseAnswer:
    """Base class of all answers. The index of a choice is: prompt index * n + sample index.
    positions: the prompt_logprobs of the choice's prompt, or None.
    """

    prefix = ""
    kind = ""
    event_kind = ""
    entries = "choices"

    def __init__(self, call: Call, model: str, spellings: TokenSpellings) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created, self.model = int(time.time()), model
        self._call = call
        self._spell = spellings.of(as_ids=call.tokens_as_ids)
        self._tokenizer = spellings.tokenizer
        self._top, shown = self._named(self.kind), self._named(self.event_kind)
        self._head = b"data: " + _encode(shown)[:-1] + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if call.include_usage else b"}]}\n\n"
        self._usage_head = b"data: " + _encode(shown)[:-1] + b',"choices":[],"usage":'
        self._begun: set[int] = set()  # choices of which an event was made
        # choice -> number of its tokens so far, if every event reports it
        self._made: dict[int, int] = {}
        # prompt index -> JSON about the prompt at the end of each of its choices
        self._about_prompts: dict[int, bytes] = {}

    # -- what subclasses define

    tells_prompt = True  # True if return_token_ids returns the prompt's ids too

    def _named(self, kind: str) -> dict[str, Any]:
        """Returns the first fields of the body and of each event."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _opening(self, choice: int, prompt: TokenizedPrompt) -> str:
        return ""

    def _event_text(self, text: str, *, first: bool) -> bytes:
        raise NotImplementedError

    def _logprobs(
        self, choice: int, prompt: TokenizedPrompt, delta: Delta, positions: Any, *, first: bool
    ) -> bytes:
        raise NotImplementedError

    def _choice_text(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> bytes:
        raise NotImplementedError

    # -- answers sent whole

    def choice(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        """Returns the JSON of a finished choice from the sample's only delta."""
        at = choice // self._call.sampling.n
        prompt = self._call.prompts[at]
        pieces = [b'{"index":%d' % choice, self._choice_text(choice, prompt, delta)]
        pieces += self._ending(choice, prompt, delta, positions, first=True)
        about = self._about_prompts.get(at)
        if about is None:
            about = self._about_prompts[at] = self._about_prompt(prompt, positions)
        pieces.append(about)
        return b"".join(pieces)

    def body(self, choices: list[bytes], usage: dict[str, Any]) -> list[bytes]:
        """Returns the body in pieces. choices: JSON of each choice, in order."""
        pieces = [_encode(self._top)[:-1] + b',"%b":[' % self.entries.encode()]
        for choice in choices:
            pieces += (choice, b",")
        pieces[-1] = b'],"usage":' + _encode(usage) + b"}"
        return pieces

    def _ending(
        self, choice: int, prompt: TokenizedPrompt, delta: Delta, positions: Any, *, first: bool
    ) -> list[bytes]:
        """Returns a choice's JSON fields after the text, for a body or an event."""
        pieces = [b',"logprobs":', b"null"]
        if self._call.logprobs is not None:
            pieces[1] = self._logprobs(choice, prompt, delta, positions, first=first)
        pieces += (
            b',"finish_reason":',
            _encode(self._finish(choice, delta)),
            b',"stop_reason":',
            _encode(delta.stop_reason),
        )
        if delta.weights_version is not None:
            pieces += (b',"weights_version":', _encode(delta.weights_version))
        if self._call.return_token_ids:
            pieces += (b',"token_ids":', _encode(self._ids(delta)))
        return pieces

    def _about_prompt(self, prompt: TokenizedPrompt, positions: Any) -> bytes:
        """Returns the JSON fields about the prompt at the end of each of its choices. They are
        encoded once for all n choices."""
        about = (
            b',"prompt_token_ids":' + _encode(prompt.ids) if self._call.return_token_ids else b""
        )
        if self._call.prompt_logprobs is not None and positions is not None:
            about += b',"prompt_logprobs":' + _encode(prompt_logprobs(positions, self._spell))
        return about + b"}"

    # -- answers sent as events

    def event(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        """Returns the event of one delta; b"" if it is empty, as when the text is held back."""
        first = choice not in self._begun
        plain = (
            delta.finish_reason is None
            and self._call.logprobs is None
            and not self._call.return_token_ids
        )
        tail = self._counted(choice, delta) if self._call.continuous_usage else self._tail
        shown = self._shown(choice, delta, first=first, needed=first or not plain)
        if plain and not first:
            return b"".join((self._head, b"%d" % choice, shown, _GOING_ON, tail)) if shown else b""
        self._begun.add(choice)
        prompt = self._call.prompts[choice // self._call.sampling.n]
        pieces = [self._head, b"%d" % choice, shown]
        pieces += self._ending(choice, prompt, delta, positions, first=first)
        if self._call.return_token_ids and first and self.tells_prompt:
            pieces += (b',"prompt_token_ids":', _encode(prompt.ids))
        pieces.append(tail)
        return b"".join(pieces)

    def _shown(self, choice: int, delta: Delta, *, first: bool, needed: bool) -> bytes:
        """Returns the text part of an event; b"" if it is empty and not needed."""
        if not needed:
            return self._event_text(delta.text, first=False) if delta.text else b""
        prompt = self._call.prompts[choice // self._call.sampling.n]
        return self._event_text(
            self._first_text(choice, prompt, delta) if first else self._text(delta), first=first
        )

    def _counted(self, choice: int, delta: Delta) -> bytes:
        """Returns an event's end with the choice's token counts, including this delta,
        as in vLLM."""
        made = self._made[choice] = self._made.get(choice, 0) + len(self._ids(delta))
        prompt = self._call.prompts[choice // self._call.sampling.n]
        return b'}],"usage":' + _encode(_counts(len(prompt.ids), made)) + b"}\n\n"

    def last(self, usage: dict[str, Any]) -> bytes:
        """Returns the end of a stream, with the usage event if it was requested."""
        return (
            self._usage_head + _encode(usage) + b"}\n\n" if self._call.include_usage else b""
        ) + DONE

    def error_event(self, error: PenstockError) -> bytes:
        """Returns an error as the last event, since the HTTP status has been sent already."""
        return b"data: " + body_of(error) + b"\n\n"

    def usage(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """Returns the `usage` object with the token counts. A prompt counts once, whatever n is."""
        made = 0 if self._call.only_prompt else completion_tokens
        return _counts(self._call.prompt_tokens, made) | {
            "prompt_tokens_details": {"cached_tokens": cached_tokens}
        }

    def _first_text(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> str:
        return self._opening(choice, prompt) + self._text(delta)

    def _text(self, delta: Delta) -> str:
        return "" if self._call.only_prompt else delta.text

    def _ids(self, delta: Delta) -> list[int]:
        return [] if self._call.only_prompt else delta.token_ids

    def _finish(self, choice: int, delta: Delta) -> str | None:
        whole = delta.finish_reason not in (None, "abort")
        return "length" if self._call.only_prompt and whole else delta.finish_reason


def _counts(asked: int, made: int) -> dict[str, Any]:
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


class CompletionAnswer(BaseAnswer):
    """The answer of /v1/completions."""

    prefix, kind, event_kind = "cmpl", "text_completion", "text_completion"

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

    def _event_text(self, text: str, *, first: bool) -> bytes:
        return b',"text":' + _encode(text)

    def _choice_text(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> bytes:
        return b',"text":' + _encode(self._first_text(choice, prompt, delta))

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

    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _event_text(self, text: str, *, first: bool) -> bytes:
        role = b'"role":"assistant",' if first else b""
        return b',"delta":{' + role + b'"content":' + _encode(text) + b"}"

    def _choice_text(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> bytes:
        return (
            b',"message":{"role":"assistant","content":' + _encode(delta.text) + b',"refusal":null}'
        )

    def _logprobs(
        self, choice: int, prompt: TokenizedPrompt, delta: Delta, positions: Any, *, first: bool
    ) -> bytes:
        return chat_logprobs(
            delta.token_ids, delta.logprobs or [], self._spell, self._call.logprobs or 0
        )
