"""What this processor promises of a row's bits: kernels/reference/sampling/row_calls.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.reference.linear.linear import PackedWeight
from penstock.kernels.reference.sampling.row_calls import packed_calls, plain_calls


def needs_same_bits(weight: PackedWeight | Tensor) -> None:
    """Skips where products with such a weight may move with the number of rows: bfloat16 on some
    processors, and float16 that is not packed. Float32 keeps its bits everywhere, and is never
    skipped."""
    if weight.dtype == torch.float32 or (
        isinstance(weight, PackedWeight) and weight.dtype == torch.float16
    ):
        return
    calls = packed_calls if isinstance(weight, PackedWeight) else plain_calls
    if not calls(weight.dtype, torch.get_num_threads()).keeps:
        pytest.skip(f"products in {weight.dtype} move with the number of rows on this processor")
