"""A kernel that writes beyond its tensor: scripts/sanitize.sh runs it to see that the sanitizer
sees such things."""

import torch
import triton
import triton.language as tl


@triton.jit
def _planted(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at)


x = torch.zeros(100, dtype=torch.int32, device="cuda")
_planted[(1,)](x, 1024)
torch.cuda.synchronize()
