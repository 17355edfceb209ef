"""rank_gpus: checks that GPUs can run as ranks. The check comes before any weight is read. Knows
facts about GPUs; no model."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from penstock.errors import CapacityError, UsageError


def check_gpus(names: Sequence[str], ranks: int, visible: str | None) -> None:
    """Raises UsageError, one line with a remedy, if the first `ranks` GPUs can't hold a model
    together. names: names of the GPUs that this process sees. visible: CUDA_VISIBLE_DEVICES; None:
    not set."""
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
    """Raises CapacityError if other processes use memory of GPU `number` that the engine needs.
    free, total: bytes. share: the engine's fraction of total."""
    if free < share * total:
        raise CapacityError(
            f"GPU {number} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, and"
            f" gpu_memory_utilization asks for {share:.0%}: end what else runs there, hide it by"
            " CUDA_VISIBLE_DEVICES, or lower gpu_memory_utilization",
            param="gpu_memory_utilization",
        )


def check_visible_gpus(ranks: int) -> None:
    """Checks the visible GPUs with check_gpus, without creating a context on any."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    check_gpus(names, ranks, os.environ.get("CUDA_VISIBLE_DEVICES"))


def check_own_gpu(device: torch.device, share: float) -> None:
    """Checks a rank's own GPU with check_free, before the rank uses any of its memory."""
    if device.type == "cuda":
        check_free(device.index, *torch.cuda.mem_get_info(device), share)
