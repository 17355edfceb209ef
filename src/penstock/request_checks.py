"""Checks the numbers in a request. They must be integers or real numbers in range; errors name the
parameter and its allowed values.
"""

from __future__ import annotations

import sys

from penstock.errors import UsageError
from penstock.row_table import RANGES

# largest allowed number. Values are compared with it before any conversion, since an integer may be
# larger than any float
LARGEST = sys.float_info.max


def read_bias(bias: object) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in dict(bias).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            "logit_bias must map token ids to numbers, as {17: -100.0}", param="logit_bias"
        ) from error


def check_whole(
    name: str, value: object, low: int, high: int | None, param: str | None = None
) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, "a whole number", value, param)
    if value < low or (high is not None and value > high):
        raise wrong(
            name,
            f"between {low} and {high}" if high is not None else f"at least {low}",
            value,
            param,
        )


def check_real(param: str, value: object, name: str | None = None) -> None:
    low, high, open_low = RANGES[param]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise wrong(name or param, "a finite number", value, param)
    if value < low or value > high or (open_low and value == low):
        must_be = f"above {low} and at most {high}" if open_low else f"between {low} and {high}"
        raise wrong(name or param, must_be, value, param)


def wrong(name: str, must_be: str, value: object, param: str | None = None) -> UsageError:
    """Returns the error for a bad value. `name` may contain user input; `param` does not."""
    param = param or name
    return UsageError(
        f"{name} must be {must_be}, not {value!r}", param=param, rule=f"{param} must be {must_be}"
    )
