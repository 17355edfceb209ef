"""StoredQuantization: how a checkpoint's matrices are stored, by their names. It knows no tensors, and no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["fp8", "int8", "int4"]
Scales = Literal["channel", "tensor", "block", "group"]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a matrix lies in a checkpoint.

    group: inputs that share a scale, None: all of a row (by tensor, of a matrix).   zeros: whether nothing is
    another number than the middle one.   packing: of integers, by quant/int_forms.py's names.   scale: how its name
    ends.
    """

    kind: Kind
    scales: Scales
    group: int | None = None
    zeros: bool = False
    packing: str = ""
    scale: str = "weight_scale"

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8


@dataclass(frozen=True, slots=True)
class Targets:
    """Which matrices have a form: class names, whole names, or `re:` and a pattern that a name begins with."""

    named: tuple[str, ...]
    form: StoredForm


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """What a checkpoint says of its matrices.

    ignored: those left as they were. by_part: its entries are parts of a name between dots (HF's way), else they are as
    targets are.   only: where not empty, ends of the names that are quantized.   kv: what it says of keys and values.
    """

    method: str
    targets: tuple[Targets, ...]
    ignored: tuple[str, ...] = ()
    by_part: bool = False
    only: tuple[str, ...] = ()
    kv: Any = None

    def form_of(self, name: str) -> StoredForm | None:
        """Returns how a matrix lies there; None: unquantized. name: without `.weight`."""
        if any(self._ignores(name, entry) for entry in self.ignored):
            return None
        if self.only and not name.endswith(self.only):
            return None
        return next((t.form for t in self.targets if any(_matches(name, entry) for entry in t.named)), None)

    def _ignores(self, name: str, entry: str) -> bool:
        if entry.startswith("re:") or not self.by_part:
            return _matches(name, entry)
        return f".{entry}." in f".{name}."

    @property
    def kinds(self) -> set[str]:
        return {target.form.kind for target in self.targets}


def _matches(name: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return entry in (name, "Linear")
