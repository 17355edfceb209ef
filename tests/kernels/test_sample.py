"""The draw itself: by frequency against float64, greedy, rows that don't see each other, and rows
not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_oracle import asked, chi_square_p, probabilities, some_rows

from penstock.kernels.inputs import SamplerInputs
from penstock.kernels.reference.sampling.sample import sample
from penstock.kernels.reference.sampling.tile_draw import BAD_LOGITS

pytestmark = pytest.mark.torch

FAR_OUT = 1e-4
DRAWS = 30_000


def _logits(vocabulary: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(
    ("vocabulary", "temperature"),
    [(1, 1.0), (7, 0.6), (128, 3.0), (300, 0.6), (300, 1.0), (300, 3.0), (512, 1.0)],
)
def test_frequencies_are_the_softmax(vocabulary: int, temperature: float) -> None:
    logits = _logits(vocabulary, 2.0)
    tokens = sample(
        logits.expand(DRAWS, -1), asked(DRAWS, temperature=temperature, seed=vocabulary)
    )
    expected = probabilities(logits.numpy(), temperature=temperature)
    assert chi_square_p(tokens.numpy(), expected) > FAR_OUT


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_frequencies_hold_along_seeds_and_positions(axis: str) -> None:
    logits = _logits(300, 1.5)
    inputs = asked(DRAWS)
    inputs.sample.zero_()
    getattr(inputs, axis).copy_(torch.arange(DRAWS))
    assert (
        chi_square_p(
            sample(logits.expand(DRAWS, -1), inputs).numpy(), probabilities(logits.numpy())
        )
        > FAR_OUT
    )


def test_tokens_of_neighbouring_samples_are_independent() -> None:
    logits = _logits(8, 1.0)
    tokens = sample(logits.expand(DRAWS, -1), asked(DRAWS)).numpy().astype(np.int64)
    p = probabilities(logits.numpy())
    assert chi_square_p(tokens[:-1] * 8 + tokens[1:], np.outer(p, p).ravel()) > FAR_OUT


FILTERS = [
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_k": 5},
    {"top_k": 40},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.02, "top_p": 0.8},
    {"min_p": 0.05, "top_k": 10},
    {"min_p": 0.03, "top_k": 12, "top_p": 0.6},
    {"top_k": 1, "top_p": 0.5},
    {"top_k": 10_000, "top_p": 0.95},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("vocabulary", "spread"), [(300, 2.0), (256, 0.3)])
def test_filters_by_frequency(filters: dict[str, float], vocabulary: int, spread: float) -> None:
    """The flat distribution (spread 0.3) misses all eight attempts with a narrow filter, and is
    drawn by sorting."""
    logits = _logits(vocabulary, spread, seed=3)
    n = DRAWS // 2
    tokens = sample(logits.expand(n, -1), asked(n, temperature=0.8, seed=5, **filters))
    assert (
        chi_square_p(tokens.numpy(), probabilities(logits.numpy(), temperature=0.8, **filters))
        > FAR_OUT
    )


def test_filters_cut_between_equal_logits_by_the_lower_id() -> None:
    logits = torch.zeros(200)
    logits[[150, 20, 170]] = 1.0
    for k, allowed in ((1, {20}), (2, {20, 150}), (3, {20, 150, 170}), (5, {20, 150, 170, 0, 1})):
        assert set(sample(logits.expand(4000, -1), asked(4000, top_k=k)).tolist()) == allowed
    # mass above 170 is 2e of 3e + 197
    share = 2 * np.e / (3 * np.e + 197)
    assert set(sample(logits.expand(4000, -1), asked(4000, top_p=share + 1e-4)).tolist()) == {
        20,
        150,
        170,
    }
    assert set(sample(logits.expand(4000, -1), asked(4000, top_p=share - 1e-4)).tolist()) == {
        20,
        150,
    }


def test_barred_tokens_are_never_drawn() -> None:
    logits = _logits(300, 1.0)
    logits[50:] = -torch.inf
    tokens = sample(logits.expand(DRAWS, -1), asked(DRAWS, temperature=2.0))
    assert chi_square_p(tokens.numpy(), probabilities(logits.numpy(), temperature=2.0)) > FAR_OUT
    assert (sample(logits.expand(1000, -1), asked(1000, top_p=0.99)) < 50).all()


def test_greedy_takes_the_lowest_of_equals_and_needs_no_noise() -> None:
    logits = torch.zeros(4, 300)
    logits[0, [130, 290]] = 5.0
    logits[1, 299] = 1e30
    logits[2, [3, 4]] = -torch.inf
    logits[3] = -3e38
    greedy = asked(4, temperature=0.0)
    assert sample(logits, greedy).tolist() == [130, 299, 0, 0]
    greedy.any_random = True  # beside rows that draw, it is the same
    assert sample(logits, greedy).tolist() == [130, 299, 0, 0]
    assert sample(logits.bfloat16(), greedy).tolist() == [130, 299, 0, 0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-7, 1e-4])
def test_very_low_temperatures_are_greedy_but_for_equals(temperature: float) -> None:
    logits = torch.tensor([3e38, -3e38, 3e38, 1.0]).expand(2000, -1)
    assert set(sample(logits, asked(2000, temperature=temperature)).tolist()) == {0, 2}
    assert set(sample(logits, asked(2000, temperature=temperature, top_p=0.9)).tolist()) == {0, 2}


def _mixed(n: int, seed: int = 1) -> SamplerInputs:
    """Rows that ask for all kinds of things."""
    g = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (n,), generator=g)]

    inputs = asked(n)
    inputs.temperature = pick([0.0, 0.3, 0.7, 1.0, 2.0])
    inputs.top_p = pick([1.0, 1.0, 0.9, 0.5])
    inputs.top_k = pick([0, 0, 1, 8, 300]).to(torch.int32)
    inputs.min_p = pick([0.0, 0.0, 0.05])
    inputs.seed = torch.randint(-(2**62), 2**62, (n,), generator=g)
    inputs.any_filter = True
    return inputs


@pytest.mark.parametrize("vocabulary", [300, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_see_each_other(vocabulary: int, dtype: torch.dtype) -> None:
    n = 700
    logits = (torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    inputs = _mixed(n)
    together = sample(logits, inputs)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sample(logits[order], some_rows(inputs, order)), together[order])
    for part in torch.arange(n).split(97):
        assert torch.equal(sample(logits[part], some_rows(inputs, part)), together[part])
    for row in range(0, n, 9):
        one = torch.tensor([row])
        assert sample(logits[one], some_rows(inputs, one)).item() == together[row]


def test_a_wide_vocabulary_in_pieces_is_the_same_alone() -> None:
    """More logits than the pieces hold; sums are longer than torch's threshold for adding on
    several threads."""
    n, vocabulary = 40, 151_936
    logits = (torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(4)) * 2).bfloat16()
    inputs = _mixed(n, seed=6)
    together = sample(logits, inputs)
    for row in range(0, n, 7):
        one = torch.tensor([row])
        assert sample(logits[one], some_rows(inputs, one)).item() == together[row]


def test_rows_that_are_not_finite_are_told_and_leave_others_alone() -> None:
    n = 64
    logits = torch.randn(n, 300, generator=torch.Generator().manual_seed(5))
    inputs = _mixed(n)
    clean = sample(logits, inputs)
    logits[3, 299] = torch.nan
    logits[10, 0] = torch.inf
    logits[20] = -torch.inf
    logits[33] = torch.nan
    bad = sample(logits, inputs)
    expected = clean.clone()
    expected[[3, 10, 20, 33]] = BAD_LOGITS
    assert torch.equal(bad, expected)


def test_no_rows_are_no_tokens() -> None:
    assert sample(torch.zeros(0, 300), asked(0)).shape == (0,)
