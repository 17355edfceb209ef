"""What the Triton column's float8 kernels are held to, on any device: rows in eight bits against
plain torch, products against fp64 of the very numbers that they are given. Import the kernels'
environment first; functions assert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton_kernel_cases import drawn

from penstock.kernels.fp8_rows import LOW_BY, Form, Fp8Rows, Rows
from penstock.kernels.reference.elementwise import activation as plain_activation
from penstock.kernels.reference.elementwise import norm as plain_norm
from penstock.kernels.reference.linear import fp8 as plain_fp8
from penstock.kernels.triton.elementwise import activation, norm
from penstock.kernels.triton.linear import fp8, linear_fp8, one_row
from penstock.quant.fp8 import to_fp8


def check_rows(device: str, dtype: torch.dtype, rows: int, width: int, form: Form) -> None:
    """Norms, gates and what attention leaves, in eight bits; a row of zeros and one of large
    numbers among them."""
    x, residual, weight = (
        drawn(*s, seed=i, by=2.0, dtype=dtype)
        for i, s in enumerate([(rows, width)] * 2 + [(width,)])
    )
    x[-1], residual[-1] = 0.0, 0.0
    x[0] *= 1e3
    wide = drawn(rows, width + 24, seed=5, dtype=dtype).to(device)[:, :width]  # rows that lie apart
    gate_up = drawn(rows, 2 * width, seed=6, by=4.0, dtype=dtype)
    here = [t.clone().to(device) for t in (x, residual, weight, gate_up)]
    same_rows(fp8.quantize_rows(here[0], form), x)
    same_rows(fp8.quantize_rows(wide, form), wide.cpu())
    same_rows(norm.rms_norm(here[0], here[2], 1e-5, form), plain_norm.rms_norm(x, weight, 1e-5))
    got, total = norm.add_rms_norm(here[0], here[1], here[2], 1e-5, form)
    wanted, sum_of = plain_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total.cpu(), sum_of)
    same_rows(got, wanted)
    same_rows(activation.silu_mul(here[3], form), plain_activation.silu_mul(gate_up.clone()))
    same_rows(activation.gelu_mul(here[3], form), plain_activation.gelu_mul(gate_up.clone()))


def same_rows(got: object, wanted: object) -> None:
    """What eight bits (or pairs of them) are worth, beside the plain operation's numbers: half a
    step of e4m3 away, of pairs half a step of bfloat16, and the dtype's own rounding."""
    assert isinstance(got, Fp8Rows) and isinstance(wanted, Tensor)
    scale, steps = got.scale.cpu().double(), 2.0**-4 if got.low is None else 2.0**-8
    worth = got.numbers.cpu().double() * scale
    if got.low is not None:
        worth += got.low.cpu().double() * scale / LOW_BY
    bound = (
        wanted.double().abs() * (steps + 2 * torch.finfo(wanted.dtype).eps)
        + scale * steps * 2.0**-5
    )
    assert ((worth - wanted.double()).abs() <= bound).all()
    most = wanted.double().abs().amax(1, keepdim=True) / 448
    torch.testing.assert_close(
        scale, most.clamp(min=1e-12), rtol=4 * torch.finfo(wanted.dtype).eps, atol=0
    )


def matrix_of(
    device: str, dtype: torch.dtype, n: int, k: int
) -> tuple[linear_fp8.Fp8Matrix, Tensor]:
    """A prepared matrix, a row of it all zeros and one of large numbers, and what it is worth [n,
    k] in fp64."""
    weight = drawn(n, k, seed=3, by=k**-0.5)
    weight[0] *= 300.0
    weight[-1] = 0.0
    numbers, scale = to_fp8(weight)
    prepared = linear_fp8.prepare_linear_fp8(numbers.to(device), scale[:, 0].to(device), dtype)
    return prepared, numbers.double() * scale.double()


def check_products(device: str, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    """The product of so many rows, in the form that it wants, against fp64; with and without a
    bias."""
    matrix, worth = matrix_of(device, dtype, n, k)
    x, bias = drawn(rows, k, seed=1, dtype=dtype), drawn(n, seed=2, dtype=dtype)
    form = matrix.form(rows)
    assert form == ("wide" if rows == 1 else "pair" if rows <= 16 else "eight")
    there, seen = there_and_worth(x, form, device)
    size = seen.abs() @ worth.abs().T  # of the sums before anything cancels
    for more in (None, bias):
        wanted = seen @ worth.T + (0 if more is None else more.double())
        got = linear_fp8.linear_fp8(there, matrix, None if more is None else more.to(device))
        # bits that Hopper's float8 products keep
        kept = 2.0**-10 if device != "cpu" and form != "wide" else 2.0**-20
        written = torch.bfloat16 if rows > linear_fp8.MOST_STREAMED and matrix.by_library else dtype
        bound = wanted.abs() * 2 * torch.finfo(written).eps + size * kept + 1e-6
        assert got.dtype == dtype and ((got.double().cpu() - wanted).abs() <= bound).all()


def there_and_worth(x: Tensor, form: Form, device: str) -> tuple[Rows, Tensor]:
    """x [T, K] in a form on the device, and what that is worth in fp64."""
    if form == "wide":
        return x.to(device), x.double()
    rows = plain_fp8.quantize_rows(x, form)
    low = None if rows.low is None else rows.low.to(device)
    worth = rows.numbers.double() + (0 if rows.low is None else rows.low.double() / LOW_BY)
    return Fp8Rows(rows.numbers.to(device), rows.scale.to(device), low), worth * rows.scale.double()


def check_one_row(device: str, dtype: torch.dtype, d: int, inner: int) -> None:
    """The fused gate of a layer's one row is that of the same matrix, widened, within the dtype's
    rounding."""
    matrix, worth = matrix_of(device, dtype, 2 * inner, d)
    x, residual, weight = (drawn(1, d, seed=i, dtype=dtype).to(device) for i in range(3))
    got, kept = one_row.norm_gate(x, residual.clone(), weight, 1e-5, matrix.streamed)
    normed, total = norm.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(kept, total) and isinstance(normed, Tensor)
    gate, up = (normed.double().cpu() @ worth.T).to(dtype).double().chunk(2, dim=-1)
    torch.testing.assert_close(
        got.cpu().double(),
        gate / (1 + torch.exp(-gate)) * up,
        rtol=8 * torch.finfo(dtype).eps,
        atol=2e-2,
    )


def check_same_bits(device: str, dtype: torch.dtype, n: int, k: int) -> None:
    """A row's product doesn't move with the rows beside it, nor from one call to the next, where K
    is split too."""
    matrix, _ = matrix_of(device, dtype, n, k)
    x = plain_fp8.quantize_rows(drawn(40, k, dtype=dtype))
    x = Fp8Rows(x.numbers.to(device), x.scale.to(device))
    cut = linear_fp8.Tiles(64, 64, 64, 3, 3, 4)
    sums = torch.empty(3 * 64 * 64 * -(-n // 64), dtype=torch.float32, device=device)
    matrix = replace(matrix, parts=sums)
    first = linear_fp8.streamed_fp8(x, matrix, tiles=cut)
    for _ in range(3):
        assert torch.equal(linear_fp8.streamed_fp8(x, matrix, tiles=cut), first)
    some = Fp8Rows(x.numbers[7:20].contiguous(), x.scale[7:20].contiguous())
    assert torch.equal(linear_fp8.streamed_fp8(some, matrix, tiles=cut), first[7:20])
