"""Counter noise: even, independent along every word of the counter, and the same bits as plain
Python integers give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest

from penstock.kernels.reference.sampling.noise import (
    LANES,
    TILES,
    bits,
    gumbel,
    keys,
    row_keys,
    uniform,
)

pytestmark = pytest.mark.torch

FAR_OUT = 1e-4
WORD = 0xFFFFFFFF


def test_bits_are_those_of_the_formula() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & WORD
        x ^= x >> 15
        x = x * 0x846CA68B & WORD
        return x ^ x >> 16

    def key(start: int, words: list[int]) -> int:
        for word in words:
            start = mix(((start ^ word) + 0x9E3779B9) & WORD)
        return start

    for seed, sample, position, attempt, stream in (
        (0, 0, 0, 0, 0),
        (-1, 65_535, 131_071, 8, 1),
        (2**62 + 5, 3, 7, 2, 0),
    ):
        words = [seed & WORD, seed >> 32 & WORD, sample, position * 32 + attempt * 2 + stream]
        first, second = key(0x243F6A88, words), key(0x85A308D3, words)
        expected = [mix(mix((first + lane * 0x9E3779B9) & WORD) ^ second) for lane in range(200)]
        rows = row_keys(torch.tensor([seed]), torch.tensor([sample], dtype=torch.int32))
        found = bits(keys(rows, torch.tensor([position], dtype=torch.int32), attempt, stream), 200)
        assert (found[0].to(torch.int64) & WORD).tolist() == expected


def _uniform(
    seed: torch.Tensor,
    sample: torch.Tensor,
    position: torch.Tensor,
    lanes: int,
    stream: int = TILES,
) -> np.ndarray:
    rows = row_keys(seed, sample.to(torch.int32))
    return (
        uniform(keys(rows, position.to(torch.int32), 0, stream), lanes).numpy().astype(np.float64)
    )


def _counters(axis: str, n: int) -> np.ndarray:
    """n x 16 numbers whose neighbours along the first axis differ in one word of the counter."""
    zero, count = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    words = {"seed": zero, "high seed": zero, "sample": zero, "position": zero, axis: count}
    return _uniform(
        words["seed"] + (words["high seed"] << 32), words["sample"], words["position"], 16
    )


@pytest.mark.parametrize("axis", ["seed", "high seed", "sample", "position"])
def test_noise_is_even_and_neighbours_are_independent(axis: str) -> None:
    u = _counters(axis, 40_000)
    assert u.min() > 0 and u.max() < 1
    assert kstest(u.ravel(), "uniform").pvalue > FAR_OUT
    for column in range(16):
        assert kstest(u[:, column], "uniform").pvalue > FAR_OUT
    for one, other in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[2:], u[:-2]), (u[16:], u[:-16])):
        assert _pairs_p(one.ravel(), other.ravel()) > FAR_OUT


def _pairs_p(x: np.ndarray, y: np.ndarray, cells: int = 16) -> float:
    """Chi-square of the pairs over a grid."""
    counts = np.histogram2d(x, y, bins=cells, range=((0, 1), (0, 1)))[0]
    mean = x.size / cells**2
    return float(chi2.sf(((counts - mean) ** 2).sum() / mean, cells**2 - 1))


def test_streams_and_attempts_are_independent() -> None:
    rows = row_keys(torch.arange(5000), torch.zeros(5000, dtype=torch.int32))
    where = torch.full((5000,), 9, dtype=torch.int32)
    first = uniform(keys(rows, where, 0, TILES), 16).numpy().ravel()
    for attempt, stream in ((0, LANES), (1, TILES), (8, LANES)):
        other = uniform(keys(rows, where, attempt, stream), 16).numpy().ravel()
        assert _pairs_p(first, other) > FAR_OUT


def test_many_lanes_are_even_bit_by_bit() -> None:
    rows = row_keys(torch.tensor([7]), torch.tensor([1], dtype=torch.int32))
    words = (
        bits(keys(rows, torch.tensor([0], dtype=torch.int32), 0, TILES), 1 << 20)
        .numpy()
        .view(np.uint32)[0]
    )
    for bit in range(32):
        ones = int((words >> np.uint32(bit) & np.uint32(1)).sum())
        assert abs(ones - (1 << 19)) < 5 * 512  # five standard deviations


def test_no_two_of_many_keys_are_equal() -> None:
    samples = torch.arange(1 << 16, dtype=torch.int32)
    rows = row_keys(torch.full((1 << 16,), 42), samples)
    both = torch.cat(
        [keys(rows, torch.full_like(samples, p), 0, TILES) for p in range(16)], dim=1
    ).to(torch.int64)
    joined = (both[0] << 32) | (both[1] & WORD)
    assert joined.unique().numel() == 1 << 20


def test_gumbel_is_finite_at_both_ends() -> None:
    ends = torch.tensor([0, 0x7FFFFF], dtype=torch.float32).add_(0.5).mul_(2.0**-23)
    assert ends[0] > 0 and ends[1] < 1
    g = -(-ends.log()).log()
    assert torch.isfinite(g).all() and -3 < g[0] < -2 and 16 < g[1] < 17
    rows = row_keys(torch.arange(1000), torch.zeros(1000, dtype=torch.int32))
    drawn = gumbel(keys(rows, torch.zeros(1000, dtype=torch.int32), 0, LANES), 128).double()
    assert abs(drawn.mean() - 0.5772) < 0.02 and abs(drawn.var() - 1.6449) < 0.05
