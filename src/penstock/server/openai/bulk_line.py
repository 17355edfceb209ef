"""Parses and answers one line of /v1/bulk. The line is the body of a completion or a chat in any
format of batch_line.py; its answer is a line of JSON:

    {"custom_id": "a", "prompt": [1, 2], "max_tokens": 16}
    {"line": 1, "custom_id": "a", "id": "cmpl-...", ...}

If lines differ only in prompt and custom_id, the other fields are parsed once. Answers with
`packed` hold ids and logprobs as bytes. Knows body structs and deltas; no engine, no HTTP.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock.engine.logprobs import LazyLogprobs
from penstock.request import Delta, PositionLogprobs
from penstock.server.openai.answer_objects import PackedChoice
from penstock.server.openai.answers import CompletionAnswer
from penstock.server.openai.batch_line import CHAT, COMPLETIONS, check_id, name_and_body
from penstock.server.openai.forms import (
    ChatForm,
    CompletionForm,
    chat_form,
    completion_form,
)
from penstock.server.openai.http_errors import HttpError, check_model
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.openai.prompt_ids import PromptTools, completion_prompts
from penstock.server.openai.tool_forms import Json
from penstock.server.openai.translate import Call, CompletionParams, completion_params, make_call

KEPT = 256  # number of most recent sets of fields that are kept parsed
ANY_PROMPT = [0]  # placeholder for the prompt while the other fields are parsed
_encode = msgspec.json.Encoder().encode


def named(raw: Json) -> tuple[str | None, Json]:
    """Returns a line's custom_id (or None) and its body.
    Raises HttpError for an invalid custom_id."""
    custom_id, body = name_and_body(raw)
    if isinstance(custom_id, int) and not isinstance(custom_id, bool) and "custom_id" not in raw:
        custom_id = str(custom_id)
    if custom_id is not None and not isinstance(custom_id, str):
        raise HttpError("custom_id must be text", param="custom_id")
    if custom_id is not None:
        check_id(custom_id)
    if body is raw.get("body"):
        route = CHAT if "messages" in body else COMPLETIONS
        if (raw.get("method", "POST"), raw.get("url", route)) != ("POST", route):
            raise HttpError(f"a line with this body is a POST of {route}", param="url")
    return custom_id, body


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parsed fields shared by lines that differ only in their prompts."""

    params: CompletionParams
    packed: bool


class BulkReader:
    """Makes calls from the lines of one /v1/bulk body."""

    def __init__(self, tools: PromptTools, model: str, limits: HttpLimits, tenant: int) -> None:
        self._tools, self._model, self._limits, self._tenant = tools, model, limits, tenant
        self._known: OrderedDict[bytes, _Shared] = OrderedDict()

    async def read(self, raw: Json) -> tuple[Call, bool]:
        """Returns a line's call, and whether its answer is packed. Raises UsageError."""
        if "messages" in raw:
            return await self._chat(raw), False
        prompt = raw.pop("prompt", None)
        if not isinstance(prompt, str | list):
            raise HttpError(
                "prompt is missing: text, or a list of token ids; or messages, of a chat",
                param="prompt",
            )
        if not prompt or (isinstance(prompt, list) and not isinstance(prompt[0], int)):
            raise HttpError("a line takes one prompt: text, or a list of token ids", param="prompt")
        shared = await self._shared(raw)
        prompts = await completion_prompts(prompt, shared.params.form, self._tools)
        return shared.params.call(prompts, self._tools.facts, self._tenant), shared.packed

    async def _chat(self, raw: Json) -> Call:
        if raw.get("packed"):
            raise HttpError("a chat's answer is not packed: leave packed out", param="packed")
        form = chat_form({name: raw[name] for name in raw if name != "packed"}, self._limits)
        self._check(form)
        return await make_call(form, self._tools, self._tenant)

    def _check(self, form: CompletionForm | ChatForm) -> None:
        check_model(form.model, self._model)
        if form.stream:
            raise HttpError("a line's answer is one line: leave stream out", param="stream")

    async def _shared(self, raw: Json) -> _Shared:
        key = _encode(raw)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = await self._read_fields(raw)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    async def _read_fields(self, raw: Json) -> _Shared:
        packed = raw.pop("packed", None)
        if not isinstance(packed, bool | None):
            raise HttpError("packed must be true or false", param="packed")
        form = completion_form({**raw, "prompt": ANY_PROMPT}, self._limits)
        self._check(form)
        if packed:
            _check_packed(form)
        params = await completion_params(form, self._tools, shown=not packed)
        return _Shared(params, bool(packed))


def _check_packed(form: CompletionForm) -> None:
    """Raises HttpError for a field that a packed answer can't hold."""
    for name in ("echo", "prompt_logprobs", "return_token_ids"):
        if getattr(form, name):
            raise HttpError(
                f"a packed answer is of drawn tokens alone: leave {name} out", param=name
            )
    if form.logprobs:
        raise HttpError(
            "a packed answer has the drawn tokens' own logprobs: logprobs must be 0",
            param="logprobs",
        )


class PackedAnswer(CompletionAnswer):
    """An answer whose choices have no text, but token ids as int32 and their logprobs as float32,
    little-endian and in base64."""

    def choice(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        packed = PackedChoice(
            choice,
            _packed(delta.token_ids, "<i4"),
            None if self._call.logprobs is None else _packed(_chosen(delta), "<f4"),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if delta.weights_version is not None:
            packed.weights_version = delta.weights_version
        return _encode(packed)


def _chosen(delta: Delta) -> Any:
    """Returns the logprob of each sampled token of a delta, [tokens]."""
    scores = delta.logprobs or []
    if isinstance(scores, LazyLogprobs):
        return scores.columns[1]
    return [each[token].logprob for each, token in zip(scores, delta.token_ids, strict=True)]


def _packed(values: Any, kind: str) -> str:
    return base64.b64encode(np.asarray(values, np.dtype(kind)).tobytes()).decode()


def told(number: int, custom_id: str | None, body: bytes) -> bytes:
    """Returns a line of the answer: the JSON object `body` with the line's number and custom_id
    added."""
    return b'{"line":%d,"custom_id":%b,%b\n' % (number, _encode(custom_id), body[1:])
