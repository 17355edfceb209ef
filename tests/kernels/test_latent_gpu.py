"""Attention over latent vectors on a GPU, at DeepSeek's sizes: against fp64, groups, rows that are split, chunks."""

from __future__ import annotations

import pytest
import torch
from attention_cases import drawn, of_columns, on, some
from latent_cases import of_latents, right

from penstock.kernels.triton.attention import plan
from penstock.kernels.triton.latent import latent_attention

pytestmark = [pytest.mark.torch, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MOST_OFF = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize("seed", range(4))
def test_what_heads_see(seed: int, heads: int, dtype: torch.dtype) -> None:
    case, kv, kind = of_latents(drawn(seed, heads=heads, kv_heads=1, width=16), 512, 64, dtype=dtype)
    tokens = some(case, 60)
    wanted = right(case, kv, kind.scale, tokens)
    moved = on(of_columns(case), "cuda")
    kv.latent = kv.latent.cuda()
    cos_sin = torch.zeros(2048, 2, 32, device="cuda")
    out = latent_attention(moved.q, kv, moved.inputs, kind, plan(moved.inputs, kind, cos_sin, dtype))
    off = (out[tokens].cpu().double() - wanted).abs()
    assert off.max() < MOST_OFF[dtype] * 4 and off.mean() < MOST_OFF[dtype]
