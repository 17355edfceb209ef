"""A whole build of the demo model, by the command line: what it writes, and that the engine takes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.artifact.checksums import verify_files
from penstock.artifact.manifest import read_manifest

pytestmark = pytest.mark.torch

TOLD = ["--shape", "24x12:4", "--quantization", "int8", "--tune-minutes", "0.01", "--max-model-len", "256"]


def build(out: Path, *told: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "build", "demo", "--device", "cpu", "--out", str(out), *told]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    out = tmp_path_factory.mktemp("build") / "artifact"
    done = build(out, *TOLD, "--price", "3.6")
    assert done.returncode == 0, done.stderr
    return out, done.stdout, done.stderr


def test_a_build_says_what_it_does_and_what_it_came_to(built: tuple[Path, str, str]) -> None:
    _, out, progress = built
    for place, stage in enumerate(("fetch", "work", "weights", "tune", "compile", "check", "pack"), 1):
        assert f"penstock: {place}/7 {stage}: " in progress
    assert "quantization: int8: asked for" in out and "output tok/s" in out
    assert "a million output tokens at $3.6 an hour" in out


def test_the_manifest_holds_all_of_it(built: tuple[Path, str, str]) -> None:
    manifest = read_manifest(built[0])
    assert (manifest.model, manifest.revision, manifest.built_on.device) == ("demo", None, "cpu")
    assert manifest.engine["device"] == "cpu" and manifest.engine["max_model_len"] == 256
    assert manifest.quality is not None and manifest.quality.kl_mean < manifest.quality.bound
    assert manifest.step_seconds.rows[0] == 4 and all(seconds > 0 for seconds in manifest.step_seconds.seconds)
    assert manifest.expected[0].told == "24x12:4" and manifest.built_for[0].concurrency == 4
    files = {path.name for path in built[0].iterdir()} - {"penstock.json"}
    assert manifest.files.keys() == files and ".build" not in files
    verify_files(built[0], manifest.files)


def test_an_artifact_is_a_model_folder(built: tuple[Path, str, str]) -> None:
    with LLM(str(built[0]), device="cpu") as llm:
        asked = llm.generate(["The answer is"], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert len(asked[0].outputs[0].token_ids) == 4


def test_a_built_folder_is_not_built_again(built: tuple[Path, str, str]) -> None:
    again = build(built[0], *TOLD)
    assert again.returncode == 2 and "is built already: name another --out" in again.stderr
