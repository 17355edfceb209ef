"""Drawn safetensors headers and indexes: what is no checkpoint is one CheckpointError, whatever the
bytes are."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from fuzz_inputs import examples, mangled, sometimes_mangled
from fuzz_model_files import indexes, shards
from fuzz_targets import checkpoint
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

SHARD, INDEX = "model.safetensors", "model.safetensors.index.json"
LONG = settings(suppress_health_check=list(HealthCheck))


def sharded(header: dict[str, Any], data: int = 96) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(data))


SOUND = sharded(
    {
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [32], "data_offsets": [32, 96]},
    }
)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("single")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    (folder / "model-1.safetensors").write_bytes(SOUND)
    (folder / "folder.safetensors").mkdir()
    return folder


def test_a_shard_cut_at_every_byte(single: Path) -> None:
    for size in range(len(SOUND)):
        (single / SHARD).write_bytes(SOUND[:size])
        assert not checkpoint(single), size
    (single / SHARD).write_bytes(SOUND)
    assert checkpoint(single)


@settings(LONG, max_examples=examples(300))
@given(data=sometimes_mangled(shards()) | mangled(SOUND) | st.binary(max_size=64))
def test_a_shard_is_sound_or_a_checkpoint_error(single: Path, data: bytes) -> None:
    (single / SHARD).write_bytes(data)
    event(str(checkpoint(single)))


@settings(LONG, max_examples=examples(150))
@given(data=sometimes_mangled(indexes()))
def test_an_index_is_sound_or_a_checkpoint_error(several: Path, data: bytes) -> None:
    (several / INDEX).write_bytes(data)
    event(str(checkpoint(several)))


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2, 12], "data_offsets": [0, 96]} | changes}


FOUND = {
    "an infinite size": sharded(entry(shape=[1e400])),
    "a size beyond 64 bits": sharded(entry(shape=[2**70])),
    "sizes whose product wraps to 0": sharded(entry(shape=[2**40, 2**40], data_offsets=[0, 0])),
    "a negative size": sharded(entry(shape=[-2, -12])),
    "a size that is a text": sharded(entry(shape="24")),
    "a size that is a fraction": sharded(entry(shape=[24.5])),
    "a million dimensions": sharded(entry(shape=[2**62] * 1_000_000)),
    "an end before its begin": sharded(entry(shape=[0], data_offsets=[96, 0])),
    "an end of 4,000 digits": sharded(entry(data_offsets=[0, 10**4_000])),
    "a dtype that is a list": sharded(entry(dtype=["F32"])),
    "a name of a megabyte": sharded({"x" * 1_000_000: entry()["a"] | {"data_offsets": [0, 97]}}),
    "a header that says 100 MB": struct.pack("<Q", 99_999_999) + SOUND[8:],
    "a header that says 2**64 - 1": struct.pack("<Q", 2**64 - 1) + SOUND[8:],
    "a header of brackets": struct.pack("<Q", 200_000) + b"[" * 200_000,
}


@pytest.mark.parametrize("name", FOUND)
def test_headers_that_lie(single: Path, name: str) -> None:
    (single / SHARD).write_bytes(FOUND[name])
    assert not checkpoint(single)


NO_FILES = [
    "a" * 300 + ".safetensors",
    "\x00.safetensors",
    "\ud800.safetensors",
    "folder.safetensors",
]


@pytest.mark.parametrize("file", NO_FILES, ids=lambda file: ascii(file)[:12])
def test_names_that_no_file_can_have(several: Path, file: str) -> None:
    (several / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    assert not checkpoint(several)
