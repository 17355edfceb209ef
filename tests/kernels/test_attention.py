"""Attention against the fp64 contract: decode rows, prefix groups, windows, chunks, scattered
tables, any shape."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from attention_cases import SMALL, of_columns, sinks_of
from kernels_naive import Case, assert_close, attend, make_case

from penstock.kernels.choose import choose
from penstock.kernels.reference.attention import decode

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def attended(
    case: Case, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    ops = choose(torch.device("cpu"), case.q.dtype, "auto")
    return attend(ops, case.q, case.kv, case.inputs, case.scale, window, sinks)


def some(case: Case, count: int, seed: int = 0) -> list[int]:
    tokens = range(len(case.positions))
    return sorted(random.Random(seed).sample(tokens, min(count, len(tokens))))


@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (4, 1), (7, 1), (8, 1)])
def test_decode_and_chunks_over_shapes(dtype, width, heads, kv_heads):
    case = make_case(
        [1, 16, 33, 40, 70, 48, 90, 17],
        groups=[(2, 0), (3, 32)],
        chunks=[(0, 5), (16, 3), (21, 19)],
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        dtype=dtype,
    )
    assert_close(attended(case), case.naive())


@pytest.mark.parametrize("rows", [1, 2, 17, 64, 1024])
def test_rows_alone_of_many_lengths(dtype, rows):
    rng = random.Random(rows)
    lengths = [rng.choice([1, 15, 16, 17, 32, 33, rng.randint(1, 600)]) for _ in range(rows)]
    case = make_case(lengths, dtype=dtype, seed=rows, extra_width=rows % 3)
    check = some(case, 24)
    assert_close(attended(case)[check], case.naive(only=check))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("lengths", [[33], [1, 16, 40, 70, 17], [600, 590, 5]])
def test_small_tiles_by_torchs_fused_attention(lengths, window, monkeypatch):
    """Where products move a row's bits anyway; sinks and groups go the other way."""
    fused, tiles = decode._attend_fused, []
    monkeypatch.setattr(decode, "moves_rows", lambda dtype: True)
    monkeypatch.setattr(
        decode, "_attend_fused", lambda tile, *more: tiles.append(tile) or fused(tile, *more)
    )
    case = make_case(lengths, heads=6, kv_heads=3, dtype=torch.bfloat16)
    assert_close(attended(case, window), case.naive(window))
    assert sum(len(tile.rows) for tile in tiles) == len(lengths)
    sinks = sinks_of(case)
    assert_close(attended(case, window, sinks), case.naive(window, sinks=sinks))
    assert sum(len(tile.rows) for tile in tiles) == len(lengths)


def test_every_length_to_600(dtype):
    case = make_case(list(range(1, 601)), heads=2, kv_heads=1, width=32, dtype=dtype)
    check = [*range(0, 600, 37), 14, 15, 16, 31, 32, 191, 192, 207, 383, 384, 598, 599]
    assert_close(attended(case)[check], case.naive(only=check))


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_all_sizes_beside_rows_alone(dtype, seed):
    rng = random.Random(seed)
    groups = [
        (rng.choice([1, 2, 3, 40, 64, 300]), 16 * rng.choice([1, 2, 5, 20]))
        for _ in range(rng.randint(1, 9))
    ]
    lengths = [
        prefix + rng.choice([1, 2, 16, 17, rng.randint(1, 90)])
        for members, prefix in groups
        for _ in range(members)
    ]
    lengths += [rng.randint(1, 200) for _ in range(rng.choice([0, 1, 30]))]
    chunks = [(rng.randint(0, 40), rng.randint(1, 30)) for _ in range(rng.randint(0, 2))]
    case = make_case(lengths, groups, chunks, dtype=dtype, seed=seed)
    check = some(case, 40, seed)
    assert_close(attended(case)[check], case.naive(only=check))


def test_loud_scores_and_a_group_whose_prefix_or_own_tokens_win(dtype):
    case = make_case([64] * 40, groups=[(40, 48)], dtype=dtype, loud=8.0)
    got = attended(case)
    assert_close(got, case.naive(), factor=2.0)
    for row in (3, 7):
        table, query = case.tables[row], case.q[row, :2].float().mean(0)
        block = int(table[0 if row == 3 else 3])
        case.kv[block, 0, 0, 5] = (40 * query / query.norm()).to(dtype)
    check = [3, 7, 11]
    assert_close(attended(case)[check], case.naive(only=check), factor=2.0)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 64, 1000])
def test_sliding_window(dtype, window):
    case = make_case(
        [1, 5, 16, 17, 40, 70, 200],
        chunks=[(0, 40), (3, 1), (31, 50)],
        heads=4,
        kv_heads=2,
        dtype=dtype,
    )
    assert_close(attended(case, window), case.naive(window))


def test_the_window_is_the_one_of_transformers():
    from transformers import MistralConfig
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = MistralConfig(
        sliding_window=7, hidden_size=8, num_attention_heads=1, num_hidden_layers=1
    )
    config._attn_implementation = "eager"
    embeds = torch.zeros(1, 30, 8)
    mask = create_sliding_window_causal_mask(
        config, embeds, attention_mask=None, past_key_values=None
    )
    seen = mask[0, 0] == 0
    case = make_case([], chunks=[(0, 30)], heads=1, kv_heads=1, width=32)
    case.q.zero_()  # equal weights for all that is seen
    values = torch.stack([case.kv[int(case.tables[0][p // 16]), 0, 1, p % 16] for p in range(30)])
    want = seen.double() / seen.double().sum(-1, keepdim=True) @ values.double()
    assert_close(attended(case, 7)[:, 0], want)


def test_a_chunk_in_pieces_is_the_chunk_whole(dtype):
    whole = make_case([], chunks=[(0, 100)], dtype=dtype, seed=3)
    want = attended(whole)
    table = whole.inputs.prefill.block_table
    for cuts in ([0, 37, 100], [0, 16, 17, 64, 100]):
        for begin, end in pairwise(cuts):
            piece = make_case([], chunks=[(begin, end - begin)], dtype=dtype)
            piece.inputs.prefill.block_table = table
            ops = choose(torch.device("cpu"), dtype, "auto")
            got = attend(ops, whole.q[begin:end], whole.kv, piece.inputs, whole.scale, None)
            assert_close(got, want[begin:end].double())


@pytest.mark.parametrize("name", SMALL)
def test_rows_are_found_in_the_devices_columns(name, dtype):
    told, window = SMALL[name]
    if told["lengths"]:
        case = make_case(**told, dtype=dtype)
        assert torch.equal(attended(of_columns(case), window), attended(case, window))


@pytest.mark.parametrize("name", SMALL)
def test_sinks_take_their_share_of_the_softmax(name, dtype):
    told, window = SMALL[name]
    case = make_case(**told, dtype=dtype)
    sinks = sinks_of(case)
    assert_close(attended(case, window, sinks), case.naive(window, sinks=sinks))


def test_strided_queries_and_two_layers_of_one_step(dtype):
    case = make_case([20, 40, 33, 34], groups=[(2, 16)], chunks=[(4, 9)], dtype=dtype)
    wide = torch.randn(13, 8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide[:, :4] = case.q
    first = attended(case)
    case.q = wide[:, :4]
    assert not case.q.is_contiguous()
    assert torch.equal(attended(case), first)
    case.kv = case.kv.flip(-1).contiguous()
    assert_close(attended(case), case.naive())


def test_empty_parts(dtype):
    assert attended(make_case([], dtype=dtype)).shape == (0, 4, 64)
    case = make_case([17], groups=[(0, 32), (1, 16), (0, 0)], chunks=[(3, 0), (0, 2)], dtype=dtype)
    assert_close(attended(case), case.naive())


def test_groups_with_a_window_are_refused():
    case = make_case([40, 41], groups=[(2, 32)])
    with pytest.raises(ValueError, match="window"):
        attended(case, window=8)
