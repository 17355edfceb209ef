"""Triton's kernels on a machine without a GPU: import this before anything of penstock.kernels.triton.

The interpreter of Triton 3.6 turns a loop's bound into an int by a way that numpy 2.4 refuses (an array of one element
is no scalar any more); this asks for the item. A process interprets kernels or compiles them: where there is a GPU,
what imports this is skipped, for the GPU's own tests.
"""

from __future__ import annotations

import os
from typing import Any

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
