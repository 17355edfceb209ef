"""When groups pay: each column's measured times as the scheduler is handed them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from engine_model import make_folder

from penstock.config import Config
from penstock.engine.build_engine import build_engine
from penstock.kernels.choose import choose
from penstock.kernels.prefix_cost import prefix_cost_times
from penstock.schedule.prefix_groups import SharingCosts

pytestmark = pytest.mark.torch

SHAPES = [(32, 8, 64), (32, 8, 128), (14, 2, 64), (16, 16, 128)]


def costs_of(column: str, shape: tuple[int, int, int]) -> SharingCosts:
    if column == "triton":
        pytest.importorskip("triton")
    ops = choose(torch.device("cpu"), torch.bfloat16)
    ops = replace(ops, why={**ops.why, "attention": (column, "")})
    return SharingCosts(
        **asdict(prefix_cost_times(ops, *shape, torch.bfloat16, torch.device("cpu")))
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("column", ["reference", "triton"])
def test_where_grouping_was_measured_to_pay_and_where_not(
    column: str, shape: tuple[int, int, int]
) -> None:
    costs = costs_of(column, shape)
    assert costs.saved(1024, 656) > costs.step, "repeated sampling"
    assert 16 * costs.saved(64, 256) > costs.step
    assert costs.saved(2, 64) < costs.step, "two rows over a short prompt"


def test_a_tile_is_the_kernels_own() -> None:
    pytest.importorskip("triton")
    assert [costs_of("triton", shape).tile_members for shape in SHAPES] == [16, 16, 9, 64]


def test_auto_is_handed_the_devices_times_and_always_counts_tokens(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    found = {}
    for groups in ("auto", "always", "off"):
        config = Config.of(
            model=str(folder),
            device="cpu",
            dtype="float32",
            prefix_groups=groups,
            kv_cache_tokens=1024,
            max_num_seqs=4,
        )
        engine, _ = build_engine(config)
        found[groups] = engine.scheduler.batch_order.sharing
        engine.runner.close()
    assert found["always"] == SharingCosts() and found["off"] is None
    assert found["auto"] is not None and 0 < found["auto"].step < 1e-3, "seconds of a layer"
