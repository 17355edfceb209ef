"""Checksums: of files of any length, the same by any number of threads, and whatever differs is
named."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from penstock.artifact import checksums
from penstock.artifact.checksums import sum_files, verify_files
from penstock.errors import CheckpointError

PIECE = 1000  # of these tests


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "PIECE", PIECE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(7)
    for name, size in {"empty": 0, "a": 1, "whole": PIECE, "more": 3 * PIECE + 17}.items():
        (tmp_path / name).write_bytes(draw.bytes(size))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "k.cubin").write_bytes(draw.bytes(2 * PIECE))
    return tmp_path


NAMES = ["empty", "a", "whole", "more", "kernels/k.cubin"]


def test_a_sum_a_piece(folder: Path) -> None:
    sums = sum_files(folder, NAMES)
    assert [(sums[name].bytes, len(sums[name].pieces)) for name in NAMES] == [
        (0, 0),
        (1, 1),
        (1000, 1),
        (3017, 4),
        (2000, 2),
    ]
    assert sums["more"].pieces[3] == sha256((folder / "more").read_bytes()[3000:]).hexdigest()
    assert sums == sum_files(folder, NAMES, threads=1)
    verify_files(folder, sums)


@pytest.mark.parametrize("name", ["a", "more", "kernels/k.cubin"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_flipped_bit_is_found_and_its_file_named(name: str, threads: int, folder: Path) -> None:
    sums = sum_files(folder, NAMES)
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=f"{name} is not as it was built.*copy the artifact again, or build it",
    ):
        verify_files(folder, sums, threads)
    del sums[name]
    verify_files(folder, sums, threads)


def test_a_size_that_differs_and_a_missing_file_are_told_before_any_sum(folder: Path) -> None:
    sums = sum_files(folder, NAMES)
    (folder / "whole").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="whole has 5 bytes and was built with 1000: copy"):
        verify_files(folder, sums)
    (folder / "whole").unlink()
    with pytest.raises(CheckpointError, match="whole is missing"):
        verify_files(folder, sums)
    with pytest.raises(CheckpointError, match="whole is missing"):
        sum_files(folder, NAMES)
