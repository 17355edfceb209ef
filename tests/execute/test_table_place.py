"""Where a table of per-layer embeddings lies: what is asked, what fits, what is refused in a line.
Needs no GPU."""

from __future__ import annotations

import pytest
import torch
from random_model import SHAPES

from penstock.config import Config
from penstock.errors import CapacityError, UsageError
from penstock.execute import table_place
from penstock.execute.table_place import least_bytes, table_in_host, told_place
from penstock.jobs.recommend import bytes_a_rank, recommend
from penstock.models.build_model import build_model
from penstock.models.decoder import Decoder
from penstock.models.read_config import model_config_of

pytestmark = pytest.mark.torch

GIB, GPU, META = 2**30, torch.device("cuda", 0), torch.device("meta")
LENGTH = 8192


def shape_of(name: str, **how: bool) -> Decoder:
    return build_model(
        model_config_of(SHAPES[name].config(), ""), torch.bfloat16, META, LENGTH, **how
    )


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of the GPU and of the host."""
    room = {"gpu": 80 * GIB, "host": 64 * GIB}
    monkeypatch.setattr(table_place, "room_beside_steps", lambda config, device: room["gpu"])
    monkeypatch.setattr(table_place, "free_memory", lambda device: room["host"])
    return room


def test_it_lies_on_the_gpu_where_it_fits_beside_a_sequence(room: dict[str, int]) -> None:
    shape, auto = shape_of("gemma-4-e4b"), Config.of()
    table, kv = 262_144 * 42 * 256 * 2, LENGTH * 61_452
    least = shape.weights_bytes + shape.rope_bytes + kv
    assert shape.table_bytes == table and least_bytes(shape, auto) == least
    for gpu, beside in ((80 * GIB, False), (least, False), (least - 1, True)):
        room["gpu"] = gpu
        assert table_in_host(shape, auto, GPU) is beside
        assert table_in_host(shape, Config.of(per_layer_embeddings="host"), GPU)
        assert not table_in_host(shape, Config.of(per_layer_embeddings="gpu"), GPU)
    room["gpu"] = least + 61_452 * LENGTH - 1
    assert table_in_host(shape, Config.of(kv_cache_tokens=2 * LENGTH), GPU), (
        "as many tokens as are asked for"
    )
    assert "(5.25 GiB) lies in host memory, since it doesn't fit the GPU" in told_place(
        shape, "auto"
    )
    assert "lies in host memory, as asked" in told_place(shape, "host")


def test_a_cpu_has_one_memory(room: dict[str, int]) -> None:
    assert not table_in_host(
        shape_of("gemma-4-e4b"), Config.of(per_layer_embeddings="host"), torch.device("cpu")
    )


def test_what_lies_in_host_memory_takes_none_of_the_gpu() -> None:
    whole, beside = shape_of("gemma-4-e4b"), shape_of("gemma-4-e4b", table_in_host=True)
    assert (
        whole.weights_bytes - beside.weights_bytes
        == whole.table_bytes
        == beside.table_bytes
        > 5 * GIB
    )
    assert beside.table_in_host and not whole.table_in_host


def test_a_host_without_room_is_one_line(room: dict[str, int]) -> None:
    room["host"] = 5 * GIB
    with pytest.raises(
        CapacityError, match=r"takes 5.25 GiB of host memory, and 5.00 GiB is free: .* gpu$"
    ):
        table_in_host(shape_of("gemma-4-e4b"), Config.of(per_layer_embeddings="host"), GPU)


@pytest.mark.parametrize("asked", ["gpu", "host"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_without_a_table_refuses_a_place_for_it(
    room: dict[str, int], asked: str, device: str
) -> None:
    shape = shape_of("llama-3.2-1b")
    assert not table_in_host(shape, Config.of(), torch.device(device))
    with pytest.raises(
        UsageError,
        match=f"per_layer_embeddings {asked} is for .*LlamaForCausalLM has none: leave it",
    ):
        table_in_host(shape, Config.of(per_layer_embeddings=asked), torch.device(device))


def test_the_recommendation_counts_it_where_it_lies() -> None:
    config = model_config_of(SHAPES["gemma-4-e4b"].config(), "")
    asked = {"max_model_len": LENGTH}

    def told(gib: int, **knobs: str) -> tuple[int, str]:
        rooms = [gib * GIB]
        needs = bytes_a_rank(Config.of(**asked, **knobs), config, torch.bfloat16, rooms)
        return needs[1][0], recommend(needs, rooms, LENGTH)

    whole, said = told(80)
    assert (
        said.startswith("--tensor-parallel-size 1")
        and told(80, per_layer_embeddings="host")[0] < whole - 5 * GIB
    )
    beside, said = told(12)
    assert said.startswith("--tensor-parallel-size 1") and whole - beside == 262_144 * 42 * 256 * 2
    assert told(12, per_layer_embeddings="gpu")[1].startswith("none: ")
