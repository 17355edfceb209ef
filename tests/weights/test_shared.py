"""Weights of another process: what is said of them and is not so is refused; what is so comes byte
for byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from penstock.errors import CheckpointError
from penstock.shared_weights import SharedStretch, SharedWeights
from penstock.weights.share import share_weights, to_json
from penstock.weights.shared import SHM, OpenedWeights

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(15, dtype=torch.bfloat16).reshape(3, 5),
    "b": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),  # not as its numbers lie
    "c": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def shared() -> Iterator[SharedWeights]:
    with share_weights(TENSORS) as told:
        yield told


def test_tensors_come_as_they_are_and_nothing_stays(shared: SharedWeights) -> None:
    crossed = msgspec.convert(to_json(shared), SharedWeights)
    assert crossed == shared and len(shared.memories) == 1
    with OpenedWeights(crossed, CPU) as opened:
        found = {entry.name: tensor for entry, tensor in opened.read(list(opened.entries.values()))}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with share_weights(TENSORS) as other:
        name = other.memories[0].name
        assert (SHM / name).stat().st_mode & 0o777 == 0o600
    assert not (SHM / name).exists()
    with pytest.raises(
        CheckpointError, match=r"'penstock-\w+' is not there: has the process that gave it ended\?"
    ):
        OpenedWeights(other, CPU).__enter__()


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({"name": "../etc/passwd"}, "is none of /dev/shm"),
        ({"name": ""}, "is none of /dev/shm"),
        ({"size": 1 << 40}, r"has \d+ bytes, not 1099511627776"),
        ({"kind": "cuda", "handle": bytes(64)}, "this engine runs on cpu"),
        ({"offset": 1}, "where its numbers may begin"),
        ({"offset": -8}, "doesn't lie within its memory"),
        ({"offset": 1 << 20}, "doesn't lie within its memory"),
        ({"shape": (1 << 40, 1 << 40)}, "doesn't lie within its memory"),
        ({"shape": (3, -5)}, "no shape"),
        ({"shape": (1,) * 17}, "no shape"),
        ({"dtype": "bfloat16"}, "is of dtype 'bfloat16', and not of F64"),
        ({"memory": 1}, "lies in memory 1, and there are 1"),
        ({"memory": -1}, "lies in memory -1"),
        ({"name": None}, "'a' is told of twice"),
    ],
    ids=str,
)
def test_what_is_not_so_is_refused(shared: SharedWeights, told: dict[str, Any], error: str) -> None:
    (memory,), (first, *rest) = shared.memories, shared.tensors
    if told.keys() <= {"name", "size", "kind", "handle"} and told.get("name", "") is not None:
        bad = replace(shared, memories=(replace(memory, **told),))
    elif "name" in told:
        bad = replace(shared, tensors=(first, first, *rest))
    else:
        bad = replace(shared, tensors=(replace(first, **told), *rest))
    with pytest.raises(CheckpointError, match=error) as raised, OpenedWeights(bad, CPU):
        pass
    assert raised.value.param == "shared" and "\n" not in str(raised.value)


def test_memory_that_is_cut_short_while_it_is_read_is_an_error(shared: SharedWeights) -> None:
    with OpenedWeights(shared, CPU) as opened:
        with (SHM / shared.memories[0].name).open("r+b") as file:
            file.truncate(3)
        with pytest.raises(CheckpointError, match="is cut short"):
            list(opened.read(list(opened.entries.values())))


def test_a_handle_crosses_as_raw_bytes() -> None:
    told = SharedWeights((SharedStretch("cuda", 8, handle=bytes(range(64))),), ())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=SharedWeights) == told
    assert msgspec.convert(to_json(told), SharedWeights) == told
