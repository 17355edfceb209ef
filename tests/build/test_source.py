"""The model that is built of: every file summed, a changed one found, too little memory told before
the work."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from penstock.artifact.manifest import MANIFEST
from penstock.build import source as source_file
from penstock.build.make_weights import make_weights
from penstock.build.options import BuildOptions
from penstock.build.source import _sizes, check_room, check_unchanged, fetch
from penstock.demo import model_folder
from penstock.errors import CapacityError, CheckpointError, UsageError

pytestmark = pytest.mark.torch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder(), tmp_path / "model"))


def options(model: Path, out: Path, **more: Any) -> BuildOptions:
    return BuildOptions(model=str(model), out=str(out), **more)


def test_every_file_has_its_checksum(model: Path, tmp_path: Path) -> None:
    source = fetch(options(model, tmp_path / "out"))
    assert (
        source.files.keys() == {path.name for path in model.iterdir()} and source.revision is None
    )
    weights = source.files["model.safetensors"]
    assert weights.sha256 == sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert source.largest_shard == weights.bytes and source.quantized is None


def test_a_changed_checkpoint_is_named(model: Path, tmp_path: Path) -> None:
    source = fetch(options(model, tmp_path / "out"))
    (model / "config.json").touch()  # another time, the same bytes
    check_unchanged(source)
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    with pytest.raises(
        CheckpointError, match=r"config\.json was changed since this build began: put it back"
    ):
        check_unchanged(source)
    (model / "added.json").write_text("{}")
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"added\.json was changed"):
        check_unchanged(source)


def test_too_little_memory_is_told_before_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fetch(options(model, tmp_path / "out"))
    check_room(options(model, tmp_path / "out"), source)
    monkeypatch.setattr(source_file, "free_memory", lambda device: 1_000_000_000)
    with pytest.raises(
        CapacityError, match=r"takes 2\.2 GB of memory .*and 1\.0 GB is free: end what else"
    ):
        check_room(options(model, tmp_path / "out"), source)


def test_a_device_too_small_for_the_check_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rooms = fetch(options(model, tmp_path / "out")), [10_000_000_000, 5_000_000]
    monkeypatch.setattr(source_file, "free_memory", lambda device: rooms.pop(0))
    with pytest.raises(
        CapacityError, match=r"the unbuilt model, which the check .* and 0\.0 GB is free on cpu"
    ):
        check_room(options(model, tmp_path / "out", knobs={"device": "cpu"}), source)


@pytest.mark.parametrize("kind", ["none", "fp8", "int8", "int4", "nvfp4"])
def test_what_is_written_takes_what_was_told(kind: str, model: Path, tmp_path: Path) -> None:
    told = options(model, tmp_path / "out", quantization=kind)
    _, written = _sizes(told, source := fetch(told))
    (tmp_path / "out").mkdir()
    make_weights(told, source, kind, lambda line: None)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == pytest.approx(
        written, rel=0.08
    )


def test_an_artifact_is_no_model_to_build_of(model: Path, tmp_path: Path) -> None:
    (model / MANIFEST).write_text("{}")
    with pytest.raises(
        UsageError, match="is an artifact: time its choices again by penstock build --retune"
    ):
        fetch(options(model, tmp_path / "out"))


def test_weights_that_stay_are_linked_and_the_rest_copied(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    source = fetch(options(model, out))
    told: list[str] = []
    make_weights(options(model, out), source, "none", told.append)
    assert told == [
        f"6 files as they are, 1 of them hard links: never write over {model} in place, replace its"
        " files"
    ]
    assert (out / "model.safetensors").samefile(model / "model.safetensors")
    assert not (out / "config.json").samefile(model / "config.json")
    assert {path.name for path in out.iterdir()} == source.files.keys()
    (out / "config.json").write_text("kept")
    make_weights(options(model, out), source, "none", lambda line: None)
    assert (out / "config.json").read_text() == "kept"


def test_matrices_that_stay_wide(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    told = BuildOptions(
        model=str(model), out=str(out), keep_wide=["*.down_proj", "model.layers.0.self_attn.k_proj"]
    )
    make_weights(told, fetch(told), "int8", lambda line: None)
    from safetensors import safe_open

    with safe_open(out / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert (
        "model.layers.3.mlp.down_proj.weight" in names
        and "model.layers.3.mlp.up_proj.weight_packed" in names
    )
    for matrix in "qkv":  # they are multiplied together
        assert f"model.layers.0.self_attn.{matrix}_proj.weight" in names
        assert f"model.layers.1.self_attn.{matrix}_proj.weight_packed" in names
    wrong = BuildOptions(model=str(model), out=str(tmp_path / "other"), keep_wide=["layers.0"])
    with pytest.raises(
        UsageError, match=r"keep_wide 'layers.0' fits no matrix that would be quantized"
    ):
        make_weights(wrong, fetch(wrong), "int8", lambda line: None)
