"""The Triton column's sampler on a GPU: the reference's tokens but for near-ties, which are
counted; frequencies over five million draws; nothing asked of the device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sampler_oracle import asked, chi_square_p, probabilities

pytestmark = pytest.mark.gpu

GPU = "cuda"
FAR_OUT = 1e-4
NEAR_TIES = 0.002  # of the rows; measured: see docs/kernels.md
FILTERS = [
    {},
    {"top_p": 0.95},
    {"top_p": 0.1},
    {"top_k": 5},
    {"top_k": 2000},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.02, "top_p": 0.8},
    {"min_p": 0.03, "top_k": 12, "top_p": 0.6},
]


@pytest.fixture
def cases():
    import triton_kernel_cases

    return triton_kernel_cases


@pytest.mark.parametrize("vocabulary", [1, 7, 128, 300, 5000, 32003, 128256, 151936])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_of_all_kinds_of_rows(cases, vocabulary, kind):
    n = 96 if vocabulary > 9000 else 1500
    for by in (0.05, 3.0):
        logits = cases.drawn(n, vocabulary, seed=2, by=by, dtype=kind)
        differ = cases.check_sample(GPU, logits, cases.mixed(n), near=max(NEAR_TIES, 1.1 / n))
        print(f"vocabulary {vocabulary}, spread {by}: {differ} of {n} rows differ")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_the_ends_of_what_may_be_asked(cases, kind):
    for vocabulary, by in ((300, 1.0), (128256, 1.0), (128256, 1e9)):
        cases.check_sample(
            GPU,
            cases.drawn(72, vocabulary, seed=2, by=by, dtype=kind),
            cases.extremes(),
            near=2 / 72,
        )
    cases.check_adjust(GPU, kind, 48, 128256, 200, ends=True)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_under_each_filter(cases, filters):
    for by in (0.3, 2.0):
        logits = cases.drawn(400, 20000, seed=3, by=by, dtype=torch.bfloat16)
        inputs = asked(400, temperature=0.8, seed=7, first_sample=50, position=11, **filters)
        differ = cases.check_sample(GPU, logits, inputs, near=NEAR_TIES * 2)
        print(f"{filters}, spread {by}: {differ} of 400 rows differ")


def test_noise_is_the_references(cases):
    cases.check_noise(GPU, 128 * 20000)


def test_bad_logits(cases):
    logits = cases.drawn(64, 3000, seed=5)
    logits[1, 2999], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 130:] = -torch.inf
    logits[5, :] = torch.nan
    logits[6, :] = torch.inf
    for kind in (torch.float32, torch.bfloat16):
        cases.check_sample(GPU, logits.to(kind), cases.mixed(64))
        cases.check_sample(GPU, logits.to(kind), asked(64, temperature=0.0))
    logits = torch.tensor([3e38, -3e38, 3e38, 1.0]).expand(500, -1).contiguous()
    for temperature in (1e-30, 1e-7, 1e-4):
        cases.check_sample(GPU, logits, asked(500, temperature=temperature, top_p=0.9))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies(cases, filters):
    """Five million draws without filters, one with; rows share one line of logits."""
    from penstock.kernels.triton.sampling.sample import sample

    vocabulary, rounds, n = 300, 5 if not filters else 1, 1_000_000
    line = cases.drawn(vocabulary, seed=3, by=1.5)
    seen = []
    for i in range(rounds):
        inputs = cases.on_device(asked(n, temperature=0.8, seed=i, **filters), GPU)
        seen.append(sample(line.to(GPU).expand(n, -1), inputs).cpu())
    p = chi_square_p(
        torch.cat(seen).numpy(), probabilities(line.numpy(), temperature=0.8, **filters)
    )
    print(f"{filters}: {rounds * n} draws, p = {p:.4f}")
    assert p > FAR_OUT


def test_rows_do_not_see_each_other(cases):
    from penstock.kernels.triton.sampling.sample import sample

    logits = cases.drawn(300, 32000, seed=8, by=2.0, dtype=torch.bfloat16).to(GPU)
    inputs = cases.mixed(300)
    together = sample(logits, cases.on_device(inputs, GPU))
    for part in (slice(0, 1), slice(40, 41), slice(17, 90), slice(100, 300)):
        some = cases.some_rows(inputs, torch.arange(300)[part])
        assert torch.equal(sample(logits[part], cases.on_device(some, GPU)), together[part])


def test_nothing_is_asked_of_the_device(cases):
    from penstock.kernels.triton.sampling.sample import sample

    logits, inputs = cases.drawn(64, 3000).to(GPU), cases.on_device(cases.mixed(64), GPU)
    sample(logits, inputs)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = sample(logits, inputs)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph.replay()
    assert torch.equal(tokens, sample(logits, inputs))
