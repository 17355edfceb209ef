"""hold_numbers: adapts a JSON Schema's number bounds to llguidance.

The library reads bounds as float64 and writes integer ranges as int64. So beyond 2^53 it would
round a bound; it makes a range up to the ends of int64 empty, and refuses a range with only one
bound. This module moves bounds inward to the next integer that float64 has, so that an answer
always satisfies its schema. At 2^53 this excludes one number per bound, at 2^63 up to 1,024. Knows
schemas as JSON; no grammar.
"""

from __future__ import annotations

import math
import re
from typing import Any

from penstock.errors import UsageError

EXACT = 2**53  # float64 has every integer up to this one
LARGEST = 2**63 - 1024  # largest int64 that float64 can represent
_LONG = re.compile(r"\d{16}|\d[eE]")  # matches a schema's text if it has a number above EXACT
_VALUES = ("const", "enum", "default", "examples")


def may_have_large_numbers(text: str) -> bool:
    """Returns False if a schema's text certainly has no number above EXACT."""
    return _LONG.search(text) is not None


def hold_numbers(schema: Any) -> Any:
    """Returns the schema with its number bounds moved inward. Raises UsageError for values that
    cannot be enforced exactly."""
    if isinstance(schema, list):
        return [hold_numbers(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    for name in ("const", "enum"):
        _check_values(name, schema.get(name))
    held = {
        name: value if name in _VALUES else hold_numbers(value) for name, value in schema.items()
    }
    low, high = _ends(schema, "inimum", math.ceil, max), _ends(schema, "aximum", math.floor, min)
    if not any(end is not None and abs(end) > EXACT for end in (low, high)):
        return held
    kinds = schema.get("type")
    if kinds != "integer" and not (
        isinstance(kinds, list) and "integer" in kinds and "number" not in kinds
    ):
        return held  # bounds of type `number` are kept, since such numbers are float64 too
    least = -LARGEST if low is None else _inward(low, up=True)
    most = LARGEST if high is None else _inward(high, up=False)
    if least > most:
        raise _refused(
            f"integers from {_shown(low)} to {_shown(high)} cannot be held to exactly: give them as"
            " strings"
        )
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        held.pop(name, None)
    return {**held, "minimum": least, "maximum": most}


def _ends(schema: dict[str, Any], name: str, rounded: Any, narrower: Any) -> int | None:
    """Returns the integer bound that minimum and exclusiveMinimum (or maximum and exclusiveMaximum)
    give together; None if the schema has neither. name: "inimum" or "aximum". rounded: math.ceil or
    floor. narrower: max or min."""
    plain, open_ = schema.get("m" + name), schema.get("exclusiveM" + name)
    ends = [rounded(plain)] if plain is not None and _is_number(plain) else []
    if open_ is not None and _is_number(open_):
        ends.append(math.floor(open_) + 1 if narrower is max else math.ceil(open_) - 1)
    return narrower(ends) if ends else None


def _is_number(value: Any) -> bool:
    """Returns True for a finite number. Integers may be larger than any float."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float) and math.isfinite(value)


def _inward(end: int, *, up: bool) -> int:
    """Returns the nearest integer inside the bound `end` (or equal) that float64 and int64 can
    represent. up: True for a lower bound."""
    end = max(-LARGEST, end) if up else min(LARGEST, end)
    if abs(end) > LARGEST:  # a bound beyond int64's range: the result excludes every number
        return LARGEST + 1 if up else -LARGEST - 1
    near = float(end)
    while int(near) < end if up else int(near) > end:
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)


def _check_values(name: str, values: Any) -> None:
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, int) and not _is_exact(value):
            raise _refused(
                f"{name} has {_shown(value)}, which cannot be held to exactly: give it as a string"
            )


def _is_exact(value: int) -> bool:
    """Returns True if float64 can represent this integer."""
    try:
        return abs(value) <= EXACT or int(float(value)) == value
    except OverflowError:  # the integer is larger than any float64
        return False


def _shown(value: int | None) -> str:
    if value is None:
        return "any"
    if value.bit_length() <= 128:
        return str(value)
    return f"a number of {value.bit_length()} bits"


def _refused(why: str) -> UsageError:
    rule = f"structured_outputs cannot be served: {why}"
    return UsageError(rule, param="structured_outputs", rule=rule)
