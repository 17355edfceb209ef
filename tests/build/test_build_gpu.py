"""A build on a GPU: its binaries go along when the artifact moves, and nothing is compiled where it
is opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from build_drive import build

from penstock.artifact.manifest import read_manifest
from penstock.kernels.tunables import TUNABLES

pytestmark = pytest.mark.gpu

TOLD = (
    "--device",
    "cuda",
    "--shape",
    "64x32:16",
    "--shape",
    "200x8:3",
    "--tune-minutes",
    "0.5",
    "--kv-cache-tokens",
    "20000",  # beside other tests
    "--max-kl",
    "0.05",  # what the demo model is asked here means nothing to it
)
OPEN = """
import json, sys
from penstock import LLM, SamplingParams
with LLM(sys.argv[1], sealed=True) as llm:
    odd = SamplingParams(n=3, max_tokens=9, top_p=0.9, logprobs=3, repetition_penalty=1.1, seed=1)
    plain = SamplingParams(max_tokens=5, temperature=0)
    asked = llm.generate(["The answer is", "Tom has"], [odd, plain], use_tqdm=False)
    tokens = [len(output.token_ids) for each in asked for output in each.outputs]
    print(json.dumps({"tokens": tokens, "compiled": llm.stats()["jit_compiles"]}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("build") / "artifact"
    done = build(out, "--quantization", "fp8", "--quantize-lm-head", told=TOLD)
    assert done.returncode == 0, done.stderr
    print(done.stderr, done.stdout)
    return out


def opened(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", OPEN, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_what_was_decided_is_in_the_manifest(built: Path) -> None:
    manifest = read_manifest(built)
    names = {decision.name for decision in manifest.decisions}
    assert {
        "quantization",
        "max_num_batched_tokens",
        "steps_ahead",
        "max_num_seqs",
        "kv_cache_dtype",
    } <= names
    assert (
        {each.name for each in TUNABLES}
        >= {"linear_fp8.streamed_rows", "attention.few_programs"}
        <= names
    )
    assert manifest.built_on.capability is not None and manifest.built_on.triton is not None
    assert any(name.startswith("kernels/") and name.endswith(".cubin") for name in manifest.files)
    assert manifest.quality is not None and manifest.quality.kl_mean < manifest.quality.bound
    assert len(manifest.step_seconds.rows) > 5


def test_it_moves_and_nothing_is_compiled_there(built: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(built, tmp_path / "elsewhere"))
    done = opened(moved, tmp_path / "empty")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["compiled"] == 0 and len(told["tokens"]) == 4 and 0 < max(told["tokens"]) <= 9


def test_without_its_binaries_sealed_refuses(built: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(built, tmp_path / "bare", ignore=shutil.ignore_patterns("kernels")))
    done = opened(bare, tmp_path / "empty")
    assert done.returncode != 0 and "would have to be compiled" in done.stderr


def test_choices_are_timed_again(built: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(built, tmp_path / "again"))
    command = [
        sys.executable,
        "-m",
        "penstock",
        "build",
        "--retune",
        str(moved),
        "--tune-minutes",
        "0.2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    before, after = read_manifest(built), read_manifest(moved)
    assert (
        after.source == before.source
        and after.quality == before.quality
        and after.expected != before.expected
    )
    assert opened(moved, tmp_path / "empty").returncode == 0
