"""Tunables: kernel parameters that `penstock build` tunes by timing candidate values on the
machine.

A tunable is a keyword argument of an operation; its default is the fastest value on one H200. To
add one, give the operation the keyword and the list in this module a line. Knows names and values.
`penstock.build` times them, the built engine stores them, and `choose` sets them when a built
engine is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Tuned = Mapping[str, Any]  # name of a tunable -> value


@dataclass(frozen=True, slots=True)
class Tunable:
    """A keyword argument of the Triton implementation of the operation `op`. candidates: allowed
    values, including the default."""

    op: str
    keyword: str
    default: int
    candidates: tuple[int, ...]
    help: str

    @property
    def name(self) -> str:
        return f"{self.op}.{self.keyword}"


TUNABLES = (
    Tunable(
        "linear",
        "small_rows",
        16,
        (16, 8, 4, 1),
        "rows up to which a product streams its weight; more: cuBLAS",
    ),
    Tunable(
        "linear",
        "small_numbers",
        40_000_000,
        (40_000_000, 20_000_000, 1 << 40),
        "numbers of a matrix past which cuBLAS takes few rows too",
    ),
    Tunable(
        "linear_fp8",
        "streamed_rows",
        256,
        (256, 128, 192, 512),
        "rows up to which a float8 product streams its weight; more: the library",
    ),
    Tunable(
        "linear_int",
        "streamed_rows",
        256,
        (256, 64, 128, 512),
        "rows up to which a product with integers streams its weight; more: widened, for the"
        " library",
    ),
    Tunable(
        "linear_fp4",
        "streamed_rows",
        256,
        (256, 64, 128, 512),
        "rows up to which a product with four-bit floats streams its weight; more: widened, for the"
        " library",
    ),
    Tunable(
        "attention",
        "few_programs",
        512,
        (512, 256, 1024),
        "programs that few rows' attention is cut into",
    ),
    Tunable(
        "latent_attention",
        "expand_tokens",
        256,
        (256, 64, 128, 512, 1024, 1 << 40),
        "tokens of a step's prompts from which on keys and values may be made of latent vectors",
    ),
)


def with_values(
    op: str, column: str, operation: Callable[..., Any], tuned: Tuned
) -> Callable[..., Any]:
    """Returns `operation` with its tunables set to the values in `tuned`. It is returned unchanged
    if `tuned` has none of them, or if `column` is not "triton". Raises ValueError for a value that
    is no candidate."""
    values: dict[str, int] = {}
    for each in TUNABLES if column == "triton" else ():
        if each.op == op and each.name in tuned:
            if tuned[each.name] not in each.candidates:
                raise ValueError(
                    f"{each.name} must be one of {each.candidates}, not {tuned[each.name]!r}"
                )
            values[each.keyword] = tuned[each.name]
    return partial(operation, **values) if values else operation


def known(tuned: Tuned) -> dict[str, Any]:
    """Returns the entries of `tuned` that are tunables of this version of Penstock with allowed
    values."""
    return {
        each.name: tuned[each.name] for each in TUNABLES if tuned.get(each.name) in each.candidates
    }
