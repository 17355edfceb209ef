"""CUDA's handles of memory that another process may open: 64 raw bytes, by the driver's own calls.

It knows pointers; no tensors' names. A handle is of a whole allocation, in which torch lays many
tensors.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError

HANDLE_BYTES = 64
_LAZY_PEERS = 1  # memory of another GPU is reached through the link between both


class _Handle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * HANDLE_BYTES),)


class _Stretch:
    """What torch takes a pointer from."""

    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def handle_of(pointer: int) -> tuple[bytes, int, int]:
    """Returns the handle of the allocation that a pointer lies in, the bytes before it there, and
    how many it has."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call(
        "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)
    )
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.raw), pointer - base.value, size.value


def open_handle(raw: bytes, count: int) -> Tensor:
    """Returns the first bytes of another process's allocation as they are; to be closed. Raises
    CheckpointError."""
    if len(raw) != HANDLE_BYTES:
        raise CheckpointError(
            f"a CUDA handle has {HANDLE_BYTES} bytes, and this has {len(raw)}", param="shared"
        )
    torch.cuda.current_stream()  # the driver's calls want a context
    pointer = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(pointer),
        _Handle.from_buffer_copy(raw),
        ctypes.c_uint(_LAZY_PEERS),
    )
    made: Tensor = torch.as_tensor(_Stretch(pointer.value, count))
    return made


def close_handle(memory: Tensor) -> None:
    """Lets go of it, once all that reads it is done."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(memory.data_ptr()))


def _call(name: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    code = getattr(driver, name)(*arguments)
    if code:
        told = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(told))
        why = told.value.decode() if told.value else f"error {code}"
        raise CheckpointError(
            f"CUDA's {name} says {why}: the process that shares weights must live on, be another"
            " one than the engine, and keep PYTORCH_CUDA_ALLOC_CONF without expandable_segments",
            param="shared",
        )
