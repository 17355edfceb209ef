"""Deltas to answers: one JSON body at the end, or server-sent events as bytes.

An event is joined from ready-made pieces: what is the same for all events of an answer is encoded once, so an event
costs one encoding of its text. It knows a call, deltas and JSON; no engine, no HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.request import Delta, PositionLogprobs
from penstock.server.logprobs import Speller, chat_logprobs, completion_logprobs, prompt_logprobs

if TYPE_CHECKING:
    from penstock.server.translate import Call, Prompt
    from penstock.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_GOING_ON = b',"logprobs":null,"finish_reason":null,"stop_reason":null'


class Answer:
    """What both routes share. `choice` is prompt-major: prompt * n + sample.

    `prompt_positions` is the stream's prompt_logprobs of the delta's prompt, wherever one is asked for.
    """

    prefix = ""
    kind = ""
    event_kind = ""

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer | None) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._call = call
        self._spell = Speller(tokenizer, as_ids=call.tokens_as_ids)
        self._tokenizer = tokenizer
        self._top = {"id": self.id, "object": self.kind, "created": int(time.time()), "model": model}
        shown = {**self._top, "object": self.event_kind}
        self._head = b"data: " + _encode(shown)[:-1] + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if call.include_usage else b"}]}\n\n"
        self._usage_head = b"data: " + _encode(shown)[:-1] + b',"choices":[],"usage":'
        self._begun: set[int] = set()  # choices that have sent their first event

    # -- what the routes give

    def _opening(self, choice: int, prompt: Prompt) -> str:
        raise NotImplementedError

    def _event_text(self, text: str, *, first: bool) -> bytes:
        raise NotImplementedError

    def _logprobs(self, choice: int, prompt: Prompt, delta: Delta, positions: Any, *, first: bool) -> Any:
        raise NotImplementedError

    def _choice_text(self, choice: int, prompt: Prompt, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    # -- one body

    def choice(self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None) -> dict[str, Any]:
        """The finished choice of a sample's one delta."""
        prompt = self._call.prompts[choice // self._call.sampling.n]
        out: dict[str, Any] = {"index": choice, **self._choice_text(choice, prompt, delta)}
        out["logprobs"] = self._logprobs(choice, prompt, delta, positions, first=True)
        out["finish_reason"] = self._finish(delta)
        out["stop_reason"] = delta.stop_reason
        if self._call.return_token_ids:
            out["token_ids"] = self._ids(delta)
            out["prompt_token_ids"] = prompt.ids
        if self._call.prompt_logprobs is not None and positions is not None:
            out["prompt_logprobs"] = prompt_logprobs(positions, self._spell)
        return out

    def body(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return _encode({**self._top, "choices": choices, "usage": usage})

    # -- events

    def event(self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None) -> bytes:
        """The event of one delta; empty where it says nothing (text held back, say)."""
        first = choice not in self._begun
        plain = delta.finish_reason is None and self._call.logprobs is None and not self._call.return_token_ids
        if plain and not first:
            if not delta.text:
                return b""
            shown = self._event_text(delta.text, first=False)
            return b"".join((self._head, b"%d" % choice, shown, _GOING_ON, self._tail))
        self._begun.add(choice)
        prompt = self._call.prompts[choice // self._call.sampling.n]
        text = self._first_text(choice, prompt, delta) if first else self._text(delta)
        pieces = [self._head, b"%d" % choice, self._event_text(text, first=first)]
        pieces += (b',"logprobs":', _encode(self._logprobs(choice, prompt, delta, positions, first=first)))
        pieces += (b',"finish_reason":', _encode(self._finish(delta)), b',"stop_reason":', _encode(delta.stop_reason))
        if self._call.return_token_ids:
            pieces += (b',"token_ids":', _encode(self._ids(delta)))
            if first:
                pieces += (b',"prompt_token_ids":', _encode(prompt.ids))
        pieces.append(self._tail)
        return b"".join(pieces)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return self._usage_head + _encode(usage) + b"}\n\n"

    def usage(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """A prompt's tokens count once, whatever n is."""
        made = 0 if self._call.only_prompt else completion_tokens
        asked = sum(len(prompt.ids) for prompt in self._call.prompts)
        return {
            "prompt_tokens": asked,
            "completion_tokens": made,
            "total_tokens": asked + made,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _first_text(self, choice: int, prompt: Prompt, delta: Delta) -> str:
        return self._opening(choice, prompt) + self._text(delta)

    def _text(self, delta: Delta) -> str:
        return "" if self._call.only_prompt else delta.text

    def _ids(self, delta: Delta) -> list[int]:
        return [] if self._call.only_prompt else delta.token_ids

    def _finish(self, delta: Delta) -> str | None:
        return "length" if self._call.only_prompt and delta.finish_reason else delta.finish_reason


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    prefix, kind, event_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(call, model, tokenizer)
        self._offsets: dict[int, int] = {}  # choice -> characters of the tokens listed so far
        self._prompt_texts: dict[int, str] = {}

    def _opening(self, choice: int, prompt: Prompt) -> str:
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

    def _choice_text(self, choice: int, prompt: Prompt, delta: Delta) -> dict[str, Any]:
        return {"text": self._first_text(choice, prompt, delta)}

    def _logprobs(self, choice: int, prompt: Prompt, delta: Delta, positions: Any, *, first: bool) -> Any:
        if self._call.logprobs is None:
            return None
        ids: list[int] = []
        listed: list[PositionLogprobs | None] = []
        if first and self._call.echo:
            ids += prompt.ids
            listed += positions or []
        if not self._call.only_prompt:
            ids += delta.token_ids
            listed += delta.logprobs or []
        found = completion_logprobs(ids, listed, self._spell, self._offsets.get(choice, 0))
        if ids:
            self._offsets[choice] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions. The role comes with a choice's first event."""

    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _opening(self, choice: int, prompt: Prompt) -> str:
        return ""

    def _event_text(self, text: str, *, first: bool) -> bytes:
        role = b'"role":"assistant",' if first else b""
        return b',"delta":{' + role + b'"content":' + _encode(text) + b"}"

    def _choice_text(self, choice: int, prompt: Prompt, delta: Delta) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": delta.text, "refusal": None}}

    def _logprobs(self, choice: int, prompt: Prompt, delta: Delta, positions: Any, *, first: bool) -> Any:
        if self._call.logprobs is None:
            return None
        return chat_logprobs(delta.token_ids, delta.logprobs or [], self._spell, self._call.logprobs)
