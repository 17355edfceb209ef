"""How Penstock treats one vLLM argument. Each treatment has a sentence that explains it to the
user."""

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
LONGEST = 80  # most characters of a value that an error message repeats


@dataclass(frozen=True, slots=True)
class As:
    """An accepted value that equals the value of another argument."""

    name: str


@dataclass(frozen=True, slots=True)
class Argument:
    """The treatment of one argument. taken: accepted values, which are what Penstock does anyway;
    or a type, all of whose values are accepted and change nothing. note: the reason, and what to do
    instead. told: True: all values are accepted, but for a value outside `taken` the user gets
    `note` as a message.
    """

    taken: tuple[Any, ...] | type
    note: str
    told: bool = False

    @property
    def is_flag(self) -> bool:
        return self.taken is bool or (
            isinstance(self.taken, tuple) and any(isinstance(v, bool) for v in self.taken)
        )

    def takes(self, value: Any, others: Mapping[str, Any]) -> bool:
        """Returns True if the value is accepted. others: the other arguments by name."""
        if isinstance(self.taken, type):
            return isinstance(value, self.taken)
        known = [others.get(v.name) if isinstance(v, As) else v for v in self.taken]
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in known)


def named(
    names: str, taken: tuple[Any, ...] | type, note: str, *, told: bool = False
) -> dict[str, Argument]:
    """Returns name -> Argument with this treatment, for each of the names, which are separated by
    spaces."""
    return dict.fromkeys(names.split(), Argument(taken, note, told))
