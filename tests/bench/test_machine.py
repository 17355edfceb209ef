"""What a record says of where it was measured: the machine, its cores, and the sources of the
bench."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.almanac.record import MachineInfo
from penstock.bench import write_record
from penstock.bench.cpu_pinning import cores_here, server_share
from penstock.bench.machine_probe import machine_of, this_machine
from penstock.bench.server_process import ServerProcess, free_port
from penstock.bench.write_record import archived, commit, word
from penstock.errors import UsageError


def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, code: int = 0) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{rows}'\nexit {code}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


ROW = "NVIDIA H200, 143771, 580.95.05, 345, 3201, 1980"


def test_gpus_are_those_that_the_engine_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, f"{ROW}\\n{ROW}\\n")
    gpu = this_machine().gpu
    assert gpu is not None and (gpu.name, gpu.count, gpu.memory_mib) == ("NVIDIA H200", 2, 143771)
    assert gpu.driver == "580.95.05" and "SM 345 MHz of 1980" in gpu.clocks
    for visible, count in (("1", 1), ("0,1", 2), ("GPU-8932f937", 1), ("", None), ("-1", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        gpu = this_machine().gpu
        assert (gpu.count if gpu is not None else None) == count
    # by --env, whatever this process may see
    hidden = this_machine({"CUDA_VISIBLE_DEVICES": "0"}).gpu
    assert hidden is not None and hidden.count == 1


def test_a_machine_elsewhere_is_what_its_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, f"{ROW}\\n")
    told = MachineInfo(gpu=None, cpu="far", cores=64, memory_mib=9, system="Linux", python="3.12")
    (tmp_path / "m.json").write_text(told.model_dump_json())
    assert machine_of(tmp_path / "m.json", "http://192.0.2.1:8000", started=False) == told
    assert machine_of(None, "http://localhost:8000", started=False).cpu == this_machine().cpu
    with pytest.raises(
        UsageError, match=r"the server is on 192\.0\.2\.1: describe that machine"
    ) as refused:
        machine_of(None, "http://192.0.2.1:8000", started=False)
    # what the line says is taken
    (tmp_path / "m.json").write_text(str(refused.value).split("FILE.json, as ")[1])
    shown = machine_of(tmp_path / "m.json", "http://192.0.2.1:8000", started=False)
    assert shown.gpu is not None and shown.gpu.name == "NVIDIA H200"
    with pytest.raises(UsageError, match="describes no machine: No such file"):
        machine_of(tmp_path / "none.json", None, started=False)


# --- cores

several = pytest.mark.skipif(
    len(cores_here()) < 2, reason="needs two cores, and a system that pins"
)


@pytest.mark.parametrize(
    ("cores", "processes", "asked", "server"),
    [
        ([0, 1], 1, None, [0]),
        (list(range(16)), 4, None, list(range(12))),
        ([2, 5, 7], 9, None, [2]),
        ([0, 1, 2, 3], 1, 2, [0, 1]),
        ([3], 1, None, []),
        ([], 1, None, []),
    ],
)
def test_the_server_has_all_but_one_a_client(
    cores: list[int], processes: int, asked: int | None, server: list[int]
) -> None:
    assert server_share(cores, processes, asked) == server


@pytest.mark.parametrize(("cores", "asked"), [([0, 1], 2), ([0, 1], 5), ([0], 1), ([], 1)])
def test_a_client_without_a_core_is_refused(cores: list[int], asked: int) -> None:
    with pytest.raises(UsageError, match="client needs one too"):
        server_share(cores, 1, asked)


@several
def test_a_server_is_held_to_its_cores(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    last = cores_here()[-1]
    with ServerProcess(command, port, tmp_path / "log", ready="/", cores=(last,)) as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert [os.sched_getaffinity(int(each)) for each in [server.pid, *children]] == [
            {last},
            {last},
        ]


# --- sources

ROOT = Path(__file__).parents[2]


def test_an_archive_knows_its_commit(tmp_path: Path) -> None:
    asked = ["git", "-C", str(ROOT), "archive", "HEAD", "src/penstock/archived.txt"]
    done = subprocess.run(asked, capture_output=True)
    if done.returncode:
        pytest.skip("this is no checkout that has the file")
    subprocess.run(["tar", "x", "-C", str(tmp_path)], input=done.stdout, check=True)
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert archived(tmp_path / "src/penstock/archived.txt") == head.stdout[:12]


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.check_output(["git", "-C", str(folder), *who, *words], text=True).strip()


def put(folder: Path, name: str, text: str, *, commit: bool = True) -> str:
    """Writes and adds a file, and commits it unless told otherwise; the head that comes of it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    git(folder, "add", "--force", name)
    if commit:
        git(folder, "commit", "-q", "-m", name)
    return git(folder, "rev-parse", "HEAD")[:12]


def test_a_checkout_that_was_changed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    head = put(tmp_path, "src/a.py", "1")
    monkeypatch.setattr(write_record, "HOUSE", tmp_path / "src")
    assert commit() == head
    (tmp_path / "src" / "new.txt").write_text("lies there")
    assert commit() == head
    told = []
    for text in ("2", "3", "2", "\xff"):  # changed, changed further, as it was; no UTF-8
        (tmp_path / "src" / "a.py").write_text(text, encoding="latin-1")
        told.append(commit() or "")
    assert all(each.startswith(f"{head}+changed.") and each == word(each) for each in told)
    assert told[0] == told[2] and len(set(told)) == 3
    assert commit() != put(tmp_path, "src/a.py", "2") == commit()
    monkeypatch.setattr(write_record, "HOUSE", tmp_path.parent)
    assert commit() is None
