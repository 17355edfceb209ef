"""PlanBytes: a StepPlan to bytes and back, which is how it reaches a rank in another process. Never pickle.

    the head's length, 4 bytes | head: msgpack, the plan's fields by name | arrays, raw, each at a multiple of 16 bytes

An array stands in the head as its dtype, its shape and where it begins. What is read back is held to the dataclasses
of `step`: whatever fields are added there cross without a word here. It knows those, and no processes.
"""

from __future__ import annotations

import math
import struct
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineError
from penstock.schedule.step import JOIN_RECORD, StepPlan

_LENGTH = struct.Struct("<I")
_ALIGN = 16
_RECORD = "join"  # the dtype, in the head, of JOIN_RECORD
Array = NDArray[Any]


class PlanBytes:
    """Writes and reads plans, one at a time."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put)
        self._decoder = msgspec.msgpack.Decoder(StepPlan, dec_hook=self._get)
        self._arrays: list[Array] = []
        self._end = 0
        self._body = memoryview(b"")

    def encode(self, plan: StepPlan) -> bytearray:
        """Returns a plan's bytes."""
        self._arrays, self._end = [], 0
        head = self._encoder.encode(plan)
        first = _aligned(_LENGTH.size + len(head))
        data = bytearray(first + self._end)
        data[: _LENGTH.size] = _LENGTH.pack(len(head))
        data[_LENGTH.size : _LENGTH.size + len(head)] = head
        for array in self._arrays:
            data[first : first + array.nbytes] = array.reshape(-1).view(np.uint8).data
            first = _aligned(first + array.nbytes)
        return data

    def decode(self, data: bytearray) -> StepPlan:
        """Returns the plan, whose arrays lie in `data`. EngineError for bytes that are no plan."""
        try:
            (length,) = _LENGTH.unpack_from(data)
            whole = memoryview(data)
            self._body = whole[_aligned(_LENGTH.size + length) :]
            return self._decoder.decode(whole[_LENGTH.size : _LENGTH.size + length])
        except (msgspec.MsgspecError, struct.error, ValueError, TypeError, OverflowError) as error:
            raise EngineError(f"a plan could not be read ({error}): ranks must be of one installation") from error

    def _put(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"{type(value).__name__} doesn't stand in a plan")
        self._arrays.append(np.ascontiguousarray(value))
        begin, self._end = self._end, _aligned(self._end + value.nbytes)
        return _name(value.dtype), value.shape, begin

    def _get(self, hint: Any, value: Any) -> Array:
        """hint: what `step` says of the field, `np.ndarray[shape, np.dtype[kind]]`."""
        ((kind,), (name, shape, begin)) = get_args(get_args(hint)[1]), value
        dtype = JOIN_RECORD if kind is np.void else np.dtype(kind)
        if name != _name(dtype):
            raise ValueError(f"an array of {name} stands where {_name(dtype)} belongs")
        if min(begin, *shape) < 0:
            raise ValueError("an array's size or place is below 0")
        return np.frombuffer(self._body, dtype, math.prod(shape), begin).reshape(shape)


def _name(dtype: np.dtype[Any]) -> str:
    return _RECORD if dtype == JOIN_RECORD else dtype.str


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
