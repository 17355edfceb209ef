"""A table that lies beside the GPU: what the driver is told of its memory, and its dummy numbers.
Needs no GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from penstock.errors import CapacityError
from penstock.parallel.sharded_weight import Part
from penstock.quant import gathered
from penstock.quant.gathered import Gathered, pinned

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class Driver:
    """Notes what it holds."""

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.held = answer, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.answer:
            self.held[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.held[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(gathered, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_the_driver_holds_the_memory_for_as_long_as_somebody_has_a_view(driver: Driver) -> None:
    table = pinned((300, 7), torch.bfloat16)
    assert table.shape == (300, 7) and table.dtype == torch.bfloat16 and not table.any()
    assert driver.held == {table.data_ptr(): 300 * 7 * 2}
    row = table[5]
    row.fill_(2.0)
    del table
    gc.collect()
    assert len(driver.held) == 1 and row.sum() == 14
    del row
    gc.collect()
    assert not driver.held


def test_a_driver_that_refuses_is_one_line(driver: Driver) -> None:
    driver.answer = 2
    with pytest.raises(
        CapacityError,
        match=r"refuses to hold 0.00 GiB .* \(CUDA error 2\): .*per_layer_embeddings gpu",
    ):
        pinned((4, 4), torch.float32)
    gc.collect()
    assert not driver.held


def test_where_it_lies_by_the_device(driver: Driver) -> None:
    part = Part("table", (5, 4))
    beside = Gathered(part, torch.float32, torch.device("cuda"), in_host=True)
    assert beside.in_host and beside.value.device == CPU and len(driver.held) == 1
    assert Gathered(part, torch.float32, torch.device("meta"), in_host=True).in_host
    for device, asked in ((CPU, True), (torch.device("meta"), False)):
        assert not Gathered(part, torch.float32, device, in_host=asked).in_host
    with torch.inference_mode():
        ((_, place),) = beside.places()
        beside.fill(part, place, torch.arange(20.0).view(5, 4))
    assert beside.value[3].tolist() == [12, 13, 14, 15]


def test_dummy_numbers_do_not_depend_on_the_place(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "DRAWN_AT_ONCE", 64)
    drawn = []
    for device in (CPU, torch.device("cuda")):
        table: Any = Gathered(Part("table", (50, 16)), torch.bfloat16, device, in_host=True)
        with torch.inference_mode():
            table.draw(torch.Generator().manual_seed(3), torch.bfloat16)
        drawn.append(table.value)
    assert torch.equal(*drawn) and drawn[0].float().std() > 4e-4 and drawn[0].unique().numel() > 200
