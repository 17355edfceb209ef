"""SpeculativeConfig: the option speculative_config, which chooses what drafts tokens ahead of the
model. Named as in vLLM."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.errors import UsageError
from penstock.row_table import MOST_SPECULATIVE_TOKENS

METHODS = ("ngram",)
MOST_LOOKUP = 16  # most tokens that a prompt lookup compares


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """method: what drafts. `ngram`: prompt lookup, which looks for the row's last tokens earlier in
    its own text. num_speculative_tokens: most drafts of a row in a step. prompt_lookup_max,
    prompt_lookup_min: most and fewest last tokens that must stand there."""

    method: str = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 3

    @classmethod
    def of(cls, text: str) -> SpeculativeConfig:
        """Reads the option's JSON. Raises UsageError."""
        try:
            made = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            example = '{"method": "ngram", "num_speculative_tokens": 4}'
            raise _refused(f"cannot be read ({error}): give JSON such as {example}") from error
        if made.method not in METHODS:
            raise _refused(f"method {made.method!r} is not served: take {', '.join(METHODS)}")
        made._within("num_speculative_tokens", 1, MOST_SPECULATIVE_TOKENS)
        made._within("prompt_lookup_max", 1, MOST_LOOKUP)
        made._within("prompt_lookup_min", 1, made.prompt_lookup_max)
        return made

    def _within(self, name: str, low: int, high: int) -> None:
        value: int = getattr(self, name)
        if not low <= value <= high:
            raise _refused(f"{name} must be between {low} and {high}, not {value}")


def as_text(given: Any) -> Any:
    """Returns a dict as the option's JSON, and any other value as it is."""
    return msgspec.json.encode(given).decode() if isinstance(given, dict) else given


def _refused(why: str) -> UsageError:
    return UsageError(f"speculative_config: {why}", param="speculative_config")
