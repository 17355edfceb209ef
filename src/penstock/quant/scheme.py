"""Scheme: how a matrix lies in a checkpoint, and the operation that multiplies by it. Each scheme
is a class here.

    plain   [out, in] in a float dtype, rounded to the model's
    fp8     e4m3 numbers with float scales: `quant/fp8.py`
    int     integers with scales by group or row: `quant/integers.py`
    fp4     e2m1 numbers with scales by group: `quant/fp4.py`

It knows names and numbers; a layer decides which of its matrices has which scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Form, TakesWideRows
from penstock.kernels.ops import Ops
from penstock.parallel.sharded_weight import Part, Weight

# Rows [T, in], what prepare made, bias [out] -> [T, out]
Multiply = Callable[[Any, Any, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix that is ready to be multiplied by: the operation, and the arrangement of numbers
    that it takes."""

    multiply: Multiply
    matrix: Any  # the operation's own: no layer looks into it
    form: Callable[[int], Form] = TakesWideRows().form  # how so many rows are wanted
    streamed: Any = (
        None  # what the fused operations of one row take; None: they don't serve this matrix
    )
    # rows, matrix, activation -> act(gate) * up, or None, as Ops.linear_gated; None: there is no
    # such form
    gated: Callable[[Tensor, Any, str], Tensor | None] | None = None


class Scheme(Protocol):
    """`parts` name matrices [out, in] without the `.weight` that a checkpoint adds."""

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        """Returns what has to be loaded, by the scheme's own words for them."""

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        """Arranges what was loaded for its operation, and lets the loaded form go."""


@runtime_checkable
class ForExperts(Scheme, Protocol):
    """A scheme whose numbers operations of experts take as they are."""

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor | None, ...]:
        """Returns numbers [out, in], then scales, zeros, and what multiplies scales, None or
        nothing where it has none, and lets the loaded form go: as `kernels/expert_matrix.py` has
        those of an expert."""


@runtime_checkable
class Made(Scheme, Protocol):
    """A scheme whose numbers are made of wide ones, here too of those that are loaded for something
    else."""

    def made_of(self, ops: Ops, matrix: Tensor) -> Product:
        """Returns the product by a matrix [out, in] of the model's dtype, which stays as it is."""


class Plain:
    """Unquantized."""

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        return {"weight": Weight([named(part, "weight") for part in parts], dtype, device)}

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor]:
        return (weights["weight"].take(),)

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return plain_product(ops, weights["weight"].take())


def plain_product(ops: Ops, matrix: Tensor) -> Product:
    """Returns the product by a matrix [out, in] of the model's dtype."""
    prepared = ops.prepare_linear(matrix)
    return Product(ops.linear, prepared, streamed=prepared, gated=ops.linear_gated)


def named(part: Part, suffix: str) -> Part:
    """Returns the tensor of a checkpoint that holds a matrix under `suffix`."""
    return part.over(f"{part.name}.{suffix}", part.shape)


PLAIN = Plain()
