"""What a GPU step is fed, without a GPU: sizes, staging in words, packing of plans, the order of
capture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.execute import packing
from penstock.execute.graphs import coarse_first
from penstock.execute.padding import (
    BESIDE_CHUNKS,
    CHUNK_GRAPHS,
    GRAPH_ROWS,
    BesideSizes,
    chunk_capacity,
    graph_sizes,
    group_capacity,
    padded,
    padded_beside,
    padded_tokens,
    sizes_up_to,
)
from penstock.execute.staging_buffer import LOOSE_WORDS, RING, Staging
from penstock.schedule.step import Chunks, StepPlan

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def _plan(rows: int, groups: list[int], chunks: Chunks | None = None) -> StepPlan:
    """`groups`: members of each; its prefix has as many blocks."""
    start = np.cumsum([0, *groups]).astype(np.int32)
    blocks = np.arange(len(groups) * 9, dtype=np.int32).reshape(len(groups), 9)
    length = np.array(groups, np.int32) * 16
    nothing = np.zeros((0, 3), np.int32)
    return StepPlan(
        0,
        np.arange(rows, dtype=np.int32),
        np.zeros(rows, np.int32),
        0,
        start,
        blocks,
        length,
        nothing[:, :2],
        nothing,
        None,
        chunks,
    )


def test_sizes_hold_their_rows_and_are_few() -> None:
    for rows in range(1, 9000):
        assert rows <= padded(rows) <= max(rows + 8, rows * 17 // 16 + 1)
    assert len(sizes_up_to(GRAPH_ROWS)) < 110
    assert (padded(0), group_capacity(0), group_capacity(1)) == (0, 0, 0)
    assert all(group_capacity(size) & (group_capacity(size) - 1) == 0 for size in sizes_up_to(8192))
    assert [padded_tokens(tokens) for tokens in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_rows_and_prompts_beside_them_are_of_few_kinds_where_they_are_few() -> None:
    kinds = set()
    for rows in range(600):
        for tokens in range(1, 1200, 3):
            size, whole, few = padded_beside(rows, tokens)
            assert size >= rows and whole >= size + tokens and whole % 16 == 0
            assert (
                size <= max(rows + 16, rows * 5 // 4)
                and whole - size <= max(tokens + 64, tokens * 5 // 4) + 16
            )
            assert few or rows > 512 or tokens > 1024 - 16
            kinds |= {(size, whole)} if few else set()
    assert len(kinds) < 250
    assert {padded_beside(1, tokens - 1)[1] for tokens in CHUNK_GRAPHS} == set(CHUNK_GRAPHS), (
        "captured at the start"
    )
    assert chunk_capacity(1) == BESIDE_CHUNKS


def test_every_step_up_to_the_largest_graph_has_one_that_is_little_larger() -> None:
    captured = graph_sizes(GRAPH_ROWS)
    assert (
        len(captured) < 75
        and max(captured) == GRAPH_ROWS
        and set(captured) <= set(sizes_up_to(GRAPH_ROWS))
    )
    for rows in range(1, GRAPH_ROWS + 1):
        size = min(size for size in captured if size >= rows)
        assert size <= max(rows + 8, rows * 5 // 4) and size >= padded(rows)
    assert max(graph_sizes(100)) == padded(100)


def test_graphs_are_far_apart_above_the_rows_that_are_asked_for() -> None:
    captured = graph_sizes(GRAPH_ROWS, 128)
    near = {size for size in graph_sizes(GRAPH_ROWS) if size <= 128}
    assert set(captured) == near | {256, 512, 1024, 2048}
    assert max(graph_sizes(100, 8)) == padded(100) and graph_sizes(64, 2048) == graph_sizes(64)
    for rows in range(129, GRAPH_ROWS + 1):
        assert min(size for size in captured if size >= rows) < 2 * rows


def test_capture_begins_with_the_largest_and_goes_from_coarse_to_fine() -> None:
    sizes = sizes_up_to(GRAPH_ROWS)
    order = coarse_first(sizes)
    assert sorted(order) == sorted(sizes) and order[0] == max(sizes)
    first = order[:12]
    assert first == sorted(first, reverse=True) and min(first) <= 2


def test_what_is_staged_arrives() -> None:
    staging = Staging(24, 4, CPU)
    generator = np.random.default_rng(0)
    for _ in range(2 * RING):
        staging.begin()
        staging.write("rows", np.arange(5, dtype=np.int32), 99, 8)
        arrays = [
            generator.integers(-9, 9, (3, 7)).astype(np.int32),
            generator.random(5).astype(np.float32),
            generator.integers(-(2**62), 2**62, (2, 3)),
            generator.random(9) < 0.5,
            np.zeros((0, 4), np.int32),
            generator.integers(0, 9, (6, 2)).astype(np.int32)[:, 1],
        ]
        added = [staging.add(array) for array in arrays]
        staging.send()
        assert staging.rows[:8].tolist() == [0, 1, 2, 3, 4, 99, 99, 99]
        for array, found in zip(arrays, added, strict=True):
            assert found.shape == array.shape and (found.numpy() == array).all()
            assert found.data_ptr() % 16 == 0 or not array.size


def test_what_the_device_holds_is_not_sent_again() -> None:
    staging = Staging(24, 4, CPU)

    def step(rows: list[int], fill: int, loose: int | None) -> None:
        staging.begin()
        staging.write("rows", np.array(rows, np.int32), fill, 8)
        staging.write("skip", np.zeros(len(rows), np.int32), 0, 8)
        added = None if loose is None else staging.add(np.array([loose], np.int32))
        staging.send()
        assert added is None or added.tolist() == [loose]

    step([3, 1], 9, None)
    staging.rows[7] = 77  # what a copy would put right
    step([3, 1], 9, None)
    step([3, 1], 9, 5)  # the loose part goes alone
    assert staging.rows[:8].tolist() == [3, 1, 9, 9, 9, 9, 9, 77]
    for rows, fill in (([3, 2], 9), ([3, 2], 8), ([3, 2, 8], 8)):
        step(rows, fill, None)
        assert staging.rows[:8].tolist() == rows + [fill] * (8 - len(rows))


def test_a_burst_larger_than_the_buffer_arrives_too() -> None:
    staging = Staging(8, 1, CPU)
    large = np.arange(LOOSE_WORDS + 5, dtype=np.int32)
    for turn in range(3):
        staging.begin()
        staging.write("rows", np.arange(3, dtype=np.int32), 7, 4)
        before, much, after = (
            staging.add(a) for a in (np.array([turn + 0.5], np.float32), large, np.array([turn]))
        )
        staging.send()
        assert staging.rows[:4].tolist() == [0, 1, 2, 7] and (much.numpy() == large).all()
        assert (before.tolist(), after.tolist()) == ([turn + 0.5], [turn])
        large = large[::-1].copy()


def test_rows_and_groups_are_padded() -> None:
    staging, plan = Staging(24, 4, CPU), _plan(9, [3, 2])
    staging.begin()
    packing.pack_rows(staging, plan, plan.group_skip, 16, 23)
    packing.pack_groups(staging, plan, 4)
    staging.send()
    assert staging.rows[:16].tolist() == [*range(9), *[23] * 7]
    assert staging.skip[:16].tolist() == [48] * 3 + [32] * 2 + [0] * 11
    assert staging.group_start.tolist() == [0, 3, 5, 5, 5] and staging.group_length.tolist() == [
        48,
        32,
        0,
        0,
    ]


@pytest.mark.parametrize("capacity", [0, 1, 2, 5])
def test_groups_past_the_capacity_go_alone(capacity: int) -> None:
    plan = _plan(9, [3, 2, 2])
    packing.without_groups_past(plan, capacity)
    kept = min(capacity, 3)
    assert plan.group_start.tolist() == [0, 3, 5, 7][: kept + 1]
    assert plan.group_blocks.shape[0] == plan.group_length.size == kept


def test_chunks_are_padded_to_the_dump() -> None:
    chunks = Chunks(
        tokens=np.arange(100, 121, dtype=np.int32),
        start=np.array([0, 18, 21], np.int32),
        context=np.array([0, 30], np.int32),
        blocks=np.array([[5, 6, 0], [7, 8, 9]], np.int32),
        prompt_logprobs=np.array([-1, -1], np.int32),
        next_token=np.full(21, -1, np.int32),
    )
    staging = Staging(8, 1, CPU)
    staging.begin()
    staged = packing.pack_chunks(staging, chunks, BesideSizes(8, 40, True), 16, 77, False)
    staging.send()
    ids, positions, slots, inputs = staged.ids, staged.positions, staged.slots, staged.inputs
    assert slots.tolist() == [
        *range(80, 96),
        96,
        97,
        8 * 16 + 14,
        8 * 16 + 15,
        9 * 16,
        *[77 * 16] * 11,
    ]
    assert (
        positions.tolist() == [*range(18), 30, 31, 32, *[0] * 11]
        and ids[:21].tolist() == chunks.tokens.tolist()
    )
    assert inputs.start.tolist() == [0, 18, *[21] * 15] and inputs.context.tolist() == [
        0,
        30,
        *[0] * 14,
    ]
    assert (
        inputs.block_table[:, :3].tolist() == chunks.blocks.tolist()
        and inputs.block_table.shape[1] == 16
    )
