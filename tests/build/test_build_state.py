"""`.build`: a stage that ended is not run again; another build in the folder, or another asking, is
refused by name."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from penstock.artifact.manifest import MANIFEST, STATE
from penstock.build import build_state
from penstock.build.build_state import BuildState, Result, check_disk
from penstock.errors import CapacityError, UsageError

pytestmark = pytest.mark.torch  # the room's others load it


def fails() -> Result:
    raise ZeroDivisionError


def test_a_stage_that_ended_is_not_run_again(tmp_path: Path) -> None:
    with BuildState(tmp_path / "out", {"model": "demo"}) as state:
        assert state.stage("fetch", lambda: {"a": (1, 2)}) == {"a": [1, 2]}  # as it will be read
        with pytest.raises(ZeroDivisionError):
            state.stage("work", fails)
    with BuildState(tmp_path / "out", {"model": "demo"}) as state:
        assert state.stage("fetch", fails) == {"a": [1, 2]}
        assert state.known("work") is None
        state.finish()
    assert list((tmp_path / "out").iterdir()) == []


def test_what_fails_before_anything_long_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), BuildState(tmp_path / "out", {"workload": "nofile"}):
        fails()
    assert not (tmp_path / "out").exists()
    with (
        pytest.raises(ZeroDivisionError),
        BuildState(tmp_path / "out", {"workload": "file"}) as state,
    ):
        state.keep("work", {})
        fails()
    assert (tmp_path / "out" / STATE / "work.json").exists()


def test_an_option_that_is_refused_before_weights_are_written_leaves_nothing(
    tmp_path: Path,
) -> None:
    for written in (False, True):
        with (
            pytest.raises(UsageError, match="no such matrix"),
            BuildState(tmp_path / "out", {}) as state,
        ):
            state.keep("work", {})
            if written:
                (tmp_path / "out" / "config.json").write_text("{}")
            raise UsageError("no such matrix")
        assert (tmp_path / "out").exists() == written


def test_a_broken_result_is_named(tmp_path: Path) -> None:
    with BuildState(tmp_path, {}) as state:
        (state.folder / "work.json").write_text("{")
        with pytest.raises(UsageError, match=r"work.json is broken .*: remove it"):
            state.known("work")
        (state.folder / "work.json").unlink()


def test_another_asking_is_refused_and_what_differs_named(tmp_path: Path) -> None:
    BuildState(tmp_path, {"model": "demo", "quantization": "int8"}).__exit__(None, None, None)
    with pytest.raises(
        UsageError,
        match=r'asked otherwise \(quantization: "int8" there, "fp8" now\): give the same',
    ):
        BuildState(tmp_path, {"model": "demo", "quantization": "fp8"})


def test_two_builds_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        BuildState(tmp_path, {}),
        pytest.raises(UsageError, match="is being built by another process: wait for it"),
    ):
        BuildState(tmp_path, {})
    with BuildState(tmp_path, {}) as state:
        assert fcntl.flock(state._lock, fcntl.LOCK_EX | fcntl.LOCK_NB) is None


@pytest.mark.parametrize(
    ("name", "told"), [("notes.txt", "no build wrote"), (MANIFEST, "is built already")]
)
def test_a_folder_with_something_else_is_left_alone(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=told):
        BuildState(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("gone", [(), ("asked.json",), ("asked.json", "lock")], ids=str)
def test_what_a_kill_behind_the_manifest_left_is_taken_away(
    gone: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where it came while the folder was taken away; not that of a retune, nor while a process
    is at it."""

    def again() -> bool:
        with pytest.raises(UsageError, match="is built already"):
            BuildState(tmp_path, {})
        return (tmp_path / STATE).exists()

    for retune in (False, True):
        with BuildState(tmp_path, {"retune": retune}, retune=retune) as state:
            state.keep("work", {})
            (tmp_path / MANIFEST).write_text("{}")
            if not gone:
                assert again()
        for name in gone:
            (tmp_path / STATE / name).unlink()
        assert again() == (retune and not gone)


def test_a_file_and_a_folder_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file: name a folder"):
        BuildState(tmp_path / "file", {})
    with pytest.raises(Exception, match="cannot be written"):
        BuildState(tmp_path / "file" / "below", {})


def test_a_retuned_artifact_keeps_its_manifest(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    with BuildState(tmp_path, {"retune": True}, retune=True) as state:
        assert (tmp_path / STATE).is_dir()
        state.finish()
    assert (tmp_path / MANIFEST).read_text() == "{}"


def test_too_small_a_disk_is_told_with_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 3_000_000_000})
    monkeypatch.setattr(build_state.shutil, "disk_usage", lambda folder: usage)
    check_disk(tmp_path / "not" / "there", 3_000_000_000, "it")
    with pytest.raises(
        CapacityError,
        match=r"an artifact of m takes 4\.0 GB, and the disk of .* has 3\.0 GB free: make",
    ):
        check_disk(tmp_path / "not" / "there", 4_000_000_000, "an artifact of m")
