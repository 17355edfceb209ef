"""ToldObject: reads an object of `quantization_config` key by key. Keys that are not read are
errors. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import CheckpointError

LONGEST = 200  # the most characters of a value that an error message shows
INSTEAD = (
    "take the model's unquantized checkpoint, or one in compressed-tensors, ModelOpt's NVFP4, fp8,"
    " AWQ or GPTQ"
)

# Methods and formats that are known but not supported -> the reason and advice for the error
# message, where these differ from INSTEAD.
REFUSED = {
    "bitsandbytes": (
        "its own library makes them: take the unquantized checkpoint with --quantization int4 or"
        " int8"
    ),
    "gguf": "take the folder that it was made from, with config.json and safetensors",
    "mxfp6-pack-quantized": (
        "floats of six bits are not read: take an fp8, NVFP4 or int4 checkpoint"
    ),
    "mxfp8-quantized": (
        "floats with a power of two for 32 are read of four bits alone: take an fp8 checkpoint"
    ),
    "marlin": (
        "its numbers are laid out for one kernel: take the GPTQ checkpoint that it was made from"
    ),
    "marlin-24": "sparse matrices are not read: take a dense int4 checkpoint",
    "sparse-24-bitmask": "sparse matrices are not read: take a dense checkpoint",
    "sparse-bitmask": "sparse matrices are not read: take a dense checkpoint",
    "gptq_marlin_24": "sparse matrices are not read: take a dense int4 checkpoint",
}


@dataclass(slots=True)
class ToldObject:
    """A JSON object that is read key by key, so that unread keys can be refused. A null counts as
    missing. raw: the object. where: its file and key, for error messages."""

    raw: dict[str, Any]
    where: str
    read: set[str] = field(default_factory=set)

    def fail(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")

    def take(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def past(self, *names: str) -> None:
        """Marks keys as read without reading them,
        since they don't change how the model computes."""
        self.read.update(names)

    def text(self, name: str, default: str) -> str:
        value = self.take(name, default)
        if not isinstance(value, str):
            raise self.fail(f"{name} must be a string, not {shown(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.fail(f"{name} must be true or false, not {shown(value)}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if type(value) is not int:
            raise self.fail(f"{name} must be a whole number, not {shown(value)}")
        return value

    def names(self, *spellings: str) -> tuple[str, ...]:
        """Returns the list of names or patterns under a key that has several spellings."""
        found: list[str] = []
        for name in spellings:
            value = self.take(name, [])
            if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
                raise self.fail(f"{name} must be a list of names, not {shown(value)}")
            found += value
        for entry in found:
            if entry.startswith("re:"):
                try:
                    re.compile(entry[3:])
                except (re.error, RecursionError, OverflowError) as error:
                    raise self.fail(f"{shown(entry)} is no pattern ({error})") from error
        return tuple(found)

    def refuse_rest(self) -> None:
        left = {
            n: v
            for n, v in self.raw.items()
            if n not in self.read and v not in (None, [], {}, False)
        }
        if left:
            listed = ", ".join(f"{shown(name)} ({shown(value)})" for name, value in left.items())
            keys, them = ("key", "is") if len(left) == 1 else ("keys", "are")
            raise self.fail(f"{keys} {listed} {them} not known, and may change numbers: {INSTEAD}")

    def one_of(self, name: str, value: Any, known: Collection[Any], instead: str = INSTEAD) -> Any:
        if value not in known:
            listed = ", ".join(repr(each) for each in known)
            raise self.fail(f"{name} {shown(value)} is not read, only {listed}: {instead}")
        return value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
