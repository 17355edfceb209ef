"""ArrayCodec: encodes messages that hold numpy arrays. Sends them between processes without pickle,
which could run code.

An array is a msgpack extension that holds its dtype's character, its shape and its bytes. Decoding
checks the message against its declared types, except that an array keeps the sender's dtype. Knows
no processes.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineError

ARRAY = 1  # the msgpack extension code of an array
LONGEST_WHY = 200  # longest reason in an error message, characters
# Header of an array: dtype character, number of dimensions, two padding bytes, three sizes.
_HEAD = struct.Struct("<cBHiii")
Word = TypeVar("Word")


class ArrayCodec(Generic[Word]):
    """Encodes and decodes messages of one type, or of a union of tagged types.

    kind: the message type. what: name of the messages in errors. record: the only structured numpy
    dtype that arrays may have, None: none.
    """

    def __init__(self, kind: Any, what: str, record: np.dtype[np.void] | None = None) -> None:
        self._what, self._record = what, record
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._pack)
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=self._unpack, dec_hook=_array)

    def encode(self, word: Word) -> bytes:
        return self._encoder.encode(word)

    def decode(self, data: bytes | bytearray) -> Word:
        """Returns the decoded message, whose arrays own their memory. Raises EngineError for
        invalid bytes."""
        try:
            word: Word = self._decoder.decode(data)
        except Exception as error:
            # msgspec raises for the message, numpy and struct for an array, SamplingParams
            # UsageError.
            why = f"{type(error).__name__}: {error}"[:LONGEST_WHY]
            raise EngineError(f"{self._what} cannot be read ({why})") from error
        return word

    def _pack(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"{type(value).__name__} doesn't cross between processes")
        plain = value.dtype.kind in "biuf" and value.dtype.isnative
        if value.ndim > 3 or not (
            plain or (self._record is not None and value.dtype == self._record)
        ):
            raise NotImplementedError(
                f"an array of {value.dtype} and {value.ndim} dimensions doesn't cross"
            )
        head = _HEAD.pack(value.dtype.char.encode(), value.ndim, 0, *(*value.shape, 0, 0, 0)[:3])
        return msgspec.msgpack.Ext(ARRAY, head + value.tobytes())

    def _unpack(self, code: int, data: memoryview) -> NDArray[Any]:
        if code != ARRAY:
            raise ValueError(f"extension {code} is not known here")
        char, dimensions, _, *shape = _HEAD.unpack_from(data)
        dtype = np.dtype(char.decode())
        if char == b"V":
            if self._record is None:
                raise ValueError("no structured array is known here")
            dtype = self._record
        found = np.frombuffer(data, dtype, offset=_HEAD.size).reshape(shape[:dimensions])
        return found.copy()  # a copy is aligned, as torch needs


def _array(_: type, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"an array was expected, not {type(value).__name__}")
    return value
