"""`penstock inspect`: what it prints of an artifact, and how it names one that is unfinished, broken, or none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from made_artifact import MANIFEST, edit, flip, make_artifact

from penstock.artifact.manifest import (
    BuiltFor,
    ExpectedWork,
    Manifest,
    Quality,
    manifest_json,
    read_manifest,
)
from penstock.errors import CheckpointError
from penstock.jobs.inspect_artifact import print_artifact

pytestmark = pytest.mark.torch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_artifact(tmp_path / "made", max_num_seqs=64)
    work = BuiltFor(
        told="64x32:8", prompts=8, samples=16, concurrency=8, prompt_tokens=64, longest_prompt=70, output_tokens=32,
        longest_output=33, shared_tokens=5,
    )  # fmt: skip
    quality = Quality(
        agreement=0.985, kl_mean=1e-4, kl_worst=2e-3, bound=0.01, tokens=512, by_matrix={"down": 1e-5},
        kept_wide=["head"],
    )  # fmt: skip
    expected = ExpectedWork(
        told="64x32:8", output_tokens_per_second=12345.6, noise_percent=1.0, requests_per_second=3.0, share_of_limit=0.5
    )
    edit(made, built_for=[work], quality=quality, expected=[expected], revision="abc", tunables={"rows": 16})
    return made


def test_a_person_reads_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_artifact(folder, as_json=False)
    said = capsys.readouterr().out
    for part in (
        "demo at abc", "built by penstock", "at most 70, 5 shared by all", "16 answers of 32",
        "max_num_seqs            64", "64 (default 1024): +12.4 % over the default, noise 1.1 %",
        "98.50% of 512", "1.00e-04 nats", "by down", "head",
        "12,346 tok/s, 3.00 requests/s, 50% of the hardware's limit", "model.safetensors", "kernels/", "in 1 files",
    ):  # fmt: skip
        assert part in said, part


def test_the_command_gives_json_and_loads_no_torch(folder: Path) -> None:
    code = (
        f"import sys; sys.argv = ['penstock', 'inspect', {str(folder)!r}, '--json']\nfrom penstock.cli import app\n"
        "app(standalone_mode=False)\nassert not {'torch', 'triton'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert msgspec.json.decode(ended.stdout, type=Manifest) == read_manifest(folder)
    assert ended.stdout == manifest_json(read_manifest(folder)) == (folder / MANIFEST).read_text()


def test_what_is_not_whole_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not as it was built"):
        print_artifact(folder, as_json=True)
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="is no artifact"):
        print_artifact(folder, as_json=False)
    (folder / ".build").mkdir()
    with pytest.raises(CheckpointError, match="is an unfinished build"):
        print_artifact(folder, as_json=False)
    assert capsys.readouterr().out == ""
