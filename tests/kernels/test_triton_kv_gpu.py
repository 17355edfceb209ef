"""KV in eight bits by the Triton column on a GPU: every kind of step, head shape and dtype."""

from __future__ import annotations

import pytest
import torch
from attention_cases import SMALL

pytestmark = pytest.mark.gpu

GPU = "cuda"


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("name", SMALL)
def test_attention(name, dtype, eight):
    import triton_kernel_cases_kv as cases

    cases.check_attention(GPU, dtype, name, eight)


@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (4, 1), (14, 2), (16, 1)])
def test_shapes(width, heads, kv_heads, eight):
    import triton_kernel_cases_kv as cases

    shape = {"heads": heads, "kv_heads": kv_heads, "width": width}
    cases.check_attention(GPU, torch.bfloat16, "groups and chunks", eight, **shape)


@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 80), (32, 8, 128), (3, 3, 256)], ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 700])
def test_store(shape, tokens, dtype, eight):
    import triton_kernel_cases_kv as cases

    cases.check_store(GPU, dtype, tokens, shape, eight)


@pytest.mark.parametrize("shape", [(4, 2, 64), (14, 2, 64), (32, 8, 128), (7, 1, 80)], ids=str)
def test_one_row(shape, eight):
    import triton_kernel_cases_kv as cases

    cases.check_one_row(GPU, torch.bfloat16, shape, eight)
    cases.check_one_row(GPU, torch.bfloat16, shape, 0)


def test_copies(eight):
    import triton_kernel_cases_kv as cases

    assert torch.equal(*cases.copied(GPU, eight))


@pytest.mark.parametrize("eight", [0, 1, 2])
@pytest.mark.parametrize("width", [64, 256, 512])
def test_gemma4_store(eight, width):
    import triton_kernel_cases_kv as cases

    cases.check_gemma4_store(GPU, torch.bfloat16, eight, width)


@pytest.mark.parametrize("eight", [0, 1, 2])
@pytest.mark.parametrize("name", ["rows alone", "one row, split", "groups and chunks", "window 20"])
def test_blocks_apart(name, eight):
    import triton_kernel_cases_kv as cases

    cases.check_apart(GPU, torch.bfloat16, cases.column_of("triton"), eight, name)
    cases.check_one_row_apart(GPU, torch.bfloat16, (16, 2, 512), eight)
