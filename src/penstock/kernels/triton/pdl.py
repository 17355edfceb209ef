"""Early starts: a kernel may begin before the previous one in the stream has ended (programmatic
dependent launch).

Between the launches of a small step the device drains and fills again, about half a microsecond
each time. A kernel launched with `launch_pdl=True` starts as soon as every program of the previous
one has called `release` or ended. Before `wait` it may touch constants only; after `wait` all
earlier work is complete.

EARLY is 0: neither; 1: the kernel starts early, and releases the next when its programs end; 2: it
releases the next at once, in most kernels after its own wait. Measured on the products and
elementwise kernels of a 1B model at one row: 0 everywhere 0.878 ms, 1 everywhere 0.859, 2 for
products 0.849, 2 everywhere 1.024: waiting programs take the place of working ones, and a release
costs each program 40 ns of its multiprocessor (a head of 128,256 programs 0.158 ms instead of
0.121). So 2 is for kernels of few programs followed by many waiting ones; they were found by
measuring one by one (`one_row.py`).

With many small programs only the last ones need to release the next kernel, since the others end
before: `release_late` (an 8B in float8, one request: never 371 tok/s, the last 528 programs 375,
2,112 386). It is not for few large programs followed by similar ones, which would be placed
unevenly (four bits: 437 tok/s, with it 388, before small kernels alone 477; 128 rows of float8:
20.9 thousand, 20.5).

The rule that keeps this safe: a kernel launched early calls `wait` in every program, before it
reads or writes anything that a step changes. Then all earlier kernels are complete, not only the
previous one. Data of earlier steps may be read before `wait` if the previous kernel releases only
after its own wait (`one_row_attention.py`): everything before it is complete then. Source: CUDA
programming guide, programmatic dependent launch; Hopper and later."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LATE: tl.constexpr = tl.constexpr(2112)  # programs that a large chip runs at once


@triton.jit
def release(EARLY: tl.constexpr):
    """Lets the next kernel start its programs from here on, if there is room."""
    if EARLY > 1:
        gdc_launch_dependents()


@triton.jit
def release_late(EARLY: tl.constexpr):
    """Lets the next kernel start once the last programs run; the others end before that. Call it
    after `wait`."""
    if EARLY > 0:
        last = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        here = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(
            0
        ) + tl.program_id(0)
        if here + LATE >= last:
            gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Waits until everything before this kernel is complete and visible."""
    if EARLY:
        gdc_wait()


@triton.jit
def fetch(places):
    """Prefetches the cache lines of pointers [R] from memory into the L2 cache;
    for constants only."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(
        asm, "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def has_pdl(device: torch.device) -> int:
    """Returns EARLY for kernels on a device: 1 if they may start early, 0 if that
    isn't supported."""
    return int(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


FEW = 132  # programs that all run at once on a large chip


def early_of(device: torch.device, programs: int) -> int:
    """Returns EARLY for a small kernel: 2 if all its programs run at once, so that it may release
    the next immediately. An 8B's step in eight bits with 1, 16, 128 rows: 2.802, 3.370, 4.387 ->
    2.752, 3.315, 4.335 ms."""
    return has_pdl(device) * (2 if programs <= FEW else 1)
