"""Integers and float8 in blocks on a GPU, by the operations that are chosen there: the CPU's
numbers."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.choose import choose
from penstock.kernels.int_matrix import pack_four

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_integers_are_worth_on_a_gpu_what_they_are_on_a_cpu(
    bits: int, zeros: bool, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(bits)
    unsigned = torch.randint(0, 2**bits, (96, 256), generator=rng, dtype=torch.int16)
    scale = (torch.rand(96, 4, generator=rng) * 0.01 + 0.001).to(dtype)
    middle = 2 ** (bits - 1)
    zero = (
        torch.randint(0, 2**bits, (96, 4), generator=rng) if zeros else torch.full((96, 4), middle)
    )
    worth = (
        (unsigned.view(96, 4, -1) - zero[..., None]).double() * scale.double()[..., None]
    ).view(96, 256)
    numbers = pack_four(unsigned.to(torch.uint8)) if bits == 4 else (unsigned - 128).to(torch.int8)
    kept = (zero - (128 if bits == 8 else 0)).to(dtype).to(CUDA) if zeros else None
    ops = choose(CUDA, dtype)
    prepared = ops.prepare_linear_int(numbers.to(CUDA), scale.to(CUDA), kept, dtype)
    x = torch.randn(5, 256, generator=rng).to(dtype)
    found, right = ops.linear_int(x.to(CUDA), prepared, None).cpu().double(), x.double() @ worth.T
    assert (found - right).abs().max() < (
        0.02 if dtype == torch.bfloat16 else 1e-5
    ) * right.abs().max()


def test_blocks_are_worth_on_a_gpu_what_they_are_on_a_cpu() -> None:
    rng = torch.Generator().manual_seed(1)
    numbers = (torch.randn(200, 300, generator=rng) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(200, 3, generator=rng) * 1e-3 + 1e-4
    x = torch.randn(5, 300, generator=rng).bfloat16()
    found = {}
    for device in (torch.device("cpu"), CUDA):
        ops = choose(device, torch.bfloat16)
        prepared = ops.prepare_linear_fp8_groups(
            numbers.to(device), scale.to(device), torch.bfloat16
        )
        found[device.type] = ops.linear_fp8_groups(x.to(device), prepared, None).float().cpu()
    assert (found["cuda"] - found["cpu"]).abs().max() < 0.01 * found["cpu"].abs().max()
