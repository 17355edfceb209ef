"""CUDA IPC handles of device memory for another process. A handle is 64 raw bytes; calls of the
CUDA driver make and open it.

A handle stands for a whole allocation, which may hold many of torch's tensors. Knows pointers; no
tensor names."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError

HANDLE_BYTES = 64
_LAZY_PEERS = 1  # driver flag: enables peer access when another GPU's memory is opened


class _Handle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * HANDLE_BYTES),)


class _Stretch:
    """Device memory at a pointer, with the CUDA array interface that torch.as_tensor reads."""

    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def handle_of(pointer: int) -> tuple[bytes, int, int]:
    """Returns the handle of a pointer's allocation, the pointer's offset in it in bytes, and its
    size in bytes."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call(
        "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)
    )
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.raw), pointer - base.value, size.value


def open_handle(raw: bytes, count: int) -> Tensor:
    """Opens another process's allocation; returns its first `count` bytes as uint8. raw: the
    handle. Close it by `close_handle`. Raises CheckpointError if the driver can't open it."""
    if len(raw) != HANDLE_BYTES:
        raise CheckpointError(
            f"a CUDA handle has {HANDLE_BYTES} bytes, and this has {len(raw)}", param="shared"
        )
    torch.cuda.current_stream()  # the driver's calls need a CUDA context
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
    """Closes memory from `open_handle`. Call it when no kernel reads the memory any more."""
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
