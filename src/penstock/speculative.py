"""SpeculativeConfig: the option speculative_config, which chooses what drafts tokens ahead of the
model. Named as in vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.errors import UsageError
from penstock.row_table import MOST_SPECULATIVE_TOKENS

METHODS = {  # method -> the keys that it reads
    "ngram": ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "mtp": ("num_speculative_tokens",),
    "eagle3": ("model", "num_speculative_tokens"),
    "dflash": ("model", "num_speculative_tokens"),
}
MOST_LOOKUP = 16  # most tokens that a prompt lookup compares
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """method: what drafts. `ngram`: prompt lookup, which looks for the row's last tokens earlier in
    its own text. `mtp`: the checkpoint's layer for multi-token prediction, run once a draft.
    `eagle3`: an EAGLE-3 drafter in the form of the `speculators` package, likewise. `dflash`: a
    DFlash drafter in that form, run once for all drafts. `model`: such a drafter's folder or hub
    id. num_speculative_tokens: most drafts of a row in a step. prompt_lookup_max,
    prompt_lookup_min: most and fewest last tokens that must stand there."""

    method: str = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 3
    model: str | None = None

    @classmethod
    def of(cls, text: str) -> SpeculativeConfig:
        """Reads the option's JSON. Raises UsageError."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refused(f"is no JSON ({error}): give an object such as {EXAMPLE}") from error
        if not isinstance(given, dict):
            raise _refused(f"must be an object such as {EXAMPLE}")
        method = given.get("method", "ngram")
        if not isinstance(method, str) or method not in METHODS:
            raise _refused(f"method {_shown(method)} is not served: take {', '.join(METHODS)}")
        known = ["method", *METHODS[method]]
        if strange := sorted(given.keys() - set(known)):
            others = {field.name for field in fields(cls)}
            why = f"is no key of method {method}" if strange[0] in others else "is not known"
            raise _refused(f"key {_shown(strange[0])} {why}: take {', '.join(known)}")
        made = cls(**given)
        made._within("num_speculative_tokens", 1, MOST_SPECULATIVE_TOKENS)
        if "model" in METHODS[method] and not isinstance(made.model, str):
            raise _refused(f"method {method} needs model, a drafter's folder or hub id")
        if method != "ngram":
            return made
        made._within("prompt_lookup_max", 1, MOST_LOOKUP)
        made._within("prompt_lookup_min", 1, MOST_LOOKUP)
        # a bound that is not given makes way for the other
        if made.prompt_lookup_max < made.prompt_lookup_min:
            if "prompt_lookup_min" not in given:
                return replace(made, prompt_lookup_min=made.prompt_lookup_max)
            if "prompt_lookup_max" in given:
                raise _refused("prompt_lookup_min is above prompt_lookup_max: lower it")
            return replace(made, prompt_lookup_max=made.prompt_lookup_min)
        return made

    def _within(self, name: str, low: int, high: int) -> None:
        value: Any = getattr(self, name)
        if type(value) is not int or not low <= value <= high:
            raise _refused(f"{name} must be a number between {low} and {high}, not {_shown(value)}")


def with_counts(text: str, counts: Sequence[int]) -> list[str]:
    """Returns the option's JSON with each of these numbers of drafts; [] if it names one, or the
    drafter makes all of a block at once."""
    keys = json.loads(text)
    if "num_speculative_tokens" in keys or keys.get("method") == "dflash":
        return []
    return [json.dumps({**keys, "num_speculative_tokens": count}) for count in counts]


def names_count_of(asked: str, chosen: str) -> bool:
    """Returns True if `chosen` is `asked`, which names no number of drafts, with one."""
    keys = json.loads(chosen)
    return keys.pop("num_speculative_tokens", None) is not None and keys == json.loads(asked)


def as_text(given: Any) -> Any:
    """Returns a dict as the option's JSON, and any other value as it is. A drafter's folder becomes
    absolute, since other processes may run in other folders. Raises UsageError."""
    try:
        if isinstance(given, str) and '"model"' in given:
            given = json.loads(given)
        if not isinstance(given, dict):
            return given
        model = given.get("model")
        if not isinstance(model, str) or model == "demo":  # the package's drafter
            return json.dumps(given)
        if os.path.isdir(path := os.path.expanduser(model)):
            given = given | {"model": os.path.abspath(path)}
        return json.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(f"is no JSON ({error}): give an object such as {EXAMPLE}") from error


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _refused(why: str) -> UsageError:
    return UsageError(f"speculative_config: {why}", param="speculative_config")
