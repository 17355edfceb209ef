"""Builds Arrow columns from numpy bytes. `pyarrow.array` would first import pandas, if installed,
which takes seconds.

Knows arrays and texts; not their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


def arrow_numbers(values: npt.NDArray[Any], known: npt.NDArray[np.bool_] | None = None) -> Any:
    """Returns an Arrow column of `values` [n]: booleans, int32, float32 or float64. known [n]:
    False where the entry is null."""
    import pyarrow as pa

    kinds = {"i4": pa.int32(), "f8": pa.float64(), "f4": pa.float32(), "b1": pa.bool_()}
    data = _bits(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    valid = None if known is None else _bits(known)
    return pa.Array.from_buffers(kinds[values.dtype.str[1:]], len(values), [valid, data])


def arrow_texts(values: Sequence[str | None] | npt.NDArray[np.object_]) -> Any:
    """Returns an Arrow column of n texts; None becomes null."""
    import pyarrow as pa

    data = [b"" if value is None else value.encode() for value in values]
    known = np.array([value is not None for value in values], bool)
    buffers = [
        None if known.all() else _bits(known),
        pa.py_buffer(_ends(data)),
        pa.py_buffer(b"".join(data)),
    ]
    return pa.Array.from_buffers(pa.string(), len(data), buffers)


def arrow_lists(parts: Sequence[npt.NDArray[np.float32]] | npt.NDArray[np.object_]) -> Any:
    """Returns an Arrow column of n lists of float32."""
    import pyarrow as pa

    values = np.concatenate([np.zeros(0, np.float32), *parts])
    return pa.ListArray.from_arrays(arrow_numbers(_ends(parts)), arrow_numbers(values))


def numbers_of(column: Any, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Converts an Arrow column of numbers or booleans to an array [n] of dtype `kind`; a null float
    becomes NaN. Raises ValueError for a column of another type, and for numbers that do not fit
    `kind`."""
    import pyarrow as pa

    there = column.type
    number = pa.types.is_integer(there) or (kind.kind == "f" and pa.types.is_floating(there))
    if not (pa.types.is_boolean(there) if kind.kind == "b" else number):
        raise ValueError(f"a column of {there} where {kind} is wanted")
    if column.null_count and kind.kind != "f":
        raise ValueError(f"{column.null_count} unknown entries in a column of {kind}")
    values = np.concatenate(
        [np.zeros(0, kind), *(chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks)]
    )
    made: npt.NDArray[Any] = values.astype(kind, copy=False)
    if kind.kind == "i" and (made != values).any():
        raise ValueError(f"numbers that {kind} doesn't hold")
    return made


def texts_of(column: Any) -> npt.NDArray[np.object_]:
    """Converts a dictionary-encoded Arrow column of texts to an array [n] of str; equal texts share
    one object. Raises ValueError for any other column."""
    import pyarrow as pa

    if (
        not (pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type))
        or column.null_count
    ):
        raise ValueError(f"a column of {column.type} where texts are wanted, each of them known")
    parts = [
        np.array(chunk.dictionary.to_pylist(), object)[chunk.indices.to_numpy(zero_copy_only=False)]
        for chunk in column.chunks
    ]
    return np.concatenate([np.zeros(0, object), *parts])


def lists_of(column: Any) -> npt.NDArray[np.object_]:
    """Converts an Arrow column of lists of floats to an array [n] of float32 arrays, which are
    views of a few larger arrays. Raises ValueError for any other column."""
    import pyarrow as pa

    if (
        not (pa.types.is_list(column.type) and pa.types.is_floating(column.type.value_type))
        or column.null_count
    ):
        raise ValueError(
            f"a column of {column.type} where lists of floats are wanted, each of them known"
        )
    made = np.empty(len(column), object)
    at = 0
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        ends = chunk.offsets.to_numpy()
        for first, last in pairwise(ends):
            made[at] = values[first:last]
            at += 1
    return made


def _ends(parts: Any) -> npt.NDArray[np.int32]:
    """Returns the offsets of concatenated parts, int32 [n + 1]: 0, then the end of each part."""
    return np.cumsum([0, *map(len, parts)], dtype=np.int32)


def _bits(values: npt.NDArray[np.bool_]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(values, bitorder="little"))
