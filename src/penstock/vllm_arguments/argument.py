"""What becomes of one of vLLM's arguments, and the words that say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

KINDS: dict[type, str] = {
    dict: "an object",
    bool: "true or false",
    Real: "a number",
    str: "a text",
    object: "any value",
}
LONGEST = 80  # characters of a value that a refusal repeats


@dataclass(frozen=True, slots=True)
class As:
    """The value that another argument has."""

    name: str


@dataclass(frozen=True, slots=True)
class Argument:
    """taken: values that ask for what is done anyway, or a type all of whose values change nothing.
    note: why, and the way out. told: all of a flag's values are taken, and who asks for one that
    isn't in `taken` is told the note."""

    taken: tuple[Any, ...] | type
    note: str
    told: bool = False

    @property
    def is_flag(self) -> bool:
        return self.taken is bool or (
            isinstance(self.taken, tuple) and any(isinstance(v, bool) for v in self.taken)
        )

    def takes(self, value: Any, others: Mapping[str, Any]) -> bool:
        """Whether the value asks for what is done anyway. others: the arguments that came with it,
        by name."""
        if isinstance(self.taken, type):
            return isinstance(value, self.taken)
        known = [others.get(v.name) if isinstance(v, As) else v for v in self.taken]
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in known)


def named(
    names: str, taken: tuple[Any, ...] | type, note: str, *, told: bool = False
) -> dict[str, Argument]:
    """Returns what is said of these names, parted by spaces: the same of each."""
    return dict.fromkeys(names.split(), Argument(taken, note, told))
