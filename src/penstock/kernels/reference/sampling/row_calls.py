"""row_calls: makes a row's bits independent of other rows. On a CPU it tests how many rows a
product may have per call for that.

oneDNN and MKL choose a kernel, and the order of its sums, by the shape of the whole product. On
some processors a row's last bits therefore change with the number of rows: in float32 with AVX2 on
Intel, in bfloat16 with AMX. Calls with a fixed number of rows always use the same kernel. Whether
they are necessary is tested by small products, at the first use in float32 (with AMX in bfloat16
too), once for each library and number of threads. The test takes 0.05 to 0.4 s with one or two
threads of a Xeon.

  float32   a row's bits don't depend on other rows, by fixed calls if needed: this is guaranteed
  bfloat16  not guaranteed; it depends on the library. Fixed calls would make the demo and
            Qwen2.5-0.5B 15 to 20 % slower on a Xeon with AMX"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN's product with a packed weight; None in a torch without oneDNN. Looked up once: the lookup
# takes 2 us, and a step of one row has dozens of products.
_POINTWISE = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
Multiply = Callable[[Tensor], Tensor]  # rows [T, in] -> [T, out]

# numbers of rows of a fixed call; the first one with which a row's bits don't depend on other rows
# is used
FIXED = (32, 16)
ROW_MULTIPLE = (
    # float32 products are padded to at least so many rows: both libraries use other kernels for
    # fewer than about 12
    16
)
# Test cases, with which bits changed on some processor: (out, in) of weights, and numbers of
# rows, of which the last is the reference.
SHAPES = ((256, 896), (896, 2432), (96, 80))
ROWS = (1, 3, 18, 31, 63, 100, 127, 255, 300)


@dataclass(frozen=True, slots=True)
class RowCalls:
    """A way to call a product. rows: rows of each call; None: any number, since bits never changed.
    keeps: True if a row's bits don't depend on other rows."""

    rows: int | None
    keeps: bool


def multiplied(x: Tensor, calls: RowCalls, multiply: Multiply) -> Tensor:
    """Returns multiply(x) [T, out] for x [T, in], computed in calls of `calls.rows` rows, of which
    the last is padded."""
    count, rows = x.shape[0], calls.rows
    if rows is None:
        whole = _padded(x, ROW_MULTIPLE) if x.dtype == torch.float32 else x
        return multiply(x) if whole is x else multiply(whole)[:count]
    if count <= rows:
        return multiply(_padded(x, rows))[:count]
    return torch.cat([multiply(some) for some in _padded(x, rows).split(rows)])[:count]


@cache
def packed_calls(dtype: torch.dtype, threads: int) -> RowCalls:
    """Returns how to call oneDNN's products with packed weights. dtype: of rows and weight.
    threads: number of torch's threads."""
    return _tried(dtype, lambda weight: packed_product(pack(weight)), _fixed(dtype))


@cache
def plain_calls(dtype: torch.dtype, threads: int) -> RowCalls:
    """Returns how to call torch's own products with an unpacked weight: MKL's, or oneDNN's without
    packing."""
    return _tried(dtype, lambda weight: lambda x: F.linear(x, weight), _fixed(dtype))


@cache
def batches_keep(dtype: torch.dtype, threads: int) -> bool:
    """Returns True if a row's bits in torch's batched products don't change when zeros are added to
    its sum or other matrices to the batch. It is used for attention's weights times values."""
    generator = torch.Generator().manual_seed(0)
    for rows, width in ((2, 80), (7, 64)):
        weights = torch.rand(40, rows, 608, generator=generator).to(dtype)
        values = torch.randn(40, 608, width, generator=generator).to(dtype)
        for terms, padded in ((16, 48), (48, 112), (112, 208), (208, 384), (400, 608)):
            weights[..., terms:] = 0
            whole = torch.bmm(weights[..., :padded].contiguous(), values[:, :padded])
            for count in (1, 3, 40):
                some = torch.bmm(weights[:count, :, :terms].contiguous(), values[:count, :terms])
                if not torch.equal(some, whole[:count]):
                    return False
            weights = torch.rand(40, rows, 608, generator=generator).to(dtype)
    return True


def pack(weight: Tensor) -> Tensor:
    """Returns weight [out, in] in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # type: ignore[no-any-return]


def packed_product(packed: Tensor, bias: Tensor | None = None) -> Multiply:
    return lambda x: _POINTWISE(x, packed, bias, "none", [], "")


def _fixed(dtype: torch.dtype) -> tuple[int, ...]:
    return FIXED if dtype == torch.float32 else ()


def _tried(
    dtype: torch.dtype, product: Callable[[Tensor], Multiply], fixed: tuple[int, ...] = FIXED
) -> RowCalls:
    """Tests how a product has to be called. product: function from a weight [out, in] to the
    product with it. fixed: numbers of rows of a call to try."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for out, into in SHAPES:
        weight = (torch.randn(out, into, generator=generator) / into**0.5).to(dtype)
        cases.append((product(weight), torch.randn(ROWS[-1], into, generator=generator).to(dtype)))
    for calls in (RowCalls(None, True), *(RowCalls(rows, True) for rows in fixed)):
        if all(_keeps(calls, multiply, x) for multiply, x in cases):
            return calls
    return RowCalls(None, False)


def _keeps(calls: RowCalls, multiply: Multiply, x: Tensor) -> bool:
    """Returns True if rows of x have the same bits when there are fewer rows and when they are at
    other positions."""
    whole = multiplied(x, calls, multiply)
    turned = multiplied(x.flip(0), calls, multiply).flip(0)
    return torch.equal(turned, whole) and all(
        torch.equal(multiplied(x[:rows], calls, multiply), whole[:rows]) for rows in ROWS
    )


def _padded(x: Tensor, multiple: int) -> Tensor:
    short = -x.shape[0] % multiple
    return torch.constant_pad_nd(x, (0, 0, 0, short)) if short else x
