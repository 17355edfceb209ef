"""Ranks on GPUs, as far as no GPU is needed: who may have which, and that all add up alike when one
cannot share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import CapacityError, UsageError
from penstock.ranks import gpu_collectives
from penstock.ranks.gpu_collectives import GpuCollectives, Meetings
from penstock.ranks.rank_gpus import check_free, check_gpus

pytestmark = pytest.mark.torch

GIB = 1 << 30


@pytest.mark.parametrize(
    ("names", "ranks", "visible", "why"),
    [
        (
            ["H200"] * 2,
            4,
            None,
            r"tensor_parallel_size \(4\) is above the 2 GPUs that this process sees: lower it$",
        ),
        (
            ["H200"],
            2,
            "3",
            (
                r"1 GPUs that this process sees \(CUDA_VISIBLE_DEVICES=3\): lower it, or let it see"
                r" more"
            ),
        ),
        (["H200", "A100"], 2, None, r"the first 2 GPUs are not alike \(A100 and H200\)"),
    ],
)
def test_gpus_that_hold_no_model_are_named(
    names: list[str], ranks: int, visible: str | None, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        check_gpus(names, ranks, visible)


def test_gpus_that_do_are_taken() -> None:
    check_gpus(["H200", "H200", "A100"], 2, "0,1,2")
    check_free(1, 130 * GIB, 140 * GIB, 0.92)
    with pytest.raises(
        CapacityError, match=r"GPU 1 has 20.0 of 140.0 GiB free, and gpu_memory_util.* asks for 92%"
    ):
        check_free(1, 20 * GIB, 140 * GIB, 0.92)


class Shared:
    """Memory that was shared."""


@pytest.mark.parametrize("fails", [None, "raises", "hangs"])
def test_all_ranks_share_memory_or_none(
    fails: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank whose set-up fails, or never ends, takes the others with it to NCCL, and each says
    why."""
    monkeypatch.setattr(gpu_collectives, "MEETING", 1.0)
    opened: list[int] = []

    def share(end: Any) -> Shared:
        if end._rank == 1 and fails == "raises":
            raise RuntimeError("no fabric manager\nand a trace")
        if end._rank == 1 and fails == "hangs":
            time.sleep(30)
        return Shared()

    monkeypatch.setattr(GpuCollectives, "_share", share)
    monkeypatch.setattr(GpuCollectives, "_open_nccl", lambda end, store: opened.append(end._rank))
    ends = [
        GpuCollectives(tmp_path / "meeting", rank, 3, 10.0, torch.device("cuda", rank))
        for rank in range(3)
    ]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(GpuCollectives.connect, ends))
    (said,) = {end.describe() for end in ends}
    if fails is None:
        assert said.startswith("memory that all GPUs read") and not opened
        assert all(isinstance(end._shared, Shared) for end in ends)
        return
    why = {"raises": "RuntimeError: no fabric manager", "hangs": "not done in 1 s"}[fails]
    assert said == f"NCCL, since memory could not be shared (rank 1: {why})"
    assert sorted(opened) == [0, 1, 2] and all(end._shared is None for end in ends)


def test_a_process_that_had_a_model_before_is_met_by_new_ones() -> None:
    """Counts of all ranks are the most of any, by meetings of those alone that had fewer."""
    store, alone = torch.distributed.HashStore(), list[tuple[int, int]]()
    met = [Meetings(2), Meetings(), Meetings(1)]
    with ThreadPoolExecutor(3) as threads:
        told = [
            threads.submit(
                met[rank].keep_pace,
                store,
                rank,
                3,
                lambda number, rank=rank: alone.append((rank, number)),
            )
            for rank in range(3)
        ]
        for each in told:
            each.result()
    assert [each.made for each in met] == [2, 2, 2] and sorted(alone) == [(1, 0), (1, 1), (2, 1)]
