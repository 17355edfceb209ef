"""Columns in Arrow's form, made of their bytes: `pyarrow.array` imports pandas first where there is one, for seconds.

It knows arrays and texts; not what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def arrow_numbers(values: npt.NDArray[Any], known: npt.NDArray[np.bool_] | None = None) -> Any:
    """Returns [n] booleans, int32, float32 or float64; those that aren't known are null."""
    import pyarrow as pa

    kinds = {"i4": pa.int32(), "f8": pa.float64(), "f4": pa.float32(), "b1": pa.bool_()}
    data = _bits(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    valid = None if known is None else _bits(known)
    return pa.Array.from_buffers(kinds[values.dtype.str[1:]], len(values), [valid, data])


def arrow_texts(values: Sequence[str | None] | npt.NDArray[np.object_]) -> Any:
    """Returns [n] texts; None is null."""
    import pyarrow as pa

    data = [b"" if value is None else value.encode() for value in values]
    known = np.array([value is not None for value in values], bool)
    buffers = [None if known.all() else _bits(known), pa.py_buffer(_ends(data)), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(pa.string(), len(data), buffers)


def arrow_lists(parts: Sequence[npt.NDArray[np.float32]] | npt.NDArray[np.object_]) -> Any:
    """Returns [n] lists of float32."""
    import pyarrow as pa

    values = np.concatenate([np.zeros(0, np.float32), *parts])
    return pa.ListArray.from_arrays(arrow_numbers(_ends(parts)), arrow_numbers(values))


def _ends(parts: Any) -> npt.NDArray[np.int32]:
    """Returns [n + 1]: where each part ends, with the beginning of the first."""
    return np.cumsum([0, *map(len, parts)], dtype=np.int32)


def _bits(values: npt.NDArray[np.bool_]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(values, bitorder="little"))
