"""Fp8Rows: rows of activations in e4m3 with one scale per row. They are the input of products with
float8 weights.

Every function that writes them follows this definition. x is the result of the plain operation,
rounded to the model's dtype. Then scale = the row's largest magnitude / 448, and numbers = x * (1 /
scale) in e4m3 (4 bits of exponent, 3 of mantissa; arXiv:2209.05433).

Rows may be stored as pairs: a second e4m3 holds 16 times the rounding error of the first. Both
together have 8 significant bits, as bfloat16 does. Products of few rows use pairs: their time is
that of reading the weight, so they would gain nothing from less precise rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.fixed_row import FixedRow

E4M3 = torch.float8_e4m3fn
E4M3_MOST = 448.0
FP8_GROUP = 128  # inputs of a weight that share a scale, if a row has several scales
LEAST_GPU = (8, 9)  # compute capability of the first GPUs with e4m3
LEAST_SCALE = 1e-12  # scale of an all-zero row
LOW_BY = 16.0

# How the input rows of a product are represented. wide: a Tensor of the model's dtype; eight:
# Fp8Rows; pair: Fp8Rows with `low`; fixed: a FixedRow (one row only).
Form = Literal["wide", "eight", "pair", "fixed"]


@dataclass(slots=True, frozen=True)
class Fp8Rows:
    """T rows of K numbers, which equal scale * (numbers + low / 16); without `low`, scale *
    numbers."""

    numbers: Tensor  # [T, K] e4m3
    scale: Tensor  # [T, 1] float32
    low: Tensor | None = None  # [T, K] e4m3, in pairs only


Rows = Tensor | Fp8Rows | FixedRow


class TakesWideRows:
    """Base class of prepared matrices whose products take rows in the model's dtype, and which the
    fused one-row operations (OneRowOps) don't support."""

    __slots__ = ()
    streamed = None

    def form(self, rows: int) -> Form:
        """Returns the representation in which the product needs its input, if it has `rows`
        rows."""
        return "wide"


def spread(scale: Tensor, width: int) -> Tensor:
    """Repeats the scales of groups of 128 numbers, [rows, ceil(width / 128)], to one for each
    number, [rows, width]."""
    return scale.repeat_interleave(FP8_GROUP, 1)[:, :width]


def wide(rows: Rows) -> Tensor:
    """Returns `rows` if it is a Tensor. Raises AssertionError for quantized rows."""
    assert isinstance(rows, Tensor), "rows of another form, where wide ones were asked for"
    return rows
