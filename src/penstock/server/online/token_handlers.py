"""Text to token ids and back over HTTP, in vLLM's shapes: what evaluation tools and RL loops ask a server for that has
the only copy of a tokenizer. It knows requests, forms and the tokenizer; no engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.sandbox.sandbox_process import TextJob, TokensJob
from penstock.server.online.app_state import AppState
from penstock.server.online.auth import key_of
from penstock.server.online.buffered import json_response
from penstock.server.online.handlers import RequestWork
from penstock.server.openai.forms import ChatForm
from penstock.server.openai.http_errors import HttpError, check_model
from penstock.server.openai.prompt_ids import LONG_TEXT, chat_prompt
from penstock.server.openai.token_forms import read_detokenize, read_tokenize
from penstock.server.openai.translate import size_of

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

MOST_CHARACTERS = 1_000_000  # of a text; a second or so of a processor
MOST_IDS = 1_000_000  # of a body of /detokenize; its values are counted before it is read
FEW_IDS = 1_024  # that the event loop decodes by itself; about 1 ms


async def post_tokenize(state: AppState, request: Request) -> Response:
    """POST /tokenize: a text, or a chat as the model's template renders it. Raises PenstockError, ClientGoneError."""
    tokenizer, facts = _tokenizer(state), state.client.facts
    key = key_of(request.scope)
    state.request_limits.check(key)
    with state.intake.place() as place:
        asked = read_tokenize(await state.intake.read(request, place), state.limits)
        form = asked.form
        check_model(form.model, state.model)
        ticket = state.request_limits.acquire(key, *size_of(form))
        try:
            work = RequestWork(state, request, ticket, state.deadline(form.timeout))
            if isinstance(form, ChatForm):
                ids = (await chat_prompt(form, work.prompt_tools)).ids
            else:
                ids = await _ids_of(str(form.prompt), form.add_special_tokens is not False, tokenizer, work)
            spelt = await _spelt(ids, tokenizer, state) if asked.spelt else None
        finally:
            ticket.release()
    return json_response({"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids, "token_strs": spelt})


async def _ids_of(text: str, special: bool, tokenizer: Tokenizer, work: RequestWork) -> list[int]:
    """Returns a text's ids: also of one that is longer than the context, whose length is what many want to know."""
    if len(text) > MOST_CHARACTERS:
        raise HttpError(f"prompt has more than {MOST_CHARACTERS} characters: tokenise it in parts", param="prompt")
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=special)
    (reply,) = await work.in_sandbox([TextJob([text], special, any_length=True)])
    return reply.ids[0]


async def _spelt(ids: list[int], tokenizer: Tokenizer, state: AppState) -> list[str]:
    """Returns what each token spells; the loop turns meanwhile."""
    spelt: list[str] = []
    for first in range(0, len(ids), state.limits.turn_tokens):
        some = ids[first : first + state.limits.turn_tokens]
        spelt += map(tokenizer.token_text, some)
        await state.yielder.spend(len(some))
    return spelt


async def post_detokenize(state: AppState, request: Request) -> Response:
    """POST /detokenize: the text of token ids, special tokens' too. Raises PenstockError."""
    tokenizer, key = _tokenizer(state), key_of(request.scope)
    state.request_limits.check(key)
    with state.intake.place() as place:
        body = await state.intake.read(request, place)
        model, ids = read_detokenize(
            body, state.client.facts.vocab_size, replace(state.limits, max_values=MOST_IDS + 2)
        )
        if len(ids) > MOST_IDS:
            raise HttpError(f"tokens has more than {MOST_IDS} ids: send them in parts", param="tokens")
        check_model(model, state.model)
        ticket = state.request_limits.acquire(key, 1, len(ids))
        try:
            if len(ids) <= FEW_IDS:
                text = tokenizer.decode(ids, skip_special_tokens=False)
            else:
                (reply,) = await RequestWork(state, request, ticket, None).in_sandbox([TokensJob(ids)])
                text = reply.text
        finally:
            ticket.release()
    return json_response({"prompt": text})


async def get_tokenizer_info(state: AppState, request: Request) -> Response:
    """GET /tokenizer_info: what a client needs to know of special tokens and templates. Raises HttpError."""
    tokenizer = _tokenizer(state)
    told: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": state.client.facts.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens,
    }
    return json_response(told)


def _tokenizer(state: AppState) -> Tokenizer:
    if state.client.tokenizer is None:
        raise HttpError("this server has no tokenizer: start it without --skip-tokenizer-init", status=404)
    return state.client.tokenizer
