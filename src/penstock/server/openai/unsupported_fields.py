"""What becomes of each field that OpenAI or vLLM have and our forms don't: accepted, accepted at some values, refused.

A value is accepted here where it asks for nothing, or for what is done anyway: null always, and for most fields the
default that its API documents, which clients spell out. The note says why. Everything else is a 400 that names the
field and the way out; an empty list of what alone may come (`allowed_token_ids`, `guided_choice`) too, for it cannot be
met. It knows names and values, no form and no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.server.openai.http_errors import HttpError

LONGEST_NAME = 80  # characters of a field's name that an error repeats


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """`harmless`: the values that change nothing, or a type whose every value does. `note`: why, and the way out."""

    harmless: tuple[Any, ...] | type
    note: str

    def accepts(self, value: Any) -> bool:
        if isinstance(self.harmless, type):
            return isinstance(value, self.harmless)
        return any(type(value) is type(known) and value == known for known in self.harmless)


def _refused(note: str) -> FieldPolicy:
    return FieldPolicy((), note)


_TAG = "a tag for OpenAI's own records; it changes no token"
_TOOLS = "tools are not served: put their description in a message, and read the answer's text"
_GRAMMAR = "guided decoding is not served: ask for the form in the prompt, or sample several and keep those that parse"
_GUIDES = "says how guided decoding is done; without that it changes nothing"
_LEAVE = "not served: leave it out"
_TEXT_ALONE = "only text is served"
_IN_TEXT = "reasoning is not parsed apart; put it in content as the model's template wants it"

# Both routes. Names of vLLM's that people send are here too, so that the answer says more than "unknown".
BOTH: dict[str, FieldPolicy] = {
    "user": FieldPolicy(str, _TAG),
    "metadata": FieldPolicy(dict, _TAG),
    "safety_identifier": FieldPolicy(str, _TAG),
    "prompt_cache_key": FieldPolicy(
        str, "routes requests between OpenAI's machines; our cache finds equal prompts itself"
    ),
    "prompt_cache_retention": FieldPolicy(("in_memory",), "the prefix cache is in memory; leave it out"),
    "prompt_cache_options": FieldPolicy(({},), "the prefix cache has no options a request; leave it out"),
    "session_id": FieldPolicy(str, "groups requests for those who route them; it changes no token"),
    "store": FieldPolicy((False,), "answers are not stored; keep them on your side"),
    "service_tier": FieldPolicy(("auto", "default"), "there is one tier; leave it out"),
    "priority": FieldPolicy((0,), "requests have one priority; leave it out"),
    "use_beam_search": FieldPolicy((False,), "beam search is not served; ask for n samples"),
    "length_penalty": FieldPolicy((1, 1.0), "it belongs to beam search, which is not served; leave it out"),
    "early_stopping": FieldPolicy((False,), "it belongs to beam search, which is not served; leave it out"),
    "spaces_between_special_tokens": FieldPolicy((True,), "special tokens are always spelt apart; leave it out"),
    "detokenize": FieldPolicy((True,), "answers hold text; ask for return_token_ids to get ids beside it"),
    "response_format": FieldPolicy(({"type": "text"},), _GRAMMAR),
    "structured_outputs": FieldPolicy(({},), _GRAMMAR),
    "guided_decoding_backend": FieldPolicy(str, _GUIDES),
    "guided_whitespace_pattern": FieldPolicy(str, _GUIDES),
    "guided_json": _refused(_GRAMMAR),  # {} is a schema too: of any JSON
    "guided_regex": _refused(_GRAMMAR),
    "guided_choice": _refused(_GRAMMAR),
    "guided_grammar": _refused(_GRAMMAR),
    "bad_words": FieldPolicy(([],), "forbid single tokens with logit_bias -100"),
    "allowed_token_ids": _refused("not served: use logit_bias"),
    "logits_processors": FieldPolicy(([],), "code from clients is not run"),
    "logprob_token_ids": FieldPolicy(([],), "ask for the logprobs of the most likely tokens"),
    "repetition_detection": FieldPolicy(({},), "cancel the request, or give a stop string"),
    "thinking_token_budget": FieldPolicy((-1,), "bound all that is made with max_tokens"),
    "truncation_side": FieldPolicy(("left",), "truncate_prompt_tokens keeps the last"),
    "stream_interval": FieldPolicy((1,), "tokens are sent as they come; leave it out"),
    "watermarking": FieldPolicy((False,), _LEAVE),
    "vllm_xargs": FieldPolicy(({},), _LEAVE),
    "kv_transfer_params": FieldPolicy(({},), _LEAVE),
    "ec_transfer_params": FieldPolicy(({},), _LEAVE),
    "routed_experts_prompt_start": FieldPolicy((0,), _LEAVE),
    "return_token_offsets": FieldPolicy((False,), "logprobs of completions have text_offset"),
    "return_mm_kwargs": FieldPolicy(bool, "only of a route that renders; here it changes nothing"),
    "request_id": _refused("ids of answers are made by the server; read `id` of the answer"),
    "mm_processor_kwargs": FieldPolicy(({},), _TEXT_ALONE),
    "media_io_kwargs": FieldPolicy(({},), _TEXT_ALONE),
}

COMPLETION: dict[str, FieldPolicy] = {
    **BOTH,
    "suffix": FieldPolicy(
        ("",), "filling in the middle is not served; put the suffix in the prompt as the model wants it"
    ),
    "prompt_embeds": _refused("prompts are text or token ids"),
    "messages": _refused("a chat goes to /v1/chat/completions; here give a prompt"),
}

CHAT: dict[str, FieldPolicy] = {
    **BOTH,
    "prompt": _refused("a prompt goes to /v1/completions; here give messages"),
    "best_of": _refused("not served in chat: ask for n samples"),
    "tools": FieldPolicy(([],), _TOOLS),
    "tool_choice": FieldPolicy(("none", "auto"), _TOOLS),
    "parallel_tool_calls": FieldPolicy(bool, "says how tools are called; without tools it changes nothing"),
    "functions": FieldPolicy(([],), _TOOLS),
    "function_call": FieldPolicy(("none", "auto"), _TOOLS),
    "modalities": FieldPolicy((["text"],), _TEXT_ALONE),
    "audio": _refused(_TEXT_ALONE),
    "moderation": _refused("no moderation is run; run it on your side"),
    "prediction": _refused("predicted outputs are not served; leave it out"),
    "reasoning_effort": _refused("not served: use chat_template_kwargs where the model's template has a switch"),
    "include_reasoning": FieldPolicy((True,), "reasoning is not parsed apart; it is in the answer's text"),
    "verbosity": FieldPolicy(("medium",), "say it in a message"),
    "web_search_options": _refused("nothing is fetched from the web"),  # {} asks for a search
    "documents": FieldPolicy(([],), "put them in a message"),
    "chat_template": FieldPolicy(("",), "templates come from the model alone"),
    "return_prompt_text": FieldPolicy((False,), "ask for return_token_ids, which tells the prompt's ids"),
    "echo": FieldPolicy((False,), "not served in chat: you have the messages"),
}

MESSAGE: dict[str, FieldPolicy] = {
    "refusal": FieldPolicy(("",), "refusals are not served; put the text in content"),
    "tool_calls": FieldPolicy(([],), _TOOLS),
    "tool_call_id": _refused(_TOOLS),
    "function_call": _refused(_TOOLS),
    "audio": _refused(_TEXT_ALONE),
    "annotations": FieldPolicy(([],), "notes on the web are not served; leave them out"),
    "reasoning": FieldPolicy(("",), _IN_TEXT),
    "reasoning_content": FieldPolicy(("",), _IN_TEXT),
}

STREAM_OPTIONS: dict[str, FieldPolicy] = {
    "include_obfuscation": FieldPolicy((False,), "events are not padded; leave it out"),
}


def sift(
    raw: Mapping[str, Any], known: Collection[str], policies: Mapping[str, FieldPolicy], where: str = ""
) -> dict[str, Any]:
    """The fields of `raw` that the form reads. null counts as left out. Raises HttpError for a field that is
    unknown, or has no place here; `where` stands before its name."""
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        if name in known:
            if value is not None:
                kept[name] = value
            continue
        shown = where + name[:LONGEST_NAME]
        policy = policies.get(name)
        if policy is None:
            raise HttpError(f"unknown field {shown}: leave it out", param=shown, code="unknown_parameter")
        if value is not None and not policy.accepts(value):
            which = "" if not policy.harmless else " with this value"
            note = policy.note.removeprefix("not served: ")
            raise HttpError(f"{shown} is not served{which}: {note}", param=shown, code="unsupported_parameter")
    return kept
