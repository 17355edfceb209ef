"""A model's weights on a GPU are its checkpoint's numbers, through threads, pinned buffers and
streams, under a load that makes memory of one tensor the next one's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.weights import stream
from penstock.weights.checkpoint import read_header
from penstock.weights.stream import stream_tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("piece", "ahead"), [(1 << 16, 1 << 20), (16 << 20, 512 << 20)])
@torch.inference_mode()
def test_numbers_arrive_as_they_are(
    tmp_path: Path, piece: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PIECE", piece)
    monkeypatch.setattr(stream, "AHEAD", ahead)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{k}": torch.randint(
            0, 255, (1 + 3_000_000 * (k % 4), 2), generator=generator, dtype=torch.uint8
        )
        for k in range(60)
    }
    save_file(tensors, tmp_path / "all.safetensors")
    device = torch.device("cuda", torch.cuda.current_device())
    work = torch.zeros(4096, 4096, device=device)
    for entry, tensor in stream_tensors(read_header(tmp_path / "all.safetensors"), device):
        for _ in range(5):
            work = work @ work  # what is freed below is still in line behind it
        held = tensor.clone()
        del tensor
        assert torch.equal(held.cpu(), tensors[entry.name]), entry.name
