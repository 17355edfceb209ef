"""Triton's kernels on a machine without a GPU: import this before anything of penstock.kernels.triton.

The interpreter of Triton 3.6 turns a loop's bound into an int by a way that numpy 2.4 refuses (an array of one element
is no scalar any more); this asks for the item. It rounds float32 to e4m3 without carrying into the exponent (125
becomes 64); torch does it here. A process interprets kernels or compiles them: where there is a GPU, what imports this
is skipped, for the GPU's own tests.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("kernels are compiled where there is a GPU", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

interpreter = pytest.importorskip("triton.runtime.interpreter")  # Triton comes with CUDA builds of PyTorch

_plain = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _plain(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor


_convert_plainly = interpreter._convert_float


def _convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    if (source.name, target.name) != ("fp32", "fp8e4nv"):
        return _convert_plainly(values, source, target, rounding)
    return torch.from_numpy(np.array(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = _convert_float
