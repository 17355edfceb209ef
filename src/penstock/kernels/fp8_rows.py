"""Fp8Rows: rows of numbers in eight bits with a scale each, which products with float8 weights take beside plain rows.

Contract of whatever writes them: x is what the plain operation would give, rounded to the model's dtype; scale = the
row's largest magnitude / 448; numbers = x / scale in e4m3 (4 bits of exponent, 3 of mantissa; arXiv:2209.05433).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MOST = 448.0
LEAST_SCALE = 1e-12  # of a row of zeros, whose numbers are zeros


@dataclass(slots=True, frozen=True)
class Fp8Rows:
    """T rows of K numbers; a row is worth scale * numbers."""

    numbers: Tensor  # [T, K] e4m3
    scale: Tensor  # [T, 1] float32


Rows = Tensor | Fp8Rows


def wide(rows: Rows) -> Tensor:
    """Returns rows that were not asked for in eight bits."""
    assert isinstance(rows, Tensor), "rows in eight bits, where wide ones were asked for"
    return rows
