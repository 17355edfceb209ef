"""StoredQuantization: how a checkpoint's matrices are stored, by their names. It knows no tensors,
and no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cache
from typing import Any, Literal

Kind = Literal["fp8", "int8", "int4", "nvfp4", "mxfp4"]
Scales = Literal["channel", "tensor", "block", "group"]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a matrix lies in a checkpoint.

    group: inputs that share a scale, None: all of a row (by tensor, of a matrix).   zeros: whether
    nothing is another number than the middle one.   packing: by quant/int_forms.py's names, of
    four-bit floats by quant/fp4.py's. scale: how its name ends.
    """

    kind: Kind
    scales: Scales
    group: int | None = None
    zeros: bool = False
    packing: str = ""
    scale: str = "weight_scale"

    @property
    def bits(self) -> int:
        return 8 if self.kind in ("fp8", "int8") else 4


@dataclass(frozen=True, slots=True)
class Targets:
    """Which matrices have a form: class names, whole names, or `re:` and a pattern that a name
    begins with; a frozenset has names of matrices and of what holds them, of which there may be
    thousands.

    narrow_rows: whether what they multiply is meant to be in four bits too."""

    named: tuple[str, ...] | frozenset[str]
    form: StoredForm
    narrow_rows: bool = False

    def have(self, name: str) -> bool:
        """Returns whether a matrix is among them."""
        if isinstance(self.named, frozenset):
            parts = name.split(".")
            return any(".".join(parts[:count]) in self.named for count in range(1, len(parts) + 1))
        return any(_matches(name, entry) for entry in self.named)


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """What a checkpoint says of its matrices.

    ignored: those left as they were. by_part: its entries are parts of a name between dots (HF's
    way), or with `*` patterns of whole names and of what holds them (ModelOpt's); else they are as
    targets are. only: where not empty, ends of the names that are quantized.   kv: what it says of
    keys and values.
    """

    method: str
    targets: tuple[Targets, ...]
    ignored: tuple[str, ...] = ()
    by_part: bool = False
    only: tuple[str, ...] = ()
    kv: Any = None

    def form_of(self, name: str) -> StoredForm | None:
        """Returns how a matrix lies there; None: unquantized. name: without `.weight`."""
        if self._ignores(name):
            return None
        if self.only and not name.endswith(self.only):
            return None
        return next((target.form for target in self.targets if target.have(name)), None)

    def _ignores(self, name: str) -> bool:
        if not self.by_part:
            return any(_matches(name, entry) for entry in self.ignored)
        parts, pattern, dotted = *_by_part(self.ignored), f".{name}."
        if any(part in dotted for part in parts) or pattern.match(name) is not None:
            return True
        return any(entry.startswith("re:") and _matches(name, entry) for entry in self.ignored)

    def called(self, ours: Callable[[str], str]) -> StoredQuantization:
        """Returns the same by the names that `ours` gives for those of the checkpoint."""
        targets = tuple(
            replace(each, named=type(each.named)(map(ours, each.named))) for each in self.targets
        )
        return replace(self, targets=targets, ignored=tuple(map(ours, self.ignored)))

    @property
    def kinds(self) -> set[str]:
        return {target.form.kind for target in self.targets}

    @property
    def narrow_rows(self) -> bool:
        """Whether rows of some matrices are meant to be in four bits, which none are here."""
        return any(target.narrow_rows for target in self.targets)


def _matches(name: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return entry in (name, "Linear")


@cache
def _by_part(ignored: tuple[str, ...]) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Returns the parts between dots, and one pattern of those with `*`: they are asked for every
    matrix of a model."""
    own = [entry for entry in ignored if not entry.startswith("re:")]
    parts = tuple(f".{entry}." for entry in own if "*" not in entry)
    patterns = [translate(each) for entry in own if "*" in entry for each in (entry, f"{entry}.*")]
    return parts, re.compile("|".join(patterns) or "(?!)")
