"""RestingWeights: a model's weights while its engine sleeps. Level 1 keeps them in host memory,
level 2 drops them.

    CUDA    1: storages are copied to the host and shrunk in place, so that arrays that share one
            still do after wake_up; arrays in host memory stay
    CPU     1: nothing to do, they are in host memory
    both    2: each array is replaced by an empty one of its shape (meta device)

Knows arrays; not KV, rows and graphs, which the runner makes anew.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from penstock.execute.reload import arrays_of, parts_within
from penstock.kernels.layer_kv import KvForm
from penstock.kernels.state_forms import LatentForm
from penstock.models.decoder import Decoder


class RestingWeights:
    """Moves a model's weights to host memory, or drops them, and brings them back. gone: True once
    they are dropped."""

    def __init__(self, model: Decoder, level: int) -> None:
        self._model, self.gone = model, False
        # rotary tables and scales of K and V stay: they are in no checkpoint, and the next weights
        # need them too
        scales = [form.scales for form in model.paged_forms if isinstance(form, KvForm)]
        scales += [form.scale for form in model.paged_forms if isinstance(form, LatentForm)]
        self._stays = [each for each in (*model.rotary_tables, *scales) if each is not None]
        self._hosts: list[tuple[torch.UntypedStorage, Tensor]] = []
        if level == 2:
            self.drop()
        elif model.device.type == "cuda":
            stays = {id(each) for each in self._stays}
            arrays = (array for _, array in arrays_of(model.parts) if array.device.type == "cuda")
            self._hosts = to_host([array for array in arrays if id(array) not in stays])

    def drop(self) -> None:
        """Frees the weights' memory without keeping a copy."""
        without_numbers(self._model.parts, {id(each): (each, each) for each in self._stays})
        self._hosts, self.gone = [], True

    def bring_back(self) -> None:
        """Restores the weights; may be called again if memory was short."""
        while self._hosts:
            storage, host = self._hosts[-1]
            if storage.nbytes() == 0:
                storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host)
            self._hosts.pop()


def to_host(arrays: list[Tensor]) -> list[tuple[torch.UntypedStorage, Tensor]]:
    """Copies the storages of arrays to the host and shrinks them to nothing, each storage once."""
    storages = {array.untyped_storage()._cdata: array.untyped_storage() for array in arrays}
    hosts = []
    for storage in storages.values():
        if storage.nbytes():
            host = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
            )
            hosts.append((storage, host.copy_(_bytes_of(storage))))
            storage.resize_(0)
    return hosts


def without_numbers(part: Any, twins: dict[int, tuple[Any, Any]]) -> Any:
    """Returns a part of a model without its weights. An array becomes one of its shape on the meta
    device, a tuple a new tuple; any other object is returned itself, with its arrays replaced."""
    if id(part) in twins:
        return twins[id(part)][1]
    if isinstance(part, Tensor):
        twin: Any = torch.empty(part.shape, dtype=part.dtype, device="meta")
    elif isinstance(part, tuple):
        twin = tuple(without_numbers(each, twins) for each in part)
    else:
        twin = part
    twins[id(part)] = part, twin  # keep `part` alive, so that its id is not reused
    for name, each in parts_within(part):
        other = without_numbers(each, twins)
        if other is each or isinstance(part, tuple):
            continue
        if isinstance(part, (list, dict)):
            part[name] = other
        else:
            # a plain assignment would fail, since many parts are frozen dataclasses
            object.__setattr__(part, name, other)
    return twin


def give_back(device: torch.device) -> None:
    """Returns memory that torch holds but doesn't use to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
