"""What WindowTables clears of the pages that a plan hands out: all but blocks of which the step
writes every token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.execute.kv_cache import PagePlace
from penstock.execute.layer_pages import LayerPages
from penstock.execute.staging_buffer import Staging
from penstock.execute.window_tables import WindowTables
from penstock.schedule.step import Chunks, plain_step

pytestmark = pytest.mark.torch

NONE, PLACE = np.zeros(0, np.int32), PagePlace(0, 0, 64)
# four blocks, each with two pages
PAGES = np.array([[2, 12, 22], [3, 13, 23], [4, 14, 24], [5, 15, 25]], np.int32)


def cleared_by(chunks: Chunks | None) -> list[int]:
    rows: Any = SimpleNamespace(
        device=torch.device("cpu"), block_table=torch.zeros((2, 8), dtype=torch.int32)
    )
    tables, staging = (
        WindowTables(LayerPages((0, 1, 2), (PLACE,) * 3, 32), rows, 31),
        Staging(4, 2, torch.device("cpu")),
    )
    staging.begin()
    plan = plain_step(0, NONE, NONE, chunks=chunks)
    plan.window_pages = PAGES
    staged = tables.stage(plan, staging)
    staging.send()
    tables.take(staged)
    assert tables.page[:, [2, 3, 4, 5]].tolist() == [[12, 13, 14, 15], [22, 23, 24, 25]]
    assert staged.cleared is not None
    return sorted(staged.cleared.tolist())


def chunk(context: int, tokens: int, blocks: list[int]) -> Chunks:
    nothing = np.zeros(tokens, np.int32)
    return Chunks(
        nothing,
        np.array([0, tokens], np.int32),
        np.array([context], np.int32),
        np.array([blocks], np.int32),
        np.array([-1], np.int32),
        nothing,
    )


def test_all_are_cleared_where_nothing_is_prefilled() -> None:
    assert cleared_by(None) == sorted(PAGES.reshape(-1).tolist())


@pytest.mark.parametrize(
    "context, tokens, filled",
    [(0, 64, {2, 3, 4, 5}), (0, 63, {2, 3, 4}), (5, 40, {3}), (16, 16, {3}), (20, 11, set())],
)
def test_blocks_that_a_chunk_fills_are_not(context: int, tokens: int, filled: set[int]) -> None:
    kept = [line for line in PAGES.tolist() if line[0] not in filled]
    assert cleared_by(chunk(context, tokens, [2, 3, 4, 5, 0])) == sorted(
        page for line in kept for page in line
    )
