"""Early starts: a kernel may begin before the one ahead of it in the stream has ended (programmatic
dependent launch).

Between the launches of a small step the device drains and fills again, about half a microsecond
each time. A kernel launched with `launch_pdl=True` starts as soon as every program of the one ahead
has called `release` or ended. What it does before `wait` must touch constants alone; after `wait`
all that came before it is complete. EARLY is 0: neither; 1: it starts early, and releases the next
when its programs end; 2: it releases the next at once, most once they have waited. Measured on the
products and elementwise kernels of a 1B model at one row: 0 everywhere 0.878 ms, 1 everywhere
0.859, 2 for products 0.849, 2 everywhere 1.024: waiting programs take the place of working ones,
and a release costs each program 40 ns of its multiprocessor (a head of 128,256 programs 0.158 ms
instead of 0.121). So 2 is for kernels of few programs that many wait behind; which they are was
measured one by one (`one_row.py`).

Of many small programs the last alone need release the next, the others end before: `release_late`
(an 8B in float8, one request: never 371 tok/s, the last 528 programs 375, 2,112 386). Not of few
large ones where such follow, which would stand unevenly, wherever there is room first (four bits:
437 tok/s, with it 388, where small kernels follow alone 477; 128 rows of float8: 20.9 thousand,
20.5).

The law that keeps this safe: a kernel that is launched early calls `wait` in every program, before
it reads or writes anything that a step changes. Then "the one ahead is complete" is true of
everything further ahead, too. What earlier steps wrote may be read before `wait` by a kernel behind
one that releases nobody before it has waited itself (`one_row_attention.py`): all that is further
ahead is complete then. Source: CUDA programming guide, programmatic dependent launch; Hopper and
later.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LATE: tl.constexpr = tl.constexpr(2112)  # programs: what a large chip runs at once


@triton.jit
def release(EARLY: tl.constexpr):
    """From here on the next kernel may start its programs where there is room."""
    if EARLY > 1:
        gdc_launch_dependents()


@triton.jit
def release_late(EARLY: tl.constexpr):
    """Behind `wait`: the next kernel may start once the last programs are here. The others end
    before it can."""
    if EARLY > 0:
        last = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        here = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(
            0
        ) + tl.program_id(0)
        if here + LATE >= last:
            gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Everything before this kernel is complete and visible from here on."""
    if EARLY:
        gdc_wait()


@triton.jit
def fetch(places):
    """Asks for the lines that pointers [R] are in, from memory into the second-level cache:
    constants alone."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(
        asm, "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def has_pdl(device: torch.device) -> int:
    """EARLY of kernels on a device: 1 where they may start early, 0 where that doesn't exist."""
    return int(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


FEW = 132  # programs that all run at once on a large chip


def early_of(device: torch.device, programs: int) -> int:
    """EARLY of a small kernel, which may let the next in at once where its own programs are few
    enough to be running: an 8B's step in eight bits of 1, 16, 128 rows 2.802, 3.370, 4.387 ->
    2.752, 3.315, 4.335 ms."""
    return has_pdl(device) * (2 if programs <= FEW else 1)
