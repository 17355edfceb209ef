"""Bias, penalties, barred ids and masks against loops over Python lists; rows that ask for nothing
stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_oracle import asked, chi_square_p, probabilities

from penstock.kernels.reference.sampling.penalties import (
    apply_bias,
    apply_masks,
    apply_penalties,
    bar_ids,
)
from penstock.kernels.reference.sampling.sample import sample

pytestmark = pytest.mark.torch

VOCABULARY = 40


def _pool(sequences: list[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens scattered over blocks, what lies past a sequence's end being another's: slot_token,
    block table."""
    blocks = torch.randperm(len(sequences) * width, generator=torch.Generator().manual_seed(0)) + 1
    table = blocks.view(-1, width).to(torch.int32)
    slot_token = torch.randint(VOCABULARY, (len(sequences) * width + 1, 16), dtype=torch.int32)
    for row, tokens in enumerate(sequences):
        for place, token in enumerate(tokens):
            slot_token[table[row, place // 16], place % 16] = token
    return slot_token, table


def _penalized(
    row: np.ndarray,
    tokens: list[int],
    prompt: int,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    for token in set(tokens):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(tokens[prompt:]):
        row[token] -= presence + frequency * tokens[prompt:].count(token)


def test_penalties_are_what_a_loop_over_the_tokens_gives() -> None:
    rng = np.random.default_rng(1)
    lengths, prompts = [1, 16, 17, 33, 60], [1, 10, 17, 2, 64]
    sequences = [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]
    slot_token, table = _pool(sequences, 4)
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    expected, before = logits.double().numpy(), logits.clone()
    where = [7, 0, 3, 4, 8]
    repetition, presence, frequency = (
        [1.2, 0.8, 1.0, 2.0, 1.5],
        [0.5, -1.0, 2.0, 0.0, 1.0],
        [0.1, 0.0, -0.5, 1.0, 1.0],
    )
    for i, row in enumerate(where):
        _penalized(
            expected[row], sequences[i], prompts[i], repetition[i], presence[i], frequency[i]
        )
    apply_penalties(
        logits,
        torch.tensor(where),
        slot_token,
        table,
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(prompts, dtype=torch.int32),
        *(torch.tensor(x) for x in (repetition, presence, frequency)),
    )
    np.testing.assert_allclose(logits.double().numpy(), expected, atol=1e-5)
    rest = [1, 2, 5, 6]
    assert torch.equal(logits[rest], before[rest])


def test_bias_and_bars() -> None:
    logits = torch.zeros(3, VOCABULARY)
    apply_bias(
        logits, torch.tensor([0, 0, 2]), torch.tensor([5, 39, 0]), torch.tensor([1.5, -100.0, 2.0])
    )
    assert (
        logits[0, 5] == 1.5
        and logits[0, 39] == -100
        and logits[2, 0] == 2
        and logits.count_nonzero() == 3
    )
    ids = torch.tensor([[0, 3, -1, 3], [-1, VOCABULARY, 7, 1 << 30], [1, 2, 3, 4]])
    bar_ids(logits, torch.tensor([0, 1, 2]), ids, torch.tensor([True, True, False]))
    assert torch.isneginf(logits).nonzero().tolist() == [[0, 0], [0, 3], [1, 7]]
    assert logits[1, 0] == 0 and logits[2, 0] == 2


def test_frequencies_with_bias_penalties_bars_and_filters() -> None:
    n = 30_000
    start = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5
    tokens = [1, 2, 3, 2, 2, 7, 9, 30, 30]
    slot_token, table = _pool([tokens], 1)
    expected = start.double().numpy().copy()
    expected[4] += 2.5
    _penalized(expected, tokens, 3, 1.3, 0.4, 0.2)
    expected[11] = -np.inf
    logits = start.repeat(n, 1)
    rows = torch.arange(n)
    apply_bias(logits, rows, torch.full((n,), 4), torch.full((n,), 2.5))
    some = [torch.full((n,), x, dtype=torch.int32) for x in (len(tokens), 3)]
    knobs = [torch.full((n,), x) for x in (1.3, 0.4, 0.2)]
    apply_penalties(logits, rows, slot_token, table.expand(n, -1), *some, *knobs)
    bar_ids(logits, rows, torch.full((n, 1), 11), torch.ones(n, dtype=torch.bool))
    for filters in ({}, {"top_p": 0.8}, {"top_k": 6, "min_p": 0.05}):
        drawn = sample(logits, asked(n, temperature=0.9, **filters))
        assert (
            chi_square_p(drawn.numpy(), probabilities(expected, temperature=0.9, **filters)) > 1e-4
        )


@pytest.mark.parametrize("vocabulary", [1, 32, 40, 5000])
def test_masks_leave_the_tokens_whose_bit_is_set(vocabulary: int) -> None:
    """Slots in any order, one twice; rows that aren't named stay as they are."""
    rng = np.random.default_rng(vocabulary)
    words = rng.integers(-(2**31), 2**31, (3, -(-vocabulary // 32)), dtype=np.int32)
    logits = torch.randn(4, vocabulary)
    before = logits.clone()
    apply_masks(logits, torch.tensor([3, 0, 1]), torch.from_numpy(words), torch.tensor([2, 0, 2]))
    for row, slot in ((3, 2), (0, 0), (1, 2)):
        for token in range(vocabulary):
            may = words[slot, token // 32] >> (token % 32) & 1
            assert logits[row, token] == (before[row, token] if may else -torch.inf)
    assert torch.equal(logits[2], before[2])
