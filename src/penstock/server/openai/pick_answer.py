"""Picks the answer class of a call. Decides by the route and by whether the text is parsed. Knows
only the answer classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.openai.answers import BaseAnswer, ChatAnswer, CompletionAnswer
from penstock.server.openai.generate_answer import GenerateAnswer
from penstock.server.openai.logprobs_json import TokenSpellings
from penstock.server.openai.read_answers import ReadChatAnswer
from penstock.server.openai.responses_answer import ResponsesAnswer
from penstock.server.openai.scoring_answer import ScoringAnswer

if TYPE_CHECKING:
    from penstock.server.openai.translate import Call


async def answer_to(call: Call, model: str, spellings: TokenSpellings) -> BaseAnswer:
    """Returns a new answer object for the call, after making the spelling tables that it needs."""
    if call.scoring is not None:
        return ScoringAnswer(call, model, spellings)
    if call.logprobs is not None:
        await spellings.of(as_ids=call.tokens_as_ids).prepare(
            chat=call.chat or call.tokens_only is not None
        )
    if call.tokens_only is not None:
        return GenerateAnswer(call, model, spellings)
    if not call.chat:
        return CompletionAnswer(call, model, spellings)
    if call.asked is not None:
        return ResponsesAnswer(call, model, spellings)
    return (ChatAnswer if call.reader is None else ReadChatAnswer)(call, model, spellings)
