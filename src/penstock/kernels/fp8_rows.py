"""Fp8Rows: rows of numbers in eight bits with a scale each, which products with float8 weights take
beside plain rows.

Contract of whatever writes them: x is what the plain operation would give, rounded to the model's
dtype; scale = the row's largest magnitude / 448; numbers = x * (1 / scale) in e4m3 (4 bits of
exponent, 3 of mantissa; arXiv:2209.05433). A pair keeps what that rounding took in a second e4m3,
16 times: together they hold 8 bits of mantissa, as bfloat16 does, so that a product of few rows,
where reading the weight is all the time there is, loses nothing and stays on eight bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.fixed_row import FixedRow

E4M3 = torch.float8_e4m3fn
E4M3_MOST = 448.0
FP8_GROUP = 128  # neighbours of a row of weights that share a scale, where scales go by group
LEAST_GPU = (8, 9)  # compute capability of GPUs that have e4m3
LEAST_SCALE = 1e-12  # of a row of zeros, whose numbers are zeros
LOW_BY = 16.0

# How a product wants its rows: a Tensor, Fp8Rows, those with `low`, or (one row) a FixedRow
Form = Literal["wide", "eight", "pair", "fixed"]


@dataclass(slots=True, frozen=True)
class Fp8Rows:
    """T rows of K numbers; a row is worth scale * (numbers + low / 16)."""

    numbers: Tensor  # [T, K] e4m3
    scale: Tensor  # [T, 1] float32
    low: Tensor | None = None  # [T, K] e4m3, of pairs


Rows = Tensor | Fp8Rows | FixedRow


class TakesWideRows:
    """What is true of a prepared matrix that gains nothing from eight bits: rows come in the
    model's dtype, and the fused operations of one row don't serve it."""

    __slots__ = ()
    streamed = None

    def form(self, rows: int) -> Form:
        """Returns how so many rows are wanted."""
        return "wide"


def spread(scale: Tensor, width: int) -> Tensor:
    """Returns the scale of each of a row's numbers [rows, width]. scale: of its groups [rows,
    ceil(width / 128)]."""
    return scale.repeat_interleave(FP8_GROUP, 1)[:, :width]


def wide(rows: Rows) -> Tensor:
    """Returns rows that were asked for wide."""
    assert isinstance(rows, Tensor), "rows of another form, where wide ones were asked for"
    return rows
