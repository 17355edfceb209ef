"""A whole build of the demo model, by the command line: killed on its way, gone on with, opened,
moved, timed again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from build_drive import STAGES, build, kill_at
from msgspec.structs import replace

from penstock import LLM, SamplingParams
from penstock.artifact.checksums import verify_files
from penstock.artifact.describe import describe
from penstock.artifact.manifest import STATE, Decision, find_manifest, read_manifest, write_manifest
from penstock.build.options import BuildOptions
from penstock.build.run_build import run_build
from penstock.errors import CheckpointError, UsageError

pytestmark = pytest.mark.torch


def flip(path: Path) -> None:
    """Turns one bit in the middle of a file round."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Its folder, what it printed, and what it said on the way, in the sitting behind a kill."""
    out = tmp_path_factory.mktemp("build") / "artifact"
    killed = kill_at(out, "tune", random.Random(14).random())
    assert killed.in_time and (out / STATE).is_dir()
    with pytest.raises(CheckpointError, match="unfinished build"):
        find_manifest(out)
    flip(out / "model.safetensors")
    refused = build(out)
    assert refused.returncode == 2 and "model.safetensors is not as it was built" in refused.stderr
    assert f"rm -r {out}" in refused.stderr and "Traceback" not in refused.stderr
    flip(out / "model.safetensors")
    done = build(out, "--price", "3.6")
    assert done.returncode == 0, done.stderr
    for stage in STAGES:
        assert (f" {stage}: done before" in done.stderr) == (stage in ("fetch", "work", "weights"))
    return out, done.stdout, done.stderr


def test_a_build_says_what_it_does_and_what_it_came_to(built: tuple[Path, str, str]) -> None:
    folder, out, progress = built
    for place, stage in enumerate(STAGES, 1):
        assert f"penstock: {place}/7 {stage}: " in progress
    assert " int8 " in out and " output tok/s " in out
    assert (
        "expect, at $3.6 an hour\n" in out
        and "a million output tokens\n" in out
        and " ms a request" in out
    )
    assert out == f"{describe(folder, read_manifest(folder))}\n\npenstock serve {folder}\n"


def test_the_manifest_holds_all_of_it(built: tuple[Path, str, str]) -> None:
    manifest = read_manifest(built[0])
    assert (manifest.model, manifest.revision, manifest.built_on.device) == ("demo", None, "cpu")
    assert manifest.engine == {"max_model_len": 96}
    assert manifest.quality is not None and 0 < manifest.quality.kl_mean < manifest.quality.bound
    assert manifest.quality.agreement > 0.9 and manifest.quality.tokens > 100
    assert manifest.step_seconds.rows[0] == 4 and all(
        seconds > 0 for seconds in manifest.step_seconds.seconds
    )
    assert manifest.expected[0].told == "24x12:4" and manifest.built_for[0].concurrency == 4
    files = {path.name for path in built[0].iterdir()} - {"penstock.json"}
    assert manifest.files.keys() == files and STATE not in files
    verify_files(built[0], manifest.files)


def test_an_artifact_is_a_model_folder(built: tuple[Path, str, str]) -> None:
    with LLM(str(built[0]), device="cpu") as llm:
        asked = llm.generate(
            ["The answer is"], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False
        )
    assert len(asked[0].outputs[0].token_ids) == 4


def test_a_damaged_artifact_is_not_timed_again(
    built: tuple[Path, str, str], tmp_path: Path
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(built[0], spoilt)
    flip(spoilt / "model.safetensors")
    before = (spoilt / "penstock.json").read_bytes()
    options = BuildOptions(model=str(spoilt), out=str(spoilt), retune=True, tune_minutes=0.001)
    with pytest.raises(CheckpointError, match="not as it was built"):
        run_build(options, lambda path: (0, lambda defaults: iter(())))
    assert (spoilt / "penstock.json").read_bytes() == before and not (spoilt / STATE).exists()


def test_matrices_that_nothing_is_kept_of_are_refused(tmp_path: Path) -> None:
    """Nothing is timed, so weights stay as they are: a manifest would keep a pattern that says
    nothing."""
    options = BuildOptions(
        model="demo",
        out=str(tmp_path / "out"),
        shapes=["8x8:2"],
        tune_minutes=0.0,
        keep_wide=["*.down_proj"],
        knobs={"device": "cpu"},
    )
    with pytest.raises(
        UsageError, match="keep_wide is of weights that are quantized, and these stay as they are"
    ):
        run_build(options, lambda path: (0, lambda defaults: iter(())))
    assert not (tmp_path / "out").exists()


def test_an_artifact_that_moved_is_timed_again(
    built: tuple[Path, str, str], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(built[0], moved)
    # which there is no time for again
    fewer = Decision(name="steps_ahead", chosen=0, default=1, won_percent=9.0)
    whole = read_manifest(moved)
    before = replace(
        whole, engine={**whole.engine, "steps_ahead": 0}, decisions=[whole.decisions[0], fewer]
    )
    write_manifest(moved, before)
    options = BuildOptions(model=str(moved), out=str(moved), retune=True, tune_minutes=0.001)
    after = run_build(options, lambda path: (0, lambda defaults: iter(())))
    assert after == read_manifest(moved)
    same = ("model", "source", "price", "quality", "files", "engine", "built_for")
    assert {name: getattr(after, name) for name in same} == {
        name: getattr(before, name) for name in same
    }
    assert after.decisions[0] == before.decisions[0] and after.expected != before.expected
