"""QuantKeys: reads an object of `quantization_config` key by key. Keys that are not read are
errors. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from penstock.json_keys import LONGEST_SHOWN, Keys, shown

MOST_LISTED = 3  # unknown keys that an error names, so that its advice has room
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


class QuantKeys(Keys):
    """The keys of `quantization_config`, or of an object in it."""

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

    def one_of(self, name: str, value: Any, known: Collection[Any], instead: str = INSTEAD) -> Any:
        if value not in known:
            listed = ", ".join(repr(each) for each in known)
            raise self.fail(f"{name} {shown(value)} is not read, only {listed}: {instead}")
        return value

    def refuse_rest(self) -> None:
        """Raises CheckpointError with the names of all keys that were not read."""
        left = [name for name in self.left({}) if self.rest[name] not in ([], {}, False)]
        if left:
            listed = ", ".join(
                f"{shown(name, LONGEST_SHOWN)} ({shown(self.rest[name], LONGEST_SHOWN)})"
                for name in left[:MOST_LISTED]
            )
            listed += f" and {len(left) - MOST_LISTED} more" * (len(left) > MOST_LISTED)
            keys, them = ("key", "is") if len(left) == 1 else ("keys", "are")
            raise self.fail(f"{keys} {listed} {them} not known, and may change numbers: {INSTEAD}")
