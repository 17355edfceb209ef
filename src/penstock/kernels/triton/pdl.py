"""Early starts of kernels (programmatic dependent launch). A kernel may begin before the previous
one in the stream has ended.

Without this, the GPU is idle for about half a microsecond between two launches. A kernel launched
with `launch_pdl=True` starts as soon as every program of the previous one has called `release` or
ended. Before `wait` it may read constants only; after `wait` all earlier work is complete.

Values of EARLY: 0: the kernel neither starts early nor releases the next one; 1: it starts early,
and releases the next one when its programs end; 2: it also releases the next one at once, in most
kernels after its own `wait`.

Times of the products and elementwise kernels of a 1B model at one row: 0.878 ms with 0 everywhere,
0.859 with 1 everywhere, 0.849 with 2 for products, 1.024 with 2 everywhere. With 2 everywhere,
waiting programs take the place of working ones, and a release costs each program 40 ns of its
multiprocessor: a head of 128,256 programs takes 0.158 ms instead of 0.121. So 2 is used for kernels
with few programs that are followed by kernels with many; these were found by measurement, one by
one (`one_row.py`).

With many small programs only the last ones have to release the next kernel, since the others end
earlier anyway. `release_late` does that. For one request to an 8B model in float8 it gives 386
tok/s if the last 2,112 programs release, and 375 if the last 528 do; without it there are 371
tok/s. It is not used for few large programs that are followed by similar ones, which would be
placed unevenly on the GPU: in four bits it gives 388 tok/s instead of 437, but 477 if only kernels
before small ones use it. With 128 rows in float8 it gives 20.5 instead of 20.9 thousand tok/s.

Rule for correctness: a kernel that starts early calls `wait` in every program, before the program
reads or writes anything that a step changes. After `wait`, all earlier kernels are complete, not
only the previous one. Data of earlier steps may be read before `wait` if the previous kernel
releases only after its own wait (`one_row_attention.py`): everything before it is complete then.
Source: CUDA programming guide, programmatic dependent launch; Hopper and later."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LATE: tl.constexpr = tl.constexpr(2112)  # programs of small kernels that a large GPU runs at once


@triton.jit
def release(EARLY: tl.constexpr):
    """Allows the next kernel to start, once all programs have called this or ended."""
    if EARLY > 1:
        gdc_launch_dependents()


@triton.jit
def release_late(EARLY: tl.constexpr):
    """Allows the next kernel to start once this kernel's last programs run: only they call
    `release`, as the other programs end earlier. Call it after `wait`."""
    if EARLY > 0:
        last = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        here = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(
            0
        ) + tl.program_id(0)
        if here + LATE >= last:
            gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Waits until all earlier kernels are complete and their writes visible."""
    if EARLY:
        gdc_wait()


@triton.jit
def fetch(places):
    """Prefetches the cache lines of pointers [R] from memory into the L2 cache, which sees later
    writes too. Nothing is read."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(
        asm, "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def has_pdl(device: torch.device) -> int:
    """Returns EARLY for kernels on a device: 1 if they may start early, 0 if that
    isn't supported."""
    return int(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


FEW = 132  # programs that certainly run at once on a large GPU, one per multiprocessor


def early_of(device: torch.device, programs: int) -> int:
    """Returns EARLY for a small kernel: 2 if all its programs run at once, so that it may release
    the next kernel immediately. With this, a step of an 8B model in eight bits with 1, 16 and 128
    rows takes 2.752, 3.315 and 4.335 ms instead of 2.802, 3.370 and 4.387."""
    return has_pdl(device) * (2 if programs <= FEW else 1)
