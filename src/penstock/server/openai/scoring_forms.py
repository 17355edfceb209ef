"""Parses bodies of vLLM's /generative_scoring. Each item becomes a completion of one token, which
gives the labels' probabilities.

    {"query": text or ids, "items": [texts or lists of ids], "label_token_ids": [ids]}

Knows the body and its prompts; scoring_answer makes the answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from penstock.errors import ContextLengthError, UsageError, too_long
from penstock.request import MAX_LOGPROBS
from penstock.server.openai.forms import CompletionForm, Int, convert, read_object
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL, HttpLimits
from penstock.server.openai.prompt_ids import (
    PromptTools,
    TokenizedPrompt,
    check_id,
    completion_prompts,
)
from penstock.server.openai.unsupported_fields import COMPLETION, sift

POLICIES = {name: COMPLETION[name] for name in ("priority", "request_id", "user")}


class ScoringBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /generative_scoring. item_first: put the items before the query. apply_softmax:
    normalise over the labels; False: over the vocabulary."""

    query: str | list[Any]
    items: list[Any]
    label_token_ids: list[Int]
    model: str | None = None
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    timeout: float | None = None
    cache_salt: str | None = None


class ScoringForm(CompletionForm, kw_only=True):
    """The completion that a body of /generative_scoring becomes. Its prompts are the items; the
    query is added as token ids."""

    body: ScoringBody


def read_scoring(body: bytes | bytearray, limits: HttpLimits = USUAL) -> ScoringForm:
    """Parses the body of POST /generative_scoring. Raises HttpError."""
    raw = sift(read_object(body, limits), ScoringBody.__struct_fields__, POLICIES)
    for name in ("query", "items", "label_token_ids"):
        if name not in raw:
            raise HttpError(f"{name} is missing: send query, items and label_token_ids", param=name)
    asked = convert(raw, ScoringBody)
    labels = asked.label_token_ids
    if not 0 < len(labels) <= MAX_LOGPROBS or len(set(labels)) < len(labels):
        message = f"label_token_ids must be 1 to {MAX_LOGPROBS} token ids, each once"
        raise HttpError(message, param="label_token_ids")
    if not 0 < len(asked.items) <= limits.max_prompts:
        raise HttpError(
            f"items must list 1 to {limits.max_prompts} texts or lists of ids", param="items"
        )
    if {*map(type, asked.items)} not in ({str}, {list}):
        raise HttpError("items must be all texts or all lists of token ids", param="items")
    if isinstance(asked.query, list) and {*map(type, asked.query)} != {int}:
        raise HttpError("query must be text or token ids, one at least", param="query")
    return ScoringForm(
        body=asked,
        model=asked.model,
        prompt=asked.items,
        timeout=asked.timeout,
        cache_salt=asked.cache_salt,
        max_tokens=1,
        temperature=0.0,
        repetition_penalty=1.0,
        logprob_token_ids=labels,
    )


async def scoring_prompts(form: ScoringForm, tools: PromptTools) -> list[TokenizedPrompt]:
    """Returns the token ids of query and item together, for each item. Raises HttpError,
    ContextLengthError."""
    asked = form.body
    for token in asked.label_token_ids:
        check_id(token, tools.facts.vocab_size, "label_token_ids")
    query = await _parts(asked.query, "query", form, tools, special=asked.add_special_tokens)
    items = await _parts(asked.items, "items", form, tools, special=False)
    header = query[0].ids
    prompts = [
        TokenizedPrompt(item.ids + header if asked.item_first else header + item.ids)
        for item in items
    ]
    longest, context = max(len(prompt.ids) for prompt in prompts), tools.facts.max_model_len
    if longest >= context:
        message = f"{too_long(context)}, {longest} tokens of query and item: shorten them"
        raise ContextLengthError(message, param="items")
    return prompts


async def _parts(
    given: str | list[Any], name: str, form: ScoringForm, tools: PromptTools, *, special: bool
) -> list[TokenizedPrompt]:
    """Tokenizes the query or the items (`given`). special: add special tokens. Raises HttpError and
    ContextLengthError with the body's field `name`."""
    try:
        return await completion_prompts(
            given, msgspec.structs.replace(form, add_special_tokens=special), tools
        )
    except UsageError as error:
        error.param = name
        raise
