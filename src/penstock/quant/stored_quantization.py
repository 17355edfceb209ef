"""StoredQuantization: which matrices of a checkpoint are quantized, and how they are stored.
Matrices are given by name. Knows no tensors and no torch."""

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
    """The storage of a matrix in a checkpoint: dtype, packing and scales.

    kind, scales: kind of numbers, and which of them share a scale. group: inputs that share a
    scale; None: the whole row, or the whole matrix if there is one scale per matrix. zeros: True if
    there are zero points. packing: name of a packing in quant/int_forms.py, or for four-bit floats
    in quant/fp4.py. scale: suffix of the scale tensor's name."""

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
    """The matrices that are stored in one StoredForm.

    named: class names, whole names, or `re:` and a pattern for the beginning of a name. If it is a
    frozenset, it has only whole names of matrices and modules, of which there may be thousands.
    narrow_rows: True if the checkpoint wants four-bit activations for these matrices."""

    named: tuple[str, ...] | frozenset[str]
    form: StoredForm
    narrow_rows: bool = False

    def have(self, name: str) -> bool:
        """Returns True if the matrix `name` is one of the targets."""
        if isinstance(self.named, frozenset):
            parts = name.split(".")
            return any(".".join(parts[:count]) in self.named for count in range(1, len(parts) + 1))
        return any(_matches(name, entry) for entry in self.named)


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The quantization that a checkpoint declares for its matrices.

    ignored: names of matrices left unquantized. by_part: how `ignored` is matched. True: an entry
    is one or more of a name's parts between dots (Hugging Face), or has `*` and matches whole names
    and modules (ModelOpt); False: like `Targets.named`. only: if not empty, only names that end in
    one of these suffixes are quantized. kv: the quantization that the config declares for the KV
    cache."""

    method: str
    targets: tuple[Targets, ...]
    ignored: tuple[str, ...] = ()
    by_part: bool = False
    only: tuple[str, ...] = ()
    kv: Any = None

    def form_of(self, name: str) -> StoredForm | None:
        """Returns how the checkpoint stores a matrix; None: unquantized. name: the matrix's name
        without `.weight`."""
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
        """Returns the same quantization with all names replaced. ours: function from a name in the
        checkpoint's config to the name that the model uses."""
        targets = tuple(
            replace(each, named=type(each.named)(map(ours, each.named))) for each in self.targets
        )
        return replace(self, targets=targets, ignored=tuple(map(ours, self.ignored)))

    @property
    def kinds(self) -> set[str]:
        return {target.form.kind for target in self.targets}

    @property
    def narrow_rows(self) -> bool:
        """True if the checkpoint wants four-bit activations for some matrices. The engine doesn't
        quantize activations to four bits."""
        return any(target.narrow_rows for target in self.targets)


def _matches(name: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return entry in (name, "Linear")


@cache
def _by_part(ignored: tuple[str, ...]) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Splits the ignored names into those without `*`, and one pattern that matches the others.
    Cached, since it is needed for every matrix of a model."""
    own = [entry for entry in ignored if not entry.startswith("re:")]
    parts = tuple(f".{entry}." for entry in own if "*" not in entry)
    patterns = [translate(each) for entry in own if "*" in entry for each in (entry, f"{entry}.*")]
    return parts, re.compile("|".join(patterns) or "(?!)")
