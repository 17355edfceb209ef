"""Fp8Rows: rows in eight bits with one scale each, which products with float8 weights take as well
as plain rows.

Contract of every writer: x is the result of the plain operation, rounded to the model's dtype;
scale = the row's largest magnitude / 448; numbers = x * (1 / scale) in e4m3 (4 bits of exponent, 3
of mantissa; arXiv:2209.05433). A pair also keeps 16 times the rounding error in a second e4m3:
together they hold 8 bits of mantissa, as bfloat16 does. So a product of few rows, whose time is
that of reading the weight, loses nothing by eight bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.fixed_row import FixedRow

E4M3 = torch.float8_e4m3fn
E4M3_MOST = 448.0
FP8_GROUP = 128  # neighbours of a weight's row that share a scale, with scales by group
LEAST_GPU = (8, 9)  # compute capability of the first GPUs with e4m3
LEAST_SCALE = 1e-12  # scale of an all-zero row
LOW_BY = 16.0

# Forms of rows for a product: a Tensor, Fp8Rows, Fp8Rows with `low`, or (one row) a FixedRow.
Form = Literal["wide", "eight", "pair", "fixed"]


@dataclass(slots=True, frozen=True)
class Fp8Rows:
    """T rows of K numbers; a row equals scale * (numbers + low / 16)."""

    numbers: Tensor  # [T, K] e4m3
    scale: Tensor  # [T, 1] float32
    low: Tensor | None = None  # [T, K] e4m3, in pairs only


Rows = Tensor | Fp8Rows | FixedRow


class TakesWideRows:
    """Base of prepared matrices that take rows in the model's dtype and don't serve the fused
    one-row operations."""

    __slots__ = ()
    streamed = None

    def form(self, rows: int) -> Form:
        """Returns the form to give `rows` rows in."""
        return "wide"


def spread(scale: Tensor, width: int) -> Tensor:
    """Returns the scale of each number of a row [rows, width]. scale: by group [rows, ceil(width /
    128)]."""
    return scale.repeat_interleave(FP8_GROUP, 1)[:, :width]


def wide(rows: Rows) -> Tensor:
    """Returns rows as a Tensor; raises AssertionError for quantized rows."""
    assert isinstance(rows, Tensor), "rows of another form, where wide ones were asked for"
    return rows
