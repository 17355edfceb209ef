"""token_logprobs against torch's own log_softmax in float64, ranks and order counted by hand."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.reference.sampling.logprobs import token_logprobs

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("vocabulary", [5, 300, 2048, 50_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_ranks_and_order(vocabulary: int, dtype: torch.dtype) -> None:
    m, k = 11, 20
    g = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(m, vocabulary, generator=g) * 4).to(dtype)
    tokens = torch.randint(vocabulary, (m,), generator=g, dtype=torch.int32)
    tokens[0] = logits[0].argmax()
    chosen, rank, ids, top = token_logprobs(logits, tokens, k)
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(
        chosen.double(), exact.gather(1, tokens.long()[:, None])[:, 0], atol=2e-5, rtol=0
    )
    # equal logits come by id: a stable sort of the falling values is the same order
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    found = min(k, vocabulary)
    assert torch.equal(ids[:, :found].long(), order)
    torch.testing.assert_close(top[:, :found].double(), exact.gather(1, order), atol=2e-5, rtol=0)
    assert (ids[:, found:] == -1).all() and (top[:, found:] == -torch.inf).all()
    values = logits.gather(1, tokens.long()[:, None])
    assert torch.equal(rank.long(), 1 + (logits > values).sum(-1))
    assert rank[0] == 1


def test_equal_logits_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    for token, rank in ((0, 3), (1, 1), (2, 1), (3, 4)):
        assert token_logprobs(logits, torch.tensor([token]), 0)[1].tolist() == [rank]


def test_zeros_of_both_signs_and_barred_ids_are_ordered() -> None:
    logits = torch.tensor([[-0.0, 0.0, -torch.inf, -1.0, 1.0, -2.0]])
    _, _, ids, top = token_logprobs(logits, torch.tensor([0]), 6)
    assert ids.tolist() == [[4, 0, 1, 3, 5, 2]]
    assert top[0, -1] == -torch.inf


def test_alone_is_as_together() -> None:
    logits = torch.randn(40, 151_936, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.arange(40) * 3
    together = token_logprobs(logits, tokens, 5)
    for row in (0, 17, 39):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], 5)
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_rows[row])


def test_k_of_zero_and_no_rows() -> None:
    chosen, _rank, ids, top = token_logprobs(torch.zeros(3, 10), torch.tensor([1, 2, -2]), 0)
    assert chosen.shape == (3,) and ids.shape == top.shape == (3, 0)
    assert [x.shape[0] for x in token_logprobs(torch.zeros(0, 10), torch.zeros(0), 4)] == [
        0,
        0,
        0,
        0,
    ]
