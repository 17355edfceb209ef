"""The runner on a stream: the CPU's tokens, late or at once; the reference sampler draws the same
from equal logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from execute_drive import Ask, Host, tiny_runner
from sampler_oracle import asked

from penstock.execute.kv_cache import KvCache
from penstock.kernels.layer_kv import KvForm
from penstock.kernels.reference.sampling.sample import sample

pytestmark = pytest.mark.gpu

ASKS = [
    Ask(),
    Ask(temperature=0.8, seed=11, logprobs=3),
    Ask(temperature=1.5, seed=-3, top_p=0.7),
    Ask(temperature=1.0, seed=2, top_k=9, repetition=1.3, frequency=0.3),
    Ask(temperature=0.7, seed=5, presence=1.0, bias={9: 4.0, 30: -5.0}, min_tokens=3),
]


def _tokens(device: str, ahead: int) -> np.ndarray:
    runner = tiny_runner(device=device)
    host = Host(runner)
    rows = [host.row(i, list(range(8, 20 + 3 * i)), 40, ask) for i, ask in enumerate(ASKS)]
    tokens = host.run(rows, 24, ahead)
    runner.close()
    return tokens


def test_tokens_are_the_cpus_late_or_at_once() -> None:
    on_cpu = _tokens("cpu", 0)
    for ahead in (0, 3):
        assert (_tokens("cuda", ahead) == on_cpu).all()


def test_the_reference_draws_the_same_tokens() -> None:
    logits = torch.randn(512, 3000, generator=torch.Generator().manual_seed(0)) * 3
    for filters in ({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}):
        inputs = asked(512, temperature=0.8, **filters)
        here = sample(logits, inputs)
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "sample", "position"):
            setattr(inputs, name, getattr(inputs, name).cuda())
        there = sample(logits.cuda(), inputs).cpu()
        assert (here != there).sum() <= 1  # a near-tie: logarithms differ in their last bit


def test_a_plain_draw_asks_nothing_of_the_device() -> None:
    logits, inputs = torch.randn(64, 3000, device="cuda"), asked(64)
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "sample", "position"):
        setattr(inputs, name, getattr(inputs, name).cuda())
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample(logits, inputs)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert tokens.shape == (64,)


def test_blocks_of_a_large_pool_are_cleared_and_no_others() -> None:
    """70,000 blocks of 64 KiB: 4.6 GB a layer, past what 32 bits count."""
    blocks = 70_000
    layer = SimpleNamespace(form=KvForm(8, 128, torch.bfloat16, torch.bfloat16), source=None)
    cache = KvCache([[layer]], blocks, torch.device("cuda"))
    storage = cache._pages[0]
    storage.fill_(1)
    gone = torch.tensor([0, 35_000, blocks - 1], device="cuda")
    cache.clear(gone)
    assert not storage[gone].any()
    kept = torch.ones(blocks, dtype=torch.bool, device="cuda").index_fill_(0, gone, False)
    assert bool(
        (storage.view(blocks, -1).sum(1, dtype=torch.int64)[kept] == storage[0].numel()).all()
    )
