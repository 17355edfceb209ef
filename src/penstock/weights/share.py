"""share_weights: lets another process's engine read a trainer's tensors.

  with share_weights(model.state_dict()) as shared:
      httpx.post(url + "/update_weights", json={"shared": to_json(shared), "weights_version":
      "step-7"})

GPU tensors are shared by CUDA IPC handle; others are copied into a file of /dev/shm, which is
deleted at the end of the `with`."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.shared_weights import SharedStretch, SharedTensor, SharedWeights
from penstock.weights.cuda_handles import handle_of
from penstock.weights.shared import SHM
from penstock.weights.stream import TORCH_DTYPES

_ALIGNED = 64
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@contextmanager
def share_weights(tensors: Mapping[str, Tensor]) -> Iterator[SharedWeights]:
    """Context manager that shares tensors, given by their checkpoint names; yields a description of
    them for an engine. The tensors must not change inside the `with`. Raises CapacityError if
    /dev/shm has no room."""
    memories: list[SharedStretch] = []
    told: list[SharedTensor] = []
    with ExitStack() as held:
        here = {name: each.detach() for name, each in tensors.items() if each.device.type != "cuda"}
        if here:
            told += _copied(here, memories, held)
        known: dict[bytes, int] = {}
        for name, tensor in tensors.items():
            if tensor.device.type == "cuda":
                whole = tensor.detach().contiguous()
                held.callback(lambda _: None, whole)  # keeps the tensor alive while it is shared
                told.append(_lying(name, whole, memories, known))
        yield SharedWeights(tuple(memories), tuple(told))


def to_json(shared: SharedWeights) -> Any:
    """Returns the `shared` field of POST /update_weights."""
    return msgspec.json.decode(msgspec.json.encode(shared))


def _copied(
    tensors: dict[str, Tensor], memories: list[SharedStretch], held: ExitStack
) -> list[SharedTensor]:
    starts, end = {}, 0
    for name, tensor in tensors.items():
        starts[name] = end
        end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    file = SHM / f"penstock-{uuid.uuid4().hex}"
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    held.callback(file.unlink)
    try:
        # reserves the memory: else writing to a full /dev/shm kills the process by SIGBUS
        os.posix_fallocate(descriptor, 0, max(end, 1))
        with mmap.mmap(descriptor, max(end, 1)) as lies:
            for name, tensor in tensors.items():
                raw = tensor.contiguous().reshape(-1).view(torch.uint8)
                lies[starts[name] : starts[name] + tensor.nbytes] = raw.numpy().data
    except OSError as error:
        raise CapacityError(
            f"/dev/shm has no room for {end} bytes of weights ({error.strerror})"
        ) from error
    finally:
        os.close(descriptor)
    memories.append(SharedStretch("shm", max(end, 1), name=file.name))
    return [
        SharedTensor(name, _NAMES[t.dtype], tuple(t.shape), starts[name])
        for name, t in tensors.items()
    ]


def _lying(
    name: str, tensor: Tensor, memories: list[SharedStretch], known: dict[bytes, int]
) -> SharedTensor:
    torch.cuda.synchronize(tensor.device)  # waits for the kernels that write the tensor
    handle, offset, count = handle_of(tensor.data_ptr())
    if handle not in known:
        known[handle] = len(memories)
        memories.append(SharedStretch("cuda", count, handle=handle))
    return SharedTensor(name, _NAMES[tensor.dtype], tuple(tensor.shape), offset, known[handle])
