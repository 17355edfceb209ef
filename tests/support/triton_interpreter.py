"""Triton's kernels on a machine without a GPU: import this before anything of penstock.kernels.triton.

The interpreter of Triton 3.6 turns a loop's bound into an int by a way that numpy 2.4 refuses (an array of one element
is no scalar any more); this asks for the item.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import pytest

interpreter = pytest.importorskip("triton.runtime.interpreter")  # Triton comes with CUDA builds of PyTorch

_plain = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _plain(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor
