"""Scheme: a way to store and multiply a matrix. A scheme is a class that knows the tensors of a
matrix in a checkpoint and the operation that multiplies by it.

  plain   [out, in] in a float dtype, rounded to the model's
  fp8     e4m3 numbers with float scales: `quant/fp8.py`
  int     integers with scales by group or row: `quant/integers.py`
  fp4     e2m1 numbers with scales by group: `quant/fp4.py`

Knows names and numbers; a layer decides which of its matrices has which scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Form, TakesWideRows
from penstock.kernels.ops import Ops
from penstock.parallel.sharded_weight import Part, Weight

# rows [T, in], prepared matrix, bias [out] -> [T, out]
Multiply = Callable[[Any, Any, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix prepared for products: the operation, and the matrix as that operation takes it."""

    multiply: Multiply
    matrix: Any  # the second argument of `multiply`
    # function from a number of rows to their representation for `multiply` (kernels/fp8_rows.py)
    form: Callable[[int], Form] = TakesWideRows().form
    streamed: Any = None  # the matrix for fused one-row operations; None: not supported
    # function (rows, matrix, activation) -> act(gate) * up, as Ops.linear_gated; None: not
    # supported
    gated: Callable[[Tensor, Any, str], Tensor | None] | None = None


class Scheme(Protocol):
    """A way to store matrices. `parts` name matrices [out, in] without the
    checkpoint's `.weight`."""

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        """Returns the weights to load, by names that the scheme chooses."""

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        """Returns the product with the loaded weights, rearranged for its operation. The loaded
        arrays are dropped."""


@runtime_checkable
class ForExperts(Scheme, Protocol):
    """A scheme that the operations of expert layers support too."""

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor | None, ...]:
        """Returns numbers [out, in], then scales, zeros and factors of scales (None or left out if
        there are none). The loaded arrays are dropped. The layout is that of one expert in
        `kernels/expert_matrix.py`."""


@runtime_checkable
class Made(Scheme, Protocol):
    """A scheme that quantizes at load, and can also quantize a matrix loaded for another use."""

    def made_of(self, ops: Ops, matrix: Tensor) -> Product:
        """Returns the product with a quantized copy of a matrix [out, in] of the model's dtype."""


class Plain:
    """The scheme of unquantized matrices."""

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        return {"weight": Weight([named(part, "weight") for part in parts], dtype, device)}

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor]:
        return (weights["weight"].take(),)

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return plain_product(ops, weights["weight"].take())


def plain_product(ops: Ops, matrix: Tensor) -> Product:
    """Returns the product with a matrix [out, in] of the model's dtype."""
    prepared = ops.prepare_linear(matrix)
    return Product(ops.linear, prepared, streamed=prepared, gated=ops.linear_gated)


def named(part: Part, suffix: str) -> Part:
    """Returns the Part of a matrix under its name in the checkpoint, which ends in `suffix`."""
    return part.over(f"{part.name}.{suffix}", part.shape)


PLAIN = Plain()
