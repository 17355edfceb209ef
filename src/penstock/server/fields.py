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

from penstock.server.refusals import HttpError

LONGEST_NAME = 80  # characters of a field's name that an error repeats


@dataclass(frozen=True, slots=True)
class Fate:
    """`harmless`: the values that change nothing, or a type whose every value does. `note`: why, and the way out."""

    harmless: tuple[Any, ...] | type
    note: str

    def accepts(self, value: Any) -> bool:
        if isinstance(self.harmless, type):
            return isinstance(value, self.harmless)
        return any(type(value) is type(known) and value == known for known in self.harmless)


def _refused(note: str) -> Fate:
    return Fate((), note)


_TAG = "a tag for OpenAI's own records; it changes no token"
_TOOLS = "tools are not served: put their description in a message, and read the answer's text"
_GRAMMAR = "guided decoding is not served: ask for the form in the prompt, or sample several and keep those that parse"
_GUIDES = "says how guided decoding is done; without that it changes nothing"
_LEAVE = "not served: leave it out"
_TEXT_ALONE = "only text is served"
_IN_TEXT = "reasoning is not parsed apart; put it in content as the model's template wants it"

# Both routes. Names of vLLM's that people send are here too, so that the answer says more than "unknown".
BOTH: dict[str, Fate] = {
    "user": Fate(str, _TAG),
    "metadata": Fate(dict, _TAG),
    "safety_identifier": Fate(str, _TAG),
    "prompt_cache_key": Fate(str, "routes requests between OpenAI's machines; our cache finds equal prompts itself"),
    "prompt_cache_retention": Fate(("in_memory",), "the prefix cache is in memory; leave it out"),
    "prompt_cache_options": Fate(({},), "the prefix cache has no options a request; leave it out"),
    "session_id": Fate(str, "groups requests for those who route them; it changes no token"),
    "store": Fate((False,), "answers are not stored; keep them on your side"),
    "service_tier": Fate(("auto", "default"), "there is one tier; leave it out"),
    "priority": Fate((0,), "requests have one priority; leave it out"),
    "use_beam_search": Fate((False,), "beam search is not served; ask for n samples"),
    "length_penalty": Fate((1, 1.0), "it belongs to beam search, which is not served; leave it out"),
    "early_stopping": Fate((False,), "it belongs to beam search, which is not served; leave it out"),
    "spaces_between_special_tokens": Fate((True,), "special tokens are always spelt apart; leave it out"),
    "detokenize": Fate((True,), "answers hold text; ask for return_token_ids to get ids beside it"),
    "response_format": Fate(({"type": "text"},), _GRAMMAR),
    "structured_outputs": Fate(({},), _GRAMMAR),
    "guided_decoding_backend": Fate(str, _GUIDES),
    "guided_whitespace_pattern": Fate(str, _GUIDES),
    "guided_json": _refused(_GRAMMAR),  # {} is a schema too: of any JSON
    "guided_regex": _refused(_GRAMMAR),
    "guided_choice": _refused(_GRAMMAR),
    "guided_grammar": _refused(_GRAMMAR),
    "bad_words": Fate(([],), "forbid single tokens with logit_bias -100"),
    "allowed_token_ids": _refused("not served: use logit_bias"),
    "logits_processors": Fate(([],), "code from clients is not run"),
    "logprob_token_ids": Fate(([],), "ask for the logprobs of the most likely tokens"),
    "repetition_detection": Fate(({},), "cancel the request, or give a stop string"),
    "thinking_token_budget": Fate((-1,), "bound all that is made with max_tokens"),
    "truncation_side": Fate(("left",), "truncate_prompt_tokens keeps the last"),
    "stream_interval": Fate((1,), "tokens are sent as they come; leave it out"),
    "watermarking": Fate((False,), _LEAVE),
    "vllm_xargs": Fate(({},), _LEAVE),
    "kv_transfer_params": Fate(({},), _LEAVE),
    "ec_transfer_params": Fate(({},), _LEAVE),
    "routed_experts_prompt_start": Fate((0,), _LEAVE),
    "return_token_offsets": Fate((False,), "logprobs of completions have text_offset"),
    "return_mm_kwargs": Fate(bool, "only of a route that renders; here it changes nothing"),
    "request_id": _refused("ids of answers are made by the server; read `id` of the answer"),
    "mm_processor_kwargs": Fate(({},), _TEXT_ALONE),
    "media_io_kwargs": Fate(({},), _TEXT_ALONE),
}

COMPLETION: dict[str, Fate] = {
    **BOTH,
    "suffix": Fate(("",), "filling in the middle is not served; put the suffix in the prompt as the model wants it"),
    "prompt_embeds": _refused("prompts are text or token ids"),
    "messages": _refused("a chat goes to /v1/chat/completions; here give a prompt"),
}

CHAT: dict[str, Fate] = {
    **BOTH,
    "prompt": _refused("a prompt goes to /v1/completions; here give messages"),
    "best_of": _refused("not served in chat: ask for n samples"),
    "tools": Fate(([],), _TOOLS),
    "tool_choice": Fate(("none", "auto"), _TOOLS),
    "parallel_tool_calls": Fate(bool, "says how tools are called; without tools it changes nothing"),
    "functions": Fate(([],), _TOOLS),
    "function_call": Fate(("none", "auto"), _TOOLS),
    "modalities": Fate((["text"],), _TEXT_ALONE),
    "audio": _refused(_TEXT_ALONE),
    "moderation": _refused("no moderation is run; run it on your side"),
    "prediction": _refused("predicted outputs are not served; leave it out"),
    "reasoning_effort": _refused("not served: use chat_template_kwargs where the model's template has a switch"),
    "include_reasoning": Fate((True,), "reasoning is not parsed apart; it is in the answer's text"),
    "verbosity": Fate(("medium",), "say it in a message"),
    "web_search_options": _refused("nothing is fetched from the web"),  # {} asks for a search
    "documents": Fate(([],), "put them in a message"),
    "chat_template": Fate(("",), "templates come from the model alone"),
    "return_prompt_text": Fate((False,), "ask for return_token_ids, which tells the prompt's ids"),
    "echo": Fate((False,), "not served in chat: you have the messages"),
}

MESSAGE: dict[str, Fate] = {
    "refusal": Fate(("",), "refusals are not served; put the text in content"),
    "tool_calls": Fate(([],), _TOOLS),
    "tool_call_id": _refused(_TOOLS),
    "function_call": _refused(_TOOLS),
    "audio": _refused(_TEXT_ALONE),
    "annotations": Fate(([],), "notes on the web are not served; leave them out"),
    "reasoning": Fate(("",), _IN_TEXT),
    "reasoning_content": Fate(("",), _IN_TEXT),
}

STREAM_OPTIONS: dict[str, Fate] = {
    "include_obfuscation": Fate((False,), "events are not padded; leave it out"),
}


def sift(raw: Mapping[str, Any], known: Collection[str], fates: Mapping[str, Fate], where: str = "") -> dict[str, Any]:
    """The fields of `raw` that the form reads. null counts as left out. Raises HttpError for a field that is
    unknown, or has no place here; `where` stands before its name."""
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        if name in known:
            if value is not None:
                kept[name] = value
            continue
        shown = where + name[:LONGEST_NAME]
        fate = fates.get(name)
        if fate is None:
            raise HttpError(f"unknown field {shown}: leave it out", param=shown, code="unknown_parameter")
        if value is not None and not fate.accepts(value):
            which = "" if not fate.harmless else " with this value"
            note = fate.note.removeprefix("not served: ")
            raise HttpError(f"{shown} is not served{which}: {note}", param=shown, code="unsupported_parameter")
    return kept
