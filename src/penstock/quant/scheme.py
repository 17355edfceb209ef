"""Scheme: how a matrix is stored and multiplied. A scheme is a class that knows the checkpoint
tensors of a matrix and the operation that multiplies by it.

  plain   [out, in] in a float dtype, rounded to the model's
  fp8     e4m3 numbers with float scales: `quant/fp8.py`
  int     integers with one scale per group or row: `quant/integers.py`
  fp4     e2m1 numbers with one scale per group: `quant/fp4.py`

A Part is a checkpoint tensor with its tensor parallel split, a Weight loads Parts
(parallel/sharded_weight.py). Knows names and numbers; a layer decides which scheme its matrices
have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Form, TakesWideRows
from penstock.kernels.ops import Ops
from penstock.parallel.sharded_weight import Part, Weight

# x [T, in], prepared matrix, bias [out] or None -> [T, out]
Multiply = Callable[[Any, Any, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix prepared for products: the operation `multiply`, and its argument `matrix`."""

    multiply: Multiply
    matrix: Any  # the second argument of `multiply`
    # function: number of rows of x -> the representation in which `multiply` needs them
    # (kernels/fp8_rows.py)
    form: Callable[[int], Form] = TakesWideRows().form
    # argument of the fused one-row operations; None: they don't support this matrix
    streamed: Any = None
    # function (rows, matrix, activation) -> act(gate) * up, as Ops.linear_gated; None: there is no
    # fused operation
    gated: Callable[[Tensor, Any, str], Tensor | None] | None = None


class Scheme(Protocol):
    """The interface of schemes. `parts` are matrices [out, in], named as in the checkpoint without
    `.weight`; several parts are fused into one product."""

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        """Returns the Weights to load, by names that the scheme chooses. dtype: the model's."""

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        """Returns the product with the loaded weights, rearranged as its operation needs. The
        loaded arrays are dropped."""


@runtime_checkable
class ForExperts(Scheme, Protocol):
    """The interface of schemes that the operations of expert layers support too."""

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor | None, ...]:
        """Returns the loaded arrays: numbers, scales, zero points, and factors of a row's scales.
        The latter are None or left out if there are none. The layout is that of one expert in
        `kernels/expert_matrix.py`. The loaded arrays are dropped."""


@runtime_checkable
class Made(Scheme, Protocol):
    """The interface of schemes that quantize at load, and can also quantize a matrix that was
    loaded for another use, such as an embedding that is also the output head."""

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
    """Returns the Part of a matrix with `suffix` added to its name, which gives the checkpoint
    tensor's name."""
    return part.over(f"{part.name}.{suffix}", part.shape)


PLAIN = Plain()
