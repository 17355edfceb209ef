"""Streamed tensors are the mapped ones, whatever the sizes of pieces and of what is under way; what
cannot be read is named. On the CPU the same threads read, and copies have no streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import CheckpointError
from penstock.weights import stream
from penstock.weights.checkpoint import ITEM_BYTES, read_header, read_tensors, unstacked
from penstock.weights.stream import TORCH_DTYPES, stream_tensors

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(0)
    for number, dtype in enumerate((torch.bfloat16, torch.float32, torch.uint8)):
        drawn = {
            f"{number}.{k}": torch.randn(3 + 40 * k, 17, generator=generator) for k in range(5)
        }
        drawn |= {f"{number}.one": torch.tensor(3.0), f"{number}.none": torch.zeros(0, 5)}
        tensors = {name: (x * 50).to(dtype) for name, x in drawn.items()}
        if dtype == torch.bfloat16:
            tensors["eight"] = torch.randn(33, 21, generator=generator).to(torch.float8_e4m3fn)
        save_file(tensors, tmp_path / f"{number}.safetensors")
    return sorted(tmp_path.iterdir())


def test_every_dtype_of_a_checkpoint_is_known() -> None:
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == ITEM_BYTES


@pytest.mark.parametrize(("piece", "ahead"), [(64, 0), (1000, 5000), (1 << 20, 1 << 20)])
@torch.inference_mode()
def test_streamed_is_mapped(
    shards: list[Path], piece: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PIECE", piece)
    monkeypatch.setattr(stream, "AHEAD", ahead)
    entries = [entry for shard in shards for entry in read_header(shard)]
    mapped = {entry.name: tensor.clone() for entry, tensor in read_tensors(entries)}
    streamed = {entry.name: tensor.clone() for entry, tensor in stream_tensors(entries[::-1], CPU)}
    assert streamed.keys() == mapped.keys() and len(streamed) == 22
    for name, tensor in mapped.items():
        assert streamed[name].dtype == tensor.dtype and streamed[name].shape == tensor.shape
        assert torch.equal(
            streamed[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


def test_what_cannot_be_read_is_named(shards: list[Path]) -> None:
    entries = [entry for shard in shards for entry in read_header(shard)]
    shards[1].write_bytes(shards[1].read_bytes()[:-3000])
    with pytest.raises(
        CheckpointError, match=r"1.safetensors is cut short: download the checkpoint again"
    ):
        list(stream_tensors(entries, CPU))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"1.safetensors cannot be read \(No such file"):
        list(stream_tensors(entries, CPU))


def test_it_may_be_left_early(shards: list[Path]) -> None:
    reading = stream_tensors(read_header(shards[0]), CPU)
    next(reading)
    reading.close()


@pytest.mark.parametrize("piece", [48, 1 << 20])
@torch.inference_mode()
def test_a_ranks_share_is_read_alone(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows, by columns and in the middle; of what is read, not a byte is another rank's."""
    monkeypatch.setattr(stream, "PIECE", piece)
    whole = {"a": torch.randn(12, 20).to(torch.bfloat16), "b": torch.randn(5, 8, 6)}
    save_file(whole, tmp_path / "model.safetensors")
    read: list[int] = []
    preadv = stream.os.preadv
    monkeypatch.setattr(stream.os, "preadv", lambda *told: read.append(preadv(*told)) or read[-1])
    for entry in read_header(tmp_path / "model.safetensors"):
        tensor = whole[entry.name]
        for dimension, first, length in (
            (0, 0, 3),
            (0, 2, 3),
            (1, 0, 4),
            (1, 4, 4),
            (tensor.dim() - 1, 1, 5),
        ):
            share = entry.narrow(dimension, first, length)
            read.clear()
            ((told, got),) = stream_tensors([share], CPU)
            assert told.shape == got.shape and torch.equal(
                got, tensor.narrow(dimension, first, length)
            )
            assert sum(read) == got.nbytes


@pytest.mark.parametrize("turned", [False, True])
@torch.inference_mode()
def test_each_expert_of_a_stack_streams_as_it_maps(turned: bool, tmp_path: Path) -> None:
    """Stacks are [experts, out, in], or [experts, in, out], of which each matrix is turned."""
    gate, up = torch.randn(2, 3, 5, 7).unbind()
    both, path = torch.cat((gate, up), 1), tmp_path / "model.safetensors"
    save_file({"a.experts.gate_up_proj": both.mT.contiguous() if turned else both}, path)
    names = [f"a.experts.{n}.{part}_proj.weight" for n in range(3) for part in ("gate", "up")]
    entries = unstacked(
        {entry.name: entry for entry in read_header(path)}, dict.fromkeys(names, (5, 7))
    )
    assert list(entries) == names and {entry.turned for entry in entries.values()} == {turned}
    for read in (read_tensors, lambda asked: stream_tensors(asked, CPU)):
        found = {entry.name: tensor.clone() for entry, tensor in read(list(entries.values()))}
        for number in range(3):
            assert torch.equal(found[names[2 * number]], gate[number])
            assert torch.equal(found[names[2 * number + 1]], up[number])
