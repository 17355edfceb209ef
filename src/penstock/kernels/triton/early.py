"""Early starts: a kernel may begin before the one ahead of it in the stream has ended (programmatic dependent launch).

Between the launches of a small step the device drains and fills again, one to two microseconds each time. A kernel
launched with `launch_pdl=EARLY` starts as soon as every program of the one ahead has called `release` (or ended). What
it does before `wait` must touch constants alone, such as weights; after `wait` all that came before it is complete.

The law that keeps this safe: a kernel that is launched early calls `wait` in every program, before it reads or writes
anything that a step changes. Then "the one ahead is complete" is true of everything further ahead, too.
Source: CUDA programming guide, programmatic dependent launch; Hopper and later.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def release(EARLY: tl.constexpr):
    """From here on the next kernel may start its programs where there is room."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Everything before this kernel is complete and visible from here on."""
    if EARLY:
        gdc_wait()


@triton.jit
def fetch(address, size, EARLY: tl.constexpr):
    """Asks for `size` bytes (a multiple of 16) from each address of a block, into the L2. Constants alone."""
    if EARLY:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [address.to(tl.int64), size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@cache
def can_start_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
