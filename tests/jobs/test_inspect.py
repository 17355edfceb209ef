"""`penstock inspect`: what it prints of an artifact, and how it names one that is unfinished,
broken, or none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from made_artifact import MANIFEST, edit, flip, make_artifact

from penstock import __version__
from penstock.artifact.manifest import (
    BuiltFor,
    Decision,
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
        told="64x32:8",
        prompts=8,
        samples=16,
        concurrency=8,
        prompt_tokens=64,
        longest_prompt=70,
        output_tokens=32,
        longest_output=33,
        shared_tokens=5,
    )
    quality = Quality(
        agreement=0.985,
        kl_mean=1e-4,
        kl_worst=2e-3,
        bound=0.01,
        tokens=512,
        by_matrix={"down": 1e-5},
        kept_wide=["head"],
    )
    expected = ExpectedWork(
        told="64x32:8",
        output_tokens_per_second=12345.6,
        noise_percent=1.0,
        requests_per_second=3.0,
        share_of_limit=0.5,
        request_ms=82.25,
    )
    more = {"revision": "abc", "tunables": {"rows": 16}, "price": 3.6}
    edit(made, built_for=[work], quality=quality, expected=[expected], **more)
    return made


WORK = """\
built for
  64x32:8  8 prompts of 64 tokens (at most 70), 5 shared by all;  16 answers of 32 tokens (at most 33);  8 at once

decisions
  max_num_seqs   64       default 1024  +12.4 %  noise 1.1 %  9.05, by default 8.05 tok/s
  steps_ahead    1        stays                               not reached
  prefix_groups  default  stays                               asked for

opened with
  max_num_seqs  64
  rows          16
"""
CAME_TO = """\
answers, against the unbuilt model's
  same token        98.50% of 512 positions
  KL                0.0001 nats a token, at worst 0.002; bound 0.01
  KL by down alone  1e-05
  kept wide         head

expect, at $3.6 an hour
  64x32:8  12,346 output tok/s  3 requests/s      noise 1.0 %  82.2 ms a request (2.57 a token)\
  50% of the chip's limit  $0.081 a million output tokens
  1x2:3    2 output tok/s       0.333 requests/s  one run                                      \
                           $500 a million output tokens

files, every byte as it was built
"""


def test_a_person_reads_it_in_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_manifest(folder)
    more = [Decision(name="steps_ahead", chosen=1, default=1, note="not reached")]
    more += [Decision(name="prefix_groups", chosen=None, default=None, note="asked for")]
    slow = ExpectedWork(
        told="1x2:3",
        output_tokens_per_second=2.0,
        noise_percent=None,
        requests_per_second=1 / 3,
        request_ms=None,
    )
    edit(folder, decisions=[*before.decisions, *more], expected=[*before.expected, slow])
    print_artifact(folder, as_json=False)
    said = capsys.readouterr().out
    assert said.startswith(
        f"{folder}: demo at abc, built by penstock {__version__} for throughput\n\nbuilt on\n"
    )
    assert WORK in said and CAME_TO in said
    assert "  weights  1 file  " in said and "  kernels  1 file  " in said
    edit(folder, expected=[], price=None)
    print_artifact(folder, as_json=False)
    assert (
        "\nexpect\n  nothing was timed (--tune-minutes 0): defaults hold\n"
        in capsys.readouterr().out
    )


def test_the_command_gives_json_and_loads_no_torch(folder: Path) -> None:
    code = (
        f"import sys; sys.argv = ['penstock', 'inspect', {str(folder)!r}, '--json']\nfrom"
        " penstock.cli import app\napp(standalone_mode=False)\nassert not {'torch', 'triton'} &"
        " set(sys.modules)"
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


def test_what_is_no_folder_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "penstock.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"penstock.json is a file: name an artifact's folder"
    ):
        print_artifact(tmp_path / "penstock.json", as_json=False)
    with pytest.raises(
        CheckpointError, match=r"there is no folder .*/gone: name an artifact's folder"
    ):
        print_artifact(tmp_path / "gone", as_json=False)


@pytest.mark.parametrize("name", [MANIFEST, "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    assert path.is_file()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
        print_artifact(folder, as_json=False)
    assert "\n" not in str(caught.value)


def test_a_manifest_is_read_no_further_than_one_may_be_long(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 10 << 30)
    with pytest.raises(
        CheckpointError, match="it has 10,737,418,240 bytes, and 67,108,864 are the most"
    ):
        print_artifact(folder, as_json=False)
