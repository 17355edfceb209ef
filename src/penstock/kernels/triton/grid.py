"""Functions for launch sizes, and limits of GPUs.

Triton's own `cdiv` and `next_power_of_2` can also be called from kernels, which makes them slow on
the host: 4.6 us a call, and a step of 16 layers without graphs makes 280 calls. Knows numbers and a
device's kind."""

from __future__ import annotations

from functools import cache

import torch

# compute capability -> the most bytes of shared memory of a program; it is 101,376 on desktop and
# graphics GPUs (8.6, 8.9, 12.0). Source: CUDA programming guide, technical specifications.
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
LEAST_SHARED = 101_376


@cache
def shared_of(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may have on a device."""
    if device.type != "cuda":
        return max(SHARED.values())
    major, minor = torch.cuda.get_device_capability(device)
    return SHARED.get(10 * major + minor, LEAST_SHARED)


@cache
def processors_of(device: torch.device) -> int:
    """Returns the number of a device's multiprocessors; without a GPU, that of an H200."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132
    )


def cdiv(whole: int, piece: int) -> int:
    """Returns how many pieces are needed to cover `whole`; the last piece may be shorter."""
    return -(-whole // piece)


def next_power_of_2(least: int) -> int:
    """Returns the smallest power of two that is at least `least`; 1 for 0."""
    return 1 << max(0, least - 1).bit_length()


def precision_of(dtype: torch.dtype, width: int) -> str:
    """Returns the precision of attention's products for a dtype and head width. float32 products
    are exact ("ieee"). For widths where those take minutes to compile (166 s at 512), they are made
    of three tensor core products, with errors of 2^-21."""
    if dtype != torch.float32:
        return "tf32"
    return "ieee" if width <= 256 else "tf32x3"
