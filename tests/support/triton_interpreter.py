"""Triton's kernels on a machine without a GPU: import this before anything of
penstock.kernels.triton.

The interpreter of Triton 3.6 looks through all of its language at each call of a function, to patch
what is patched since the launch, lists all dtypes to find one, and makes each tensor's shape anew:
without that it takes half of the time. It turns a loop's bound into an int by a way that numpy 2.4
refuses (an array of one element is no scalar any more); this asks for the item. It rounds float32
to e4m3 without carrying into the exponent (125 becomes 64); torch does it here. A process
interprets kernels or compiles them: where there is a GPU, what imports this is skipped, for the
GPU's own tests.
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

# Triton comes with CUDA builds of PyTorch
interpreter = pytest.importorskip("triton.runtime.interpreter")

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


_language, _patch_all = interpreter.tl, interpreter._patch_lang
_patched: set[int] = set()  # modules of the language that the launch under way has patched


def _patch_lang(fn: Any) -> Any:
    """A launch's restores what it patched; that of a function that it calls patches what is still
    to be, for good."""
    uses = {
        id(each) for each in fn.__globals__.values() if each is _language or each is _language.core
    }
    if uses <= _patched:
        return interpreter._LangPatchScope()
    first, scope = not _patched, _patch_all(fn)
    _patched.update(uses)
    if first:
        restore = scope.restore

        def restore_all() -> None:
            _patched.clear()
            restore()

        scope.restore = restore_all
    return scope


interpreter._patch_lang = _patch_lang


_find_dtype = interpreter._get_np_dtype
_dtypes: dict[str, np.dtype[Any]] = {}  # by the name of a scalar or of a pointer


def _get_np_dtype(kind: Any) -> Any:
    scalar = kind.scalar
    if (found := _dtypes.get(scalar.name)) is None:
        found = _dtypes[scalar.name] = _find_dtype(scalar)
    return found


interpreter._get_np_dtype = _get_np_dtype


_init_plainly = _language.core.tensor.__init__
# a tensor's -> its numel and shape, as the language has them
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _init(tensor: Any, handle: Any, kind: Any) -> None:
    shape = tuple(kind.shape.values) if kind.is_block() else ()
    if shape in _shapes:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = _shapes[shape]
    else:
        _init_plainly(tensor, handle, kind)
        _shapes[shape] = tensor.numel, tensor.shape


_language.core.tensor.__init__ = _init
