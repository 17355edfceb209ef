"""Triton's kernels on a machine without a GPU: import this before anything of
penstock.kernels.triton.

The interpreter of Triton 3.6 looks through all of its language and a function's globals at each
call, to patch what is patched since the launch, lists all dtypes to find one, makes each tensor's
shape and type anew, as it does to compare them, and computes integers again in 64 bits to look for
overflows, which only a debugged kernel reports: this spares most of the time. It reduces by a
function of a kernel number by number; this calls the function with halves of the axis, as a GPU
does. It turns a loop's bound into an int by a way that numpy 2.4 refuses (an array of one element
is no scalar any more); this asks for the item. It rounds float32 to e4m3 without carrying into the
exponent (125 becomes 64); torch does it here. A process interprets kernels or compiles them: where
there is a GPU, what imports this is skipped, for the GPU's own tests.
"""

from __future__ import annotations

import os
from dataclasses import replace
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
_used: dict[Any, set[int]] = {}  # by each function: modules of the language that its file names


def _patch_lang(fn: Any) -> Any:
    """A launch's restores what it patched; that of a function that it calls patches what is still
    to be, for good."""
    if (uses := _used.get(fn)) is None:
        named = fn.__globals__.values()
        uses = {id(each) for each in named if each is _language or each is _language.core}
        _used[fn] = uses
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


_looks = _language.core.builtin(lambda: None).__code__  # looks whether semantics are handed over


def _patch_attr(of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Hands the interpreter's semantics to a function of the language, without copying what else it
    is given."""
    semantic = interpreter.TritonSemantic(builder)
    inner = member.__wrapped__ if member.__code__ is _looks else member

    def handed(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    scope.set_attr(of, name, handed)


interpreter._patch_attr = _patch_attr


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


_make_block_plainly = _language.core.block_type.__init__
# a block's kind and sizes -> its shape, numel and name
_blocks: dict[tuple[Any, ...], tuple[Any, Any, str]] = {}


def _make_block(block: Any, kind: Any, shape: Any) -> None:
    key = (kind.name, *shape)
    if key in _blocks:
        block.element_ty = kind
        block.shape, block.numel, block.name = _blocks[key]
    else:
        _make_block_plainly(block, kind, shape)
        _blocks[key] = block.shape, block.numel, block.name


_language.core.block_type.__init__ = _make_block

_equal_dtypes, _equal_tuples = _language.core.dtype.__eq__, _language.core.tuple.__eq__
_broadcast_plainly = interpreter.TritonSemantic.broadcast_impl_value


def _is_dtype(mine: Any, other: Any) -> bool:
    return mine is other or _equal_dtypes(mine, other)


def _is_tuple(mine: Any, other: Any) -> Any:
    """Compares two shapes, which are of numbers alone, without making the second one anew."""
    if type(other) is _language.core.tuple:
        other = other.values
    if type(other) is list and all(type(each) is int for each in other):
        return _language.core.constexpr(mine.values == other)
    return _equal_tuples(mine, other)


def _broadcast(semantic: Any, left: Any, right: Any) -> Any:
    """Makes the shapes of two tensors alike, of which most are so already."""
    one, other = (
        tensor.type.shape.values if tensor.type.is_block() else None for tensor in (left, right)
    )
    return (left, right) if one == other else _broadcast_plainly(semantic, left, right)


_language.core.dtype.__eq__ = _is_dtype
_language.core.tuple.__eq__ = _is_tuple
interpreter.TritonSemantic.broadcast_impl_value = _broadcast

interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)


def _reduce_by_halves(reduce: Any, tensors: Any) -> list[Any]:
    """Combines the axis's first half with its second until one place is left: a block's axis has a
    power of two of them."""
    assert reduce.axis is not None and not reduce.keep_dims
    parts = [(np.moveaxis(each.handle.data, reduce.axis, 0), each.dtype) for each in tensors]
    while (half := len(parts[0][0]) // 2) > 0:
        pairs = [
            [reduce.to_tensor(data[at], kind) for data, kind in parts]
            for at in (slice(half), slice(half, None))
        ]
        made = reduce.combine_fn.fn(*pairs[0], *pairs[1])
        parts = [(each.handle.data, each.dtype) for each in made]
    return [reduce.to_tensor(data[0], kind) for data, kind in parts]


interpreter.ReduceOps.generic_reduce = _reduce_by_halves
