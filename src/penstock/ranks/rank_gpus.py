"""Which GPUs ranks get, and why they can't: named before a weight is read. It knows facts of GPUs;
no model."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from penstock.errors import CapacityError, UsageError


def check_gpus(names: Sequence[str], ranks: int, visible: str | None) -> None:
    """Raises UsageError, one line with the way out, where the first `ranks` GPUs can't hold a model
    together. names: of those that this process sees.   visible: CUDA_VISIBLE_DEVICES, None: it
    isn't set."""
    seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if len(names) < ranks:
        hidden = "" if visible is None else ", or let it see more"
        raise UsageError(
            f"tensor_parallel_size ({ranks}) is above the {len(names)} GPUs that this process"
            f" sees{seen}: lower it{hidden}",
            param="tensor_parallel_size",
        )
    kinds = sorted(set(names[:ranks]))
    if len(kinds) > 1:
        raise UsageError(
            f"the first {ranks} GPUs are not alike ({' and '.join(kinds)}){seen}, and ranks go as"
            " fast as the slowest: name equal ones in CUDA_VISIBLE_DEVICES",
            param="tensor_parallel_size",
        )


def check_free(number: int, free: int, total: int, share: float) -> None:
    """Raises CapacityError where somebody else has taken of GPU `number` what is ours to take.
    free, total: bytes. share: of all of it that is ours."""
    if free < share * total:
        raise CapacityError(
            f"GPU {number} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, and"
            f" gpu_memory_utilization asks for {share:.0%}: end what else runs there, hide it by"
            " CUDA_VISIBLE_DEVICES, or lower gpu_memory_utilization",
            param="gpu_memory_utilization",
        )


def check_visible_gpus(ranks: int) -> None:
    """Holds the GPUs that are there to it, without a context on any."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    check_gpus(names, ranks, os.environ.get("CUDA_VISIBLE_DEVICES"))


def check_own_gpu(device: torch.device, share: float) -> None:
    """Each rank, of its own, before it takes any of it."""
    if device.type == "cuda":
        check_free(device.index, *torch.cuda.mem_get_info(device), share)
