"""Keys: a JSON object that is read key by key. Keys that are not read are errors, so that no
setting is ignored silently. Knows no model.

Each getter takes a key out and checks its type. `note_rest` collects the keys that remain, of the
object and of objects inside it; `refuse_unknown` raises one error that names them all. Every error
is one line that names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from penstock.disk import read_plain
from penstock.errors import CheckpointError

# the most bytes of a file; the largest known files, indexes of tensors, have 10 MB
LARGEST = 256 << 20
# the most levels of nesting; a config has three or four, and beyond 1,000 repr() and == fail
DEEPEST = 32
LONGEST_FAULT = 600  # most characters of an error message about a key
LONGEST_SHOWN = 60  # characters of an unknown key, and of its value, in an error
MOST_SHOWN = 24  # unknown keys listed in an error, which counts the rest
MOST = 2**31 - 1  # the largest whole number allowed
REQUIRED = object()  # used as a default: the key must be there
ANYTHING = object()  # given as a key's value: any value is harmless


def read_json(path: Path, error_type: type[CheckpointError] = CheckpointError) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises an error of the given type if the file is missing,
    is not JSON, or holds no object."""
    try:
        raw = json.loads(read_plain(path, LARGEST).decode("utf-8"))
    except OSError as error:
        raise error_type(
            f"{path} cannot be read ({error.strerror}): give a complete model folder"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error_type(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(raw, dict):
        raise error_type(
            f"{path} holds a JSON {type(raw).__name__}, not an object: download it again"
        )
    if _deeper(raw, DEEPEST):
        raise error_type(f"{path} is nested deeper than {DEEPEST} levels: download it again")
    return raw


def _deeper(value: Any, levels: int) -> bool:
    """Returns True if lists and objects are nested deeper than `levels`."""
    parts: Collection[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return bool(parts) and (not levels or any(_deeper(part, levels - 1) for part in parts))


class Keys:
    """The unread keys of a JSON object. where: the file name, with which every error begins."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.rest = dict(raw)
        self.where = where
        self._of = ""  # name of the object inside the file, for errors; "": the whole file
        self._unknown: list[str] = []  # unknown keys of the whole file

    def part(self, name: str, raw: Mapping[str, Any]) -> Keys:
        """Returns the keys of an object inside this one; unknown keys of both are collected
        together."""
        inner = Keys(raw, f"{self.where}: {name}")
        inner._of, inner._unknown = f" of {name}{self._of}", self._unknown
        return inner

    def fail(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {_cut(text, LONGEST_FAULT)}")

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the value of a key, unchecked, and marks the key as read. A null counts as
        missing, as is usual in these files."""
        value = self.rest.pop(name, None)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.fail(f"key {name!r} is missing: take the model's complete config.json")
        return default

    def past(self, **anyway: Any) -> None:
        """Marks keys as read if they have the given values, which are those of the engine's fixed
        behaviour. Keys with other values stay unread and are refused later."""
        for name, value in anyway.items():
            if self.rest.get(name) == value:
                del self.rest[name]

    def skip(self, *names: str) -> None:
        """Marks keys as read, since their values change no results."""
        for name in names:
            self.rest.pop(name, None)

    def count(self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int = MOST) -> Any:
        """Returns a whole number from `low` to `high`."""
        value = self.take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(
                f"{name} must be a whole number from {low} to {high}, not {shown(value)}"
            )
        return value

    def number(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        above: float | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> Any:
        """Returns a finite number as a float: greater than `above`, at least `low`,
        at most `high`."""
        value = self.take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            raise self.fail(f"{name} must be a finite number, not {shown(value)}")
        too_low = (above is not None and value <= above) or (low is not None and value < low)
        if too_low or (high is not None and value > high):
            bounds = [(above, "above"), (low, "at least"), (high, "at most")]
            said = " and ".join(f"{word} {bound:g}" for bound, word in bounds if bound is not None)
            raise self.fail(f"{name} must be {said}, not {shown(value)}")
        return float(value)

    def positive(self, name: str, default: Any = REQUIRED) -> Any:
        return self.number(name, default, above=0.0)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.fail(f"{name} must be true or false, not {shown(value)}")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default and not isinstance(value, str):
            raise self.fail(f"{name} must be a string, not {shown(value)}")
        return value

    def object(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns an object, as a dict."""
        value = self.take(name, default)
        if value is not default and not isinstance(value, dict):
            raise self.fail(f"{name} must be an object, not {shown(value)}")
        return value

    def listed(
        self,
        name: str,
        default: Any,
        length: int,
        rule: str,
        fits: Callable[[Any], bool] = lambda entry: True,
    ) -> Any:
        """Returns a list of `length` entries, each accepted by `fits`. rule: what the list must do,
        for the error."""
        value = self.take(name, default)
        if value is not default and not (
            isinstance(value, list) and len(value) == length and all(map(fits, value))
        ):
            raise self.fail(f"{name} must {rule}")
        return value

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Returns token ids, which the file gives as one id or as a list; None if the key is
        missing."""
        value = self.take(name, None)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.fail(f"{name} must be a token id or a list of them, not {shown(value)}")
        return tuple(dict.fromkeys(ids))

    def same(self, **spelt: Any) -> Any:
        """Returns the value that is given under two names; None if it is given under neither.
        spelt: name -> value. Raises CheckpointError if the two values differ."""
        given = {name: value for name, value in spelt.items() if value is not None}
        said = list(given.values())
        if said[1:] and said[0] != said[1]:
            both = " and ".join(f"{name} ({value})" for name, value in given.items())
            raise self.fail(f"{both} disagree: remove the wrong one")
        return said[0] if said else None

    def note_rest(self, nothing: Mapping[str, Any]) -> None:
        """Collects the unread keys that may change results. nothing: key -> its harmless value, or
        ANYTHING."""
        self._unknown += [
            f"{shown(name, LONGEST_SHOWN)}{self._of}"
            f" ({_cut(json.dumps(self.rest[name]), LONGEST_SHOWN)})"
            for name in self.left(nothing)
        ]

    def refuse_unknown(self, whom: str) -> None:
        """Raises CheckpointError with the names of all collected keys, if there are any. whom: the
        subject of the error message."""
        found, more = self._unknown[:MOST_SHOWN], len(self._unknown) - MOST_SHOWN
        if not found:
            return
        keys, them = (
            ("key", "it only if it changes")
            if len(found) == 1
            else ("keys", "them only if they change")
        )
        listed = f"{keys} {', '.join(found)}{f' and {more} more' if more > 0 else ''}"
        verb = "is" if len(found) == 1 else "are"
        raise CheckpointError(
            f"{self.where}: {listed} {verb} not supported for {whom}: remove {them} nothing"
        )

    def left(self, nothing: Mapping[str, Any]) -> list[str]:
        """Returns the unread keys that have a value and may change results. nothing:
        see note_rest."""
        harmless = {
            n
            for n, v in self.rest.items()
            if n in nothing and (nothing[n] is ANYTHING or nothing[n] == v)
        }
        return [
            name for name, value in self.rest.items() if value is not None and name not in harmless
        ]


def shown(value: Any, longest: int = 200) -> str:
    """Returns a value's repr for an error message, cut to `longest` characters."""
    return _cut(repr(value), longest)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
