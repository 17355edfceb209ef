"""The Triton column's attention on a GPU against the fp64 contract: shapes, dtypes, groups, splits,
windows, graphs."""

from __future__ import annotations

import random

import pytest
import torch
from attention_cases import SMALL, drawn, of_columns, on, sinks_of, some, want
from kernels_naive import Case, assert_close, attend, make_case

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def attended(
    case: Case, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    from penstock.kernels.triton.attention import attention as column

    there = on(case, "cuda")
    return attend(
        column,
        there.q,
        there.kv,
        there.inputs,
        there.scale,
        window,
        None if sinks is None else sinks.cuda(),
    ).cpu()


def check(case: Case, window: int | None = None, count: int = 40, factor: float = 1.0) -> None:
    tokens = some(case, count)
    assert_close(attended(case, window)[tokens], want(case, tokens, window), factor)


@pytest.mark.parametrize("name", SMALL)
def test_small_steps(name, dtype):
    told, window = SMALL[name]
    check(make_case(**told, dtype=dtype), window)
    if told["lengths"]:
        check(of_columns(make_case(**told, dtype=dtype)), window)


@pytest.mark.parametrize("name", SMALL)
def test_sinks_take_their_share_of_the_softmax(name, dtype):
    told, window = SMALL[name]
    case = make_case(**told, dtype=dtype)
    sinks = sinks_of(case)
    assert_close(attended(case, window, sinks), case.naive(window, sinks=sinks))


@pytest.mark.parametrize("name", SMALL)
def test_scores_are_capped(name, dtype):
    from penstock.kernels.triton.attention import attention as column

    told, window = SMALL[name]
    case = make_case(**told, loud=3.0, dtype=dtype)
    there = on(case, "cuda")
    got = attend(column, there.q, there.kv, there.inputs, there.scale, window, softcap=1.5).cpu()
    assert_close(got, case.naive(window, softcap=1.5))


@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (4, 1), (14, 2), (8, 1), (16, 1)])
def test_shapes(width, heads, kv_heads):
    told, _ = SMALL["groups and chunks"]
    check(make_case(**told, heads=heads, kv_heads=kv_heads, width=width, dtype=torch.bfloat16))


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_all_sizes_beside_rows_alone(seed, dtype):
    check(drawn(seed, dtype=dtype))
    check(of_columns(drawn(seed + 100, dtype=dtype)))


@pytest.mark.parametrize("rows", [1, 2, 17, 64, 700])
def test_rows_of_many_lengths(rows):
    """1 to 700 rows: each number of splits."""
    rng = random.Random(rows)
    lengths = [rng.choice([1, 15, 16, 17, 63, 64, 65, rng.randint(1, 3000)]) for _ in range(rows)]
    case = make_case(lengths, dtype=torch.bfloat16, seed=rows, extra_width=rows % 3)
    check(case)
    check(case, window=100)


@pytest.mark.parametrize("rows", [220, 300])
def test_many_rows_of_wide_heads(rows):
    """By tiles of 32 tokens, and of 64 on a GPU of 132 multiprocessors: decode._shape."""
    rng = random.Random(rows)
    lengths = [rng.choice([1, 31, 32, 63, 64, 65, rng.randint(1, 400)]) for _ in range(rows)]
    case = make_case(lengths, heads=8, kv_heads=4, width=256, dtype=torch.bfloat16, seed=rows)
    check(case)
    check(case, window=100)


def test_one_long_row_beside_short_ones():
    lengths = [9000, *range(1, 130)]
    case = make_case(lengths, heads=16, kv_heads=8, dtype=torch.bfloat16)
    assert_close(attended(case), want(case, list(range(130))))


def test_programs_that_share_a_row_meet_every_time():
    """The last of them joins: 200 launches of 16 programs a row give one answer, to the bit."""
    from penstock.kernels.triton.attention import attention as column

    case = on(
        make_case(
            [1024, 1000, 900, 64, 65, 700, 3, 512], dtype=torch.bfloat16, heads=8, kv_heads=2
        ),
        "cuda",
    )
    first = attend(column, case.q, case.kv, case.inputs, case.scale)
    assert_close(first.cpu(), want(on(case, "cpu"), list(range(8))))
    for _ in range(200):
        assert torch.equal(attend(column, case.q, case.kv, case.inputs, case.scale), first)


def test_a_long_prompt_in_a_window():
    case = make_case([], chunks=[(0, 700), (900, 300)], dtype=torch.bfloat16)
    for window in (1, 63, 64, 65, 200, 5000):
        check(case, window)


def test_every_length_to_600():
    check(
        make_case(list(range(1, 601)), heads=2, kv_heads=1, width=32, dtype=torch.bfloat16),
        count=80,
    )


def test_loud_scores(dtype):
    check(make_case([64] * 40, groups=[(40, 48)], dtype=dtype, loud=8.0), factor=2.0)


def test_what_is_not_seen_may_be_no_number():
    """Scratch and free blocks, and slots past a row's length in its last block, may hold NaN."""
    case = make_case(
        [5, 20, 33, 40], groups=[(2, 0), (2, 16)], chunks=[(3, 9), (0, 33)], dtype=torch.bfloat16
    )
    expected = case.naive()
    case.kv[0] = float("nan")
    case.kv[-3:] = float("nan")
    for table, position in zip(case.tables, case.positions, strict=True):
        past = position % 16 + 1
        if position == max(
            p for t, p in zip(case.tables, case.positions, strict=True) if t is table
        ):
            case.kv[int(table[position // 16]), :, :, past:] = float("nan")
    assert_close(attended(case), expected)


def test_a_captured_launch_follows_the_columns():
    """One graph: rows, lengths, tables and groups change under it,
    and the launches are the same."""
    from penstock.kernels.triton.attention import attention as column

    steps = [
        of_columns(
            make_case(lengths, groups=groups, dtype=torch.bfloat16, seed=4, extra_width=extra),
            seed=seed,
        )
        for seed, (lengths, groups, extra) in enumerate(
            [
                ([300, 40, 90, 80, 70, 17, 1, 33], [(0, 0), (5, 32)], 1),
                ([100, 140, 90, 80, 70, 170, 1, 330], [(4, 64), (2, 16)], 0),
                ([320, 40, 90, 80, 70, 17, 1, 33], [(0, 0), (0, 0)], 0),
            ]
        )
    ]
    blocks = max(s.kv.shape[0] for s in steps)
    wide = max(s.inputs.decode.table.shape[1] for s in steps)
    group_wide = max(s.inputs.decode.groups.blocks.shape[1] for s in steps)
    for step in steps:
        decode = step.inputs.decode
        step.kv = torch.cat(
            [step.kv, torch.zeros(blocks - len(step.kv), *step.kv.shape[1:], dtype=step.kv.dtype)]
        )
        decode.table = torch.nn.functional.pad(decode.table, (0, wide - decode.table.shape[1]))
        decode.groups.blocks = torch.nn.functional.pad(
            decode.groups.blocks, (0, group_wide - decode.groups.blocks.shape[1])
        )
        decode.max_own = wide * 16
    held = on(steps[0], "cuda")
    attend(column, held.q, held.kv, held.inputs, held.scale)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(column, held.q, held.kv, held.inputs, held.scale)
    for step in (*steps, steps[0]):
        _copy(held, step)
        graph.replay()
        assert_close(out.cpu(), want(step, list(range(len(out)))))


def _copy(held: Case, step: Case) -> None:
    pairs = [(held.q, step.q), (held.kv, step.kv)]
    ours, theirs = held.inputs.decode, step.inputs.decode
    pairs += [
        (getattr(ours, n), getattr(theirs, n))
        for n in ("rows", "position", "table", "length", "skip")
    ]
    pairs += [
        (getattr(ours.groups, n), getattr(theirs.groups, n)) for n in ("start", "blocks", "length")
    ]
    for to, what in pairs:
        to.copy_(what)
