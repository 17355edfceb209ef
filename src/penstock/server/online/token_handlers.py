"""Handlers of /tokenize and /detokenize. They use vLLM's bodies, for evaluation tools and RL loops
that have no tokenizer of their own. Knows requests, body structs and the tokenizer; no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from penstock.sandbox.sandbox_process import TellJob, TokensJob, tokens_json
from penstock.server.online.app_state import AppState
from penstock.server.online.auth import key_of
from penstock.server.online.buffered import JSON, json_response
from penstock.server.online.handlers import RequestWork, read_body
from penstock.server.online.intake import BodyRoom
from penstock.server.openai.forms import ChatForm
from penstock.server.openai.http_errors import HttpError, check_model
from penstock.server.openai.prompt_ids import LONG_TEXT, chat_prompt
from penstock.server.openai.token_forms import read_detokenize, read_tokenize
from penstock.server.openai.translate import size_of

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

# most UTF-8 bytes of a text; it has at most as many tokens, which take 170 MB and one or two
# seconds to make
MOST_BYTES = 1_000_000
FEW_IDS = 1_024  # most ids that the event loop decodes itself, in about 1 ms


class Text(Struct):
    """The answer of POST /detokenize."""

    prompt: str


class TokenizerInfo(Struct, kw_only=True):
    """The answer of GET /tokenizer_info; the special tokens follow by their names."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    model_max_length: int
    vocab_size: int
    chat_template: str | None


async def post_tokenize(state: AppState, request: Request) -> Response:
    """POST /tokenize: answers the tokens of a text, or of a chat rendered by the model's template.
    Raises PenstockError, ClientGoneError."""
    tokenizer, most = _tokenizer(state), state.client.facts.max_model_len
    key = key_of(request.scope)
    state.request_limits.check(key)
    with BodyRoom(state.intake.large) as place:
        asked = await read_body(state, request, place, read_tokenize)
        form = asked.form
        check_model(form.model, state.model)
        ticket = state.request_limits.acquire(key, *size_of(form))
        try:
            work = RequestWork(state, request, ticket, state.deadline(form.timeout))
            special = form.add_special_tokens is not False
            if isinstance(form, ChatForm):
                ids = (await chat_prompt(form, work.prompt_tools)).ids
                told = await work.in_thread(
                    lambda: tokens_json(ids, most, tokenizer if asked.spelt else None)
                )
            else:
                told = await _told(
                    TellJob(str(form.prompt), special, asked.spelt), tokenizer, most, work
                )
        finally:
            ticket.release()
    return Response(told, media_type=JSON)


async def _told(job: TellJob, tokenizer: Tokenizer, most: int, work: RequestWork) -> bytes:
    """Returns a text's tokens as JSON. The text may be longer than the context (`most` tokens),
    since many clients want to know its length."""
    if len(job.text) <= LONG_TEXT:
        ids = tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens)
        return tokens_json(ids, most, tokenizer if job.spelt else None)
    if len(job.text) > MOST_BYTES or len(job.text.encode("utf-8", "replace")) > MOST_BYTES:
        raise HttpError(
            f"prompt has more than {MOST_BYTES} bytes: tokenise it in parts", param="prompt"
        )
    (reply,) = await work.in_sandbox([job])
    return reply.told


async def post_detokenize(state: AppState, request: Request) -> Response:
    """POST /detokenize: answers the text of token ids, with special tokens.
    Raises PenstockError."""
    tokenizer, key = _tokenizer(state), key_of(request.scope)
    state.request_limits.check(key)
    with BodyRoom(state.intake.large) as place:
        size = state.client.facts.vocab_size
        model, ids = await read_body(
            state, request, place, lambda body, limits: read_detokenize(body, size, limits)
        )
        check_model(model, state.model)
        ticket = state.request_limits.acquire(key, 1, ids.size)
        try:
            if ids.size <= FEW_IDS:
                text = tokenizer.decode(ids, skip_special_tokens=False)
            else:
                (reply,) = await RequestWork(state, request, ticket, None).in_sandbox(
                    [TokensJob(ids.tobytes())]
                )
                text = reply.text
        finally:
            ticket.release()
    return json_response(Text(text))


async def get_tokenizer_info(state: AppState, request: Request) -> Response:
    """GET /tokenizer_info: answers the special tokens, the chat template and sizes. Raises
    HttpError."""
    tokenizer = _tokenizer(state)
    told = TokenizerInfo(
        model_max_length=state.client.facts.max_model_len,
        vocab_size=tokenizer.vocab_size,
        chat_template=tokenizer.chat_template,
    )
    return json_response(msgspec.structs.asdict(told) | dict(tokenizer.special_tokens))


def _tokenizer(state: AppState) -> Tokenizer:
    if state.client.tokenizer is None:
        raise HttpError(
            "this server has no tokenizer: start it without --skip-tokenizer-init", status=404
        )
    return state.client.tokenizer
