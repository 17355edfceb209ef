"""`scripts/edition.sh`: the commands that it prints and runs, what an installation lacks, and how it is
stopped."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from penstock.cli.root import app

SCRIPT = Path(__file__).parents[2] / "scripts" / "edition.sh"


def test_the_script_prints_commands_that_the_command_line_reads(tmp_path: Path) -> None:
    words = ["bash", str(SCRIPT), "--print", str(tmp_path / "out"), "llama-3.2-1b", "qwen3-30b-a3b"]
    environment = {**os.environ, "REFERENCE": "ref.json", "PRICE": "3.5", "PYTHON": sys.executable}
    told = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and not (tmp_path / "out").exists()
    commands = [shlex.split(line) for line in told.stdout.splitlines()]
    runs = [each for each in commands if each[3:5] == ["bench", "run"]]
    names = {each[each.index("--configuration") + 1] for each in runs}
    assert len(runs) == 10 and names == {"default", "batch", "fa3", "triton"}
    reads = CliRunner()
    for each in commands:
        if each[1] == "-m":
            # refused for what is not here, not for how it is written
            said = reads.invoke(app, [*each[3:], "--seed", "x"] if each[4] == "run" else each[3:])
            assert "--seed" in said.output or "ref.json is no reference" in said.output
    shapes = [word for word in runs[0] if word.startswith("--shape=")]
    assert shapes == [
        f"--shape={each}" for each in ("128x1024", "1024x128", "1000x1000", "monkeys")
    ]


def test_the_script_says_what_it_does_where_nothing_is_asked() -> None:
    told = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert told.returncode == 2 and "scripts/edition.sh [--print] OUT" in told.stderr


def executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def edition(folder: Path, **variables: Any) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script in a folder, as Penstock a program that notes its words. Returns what came,
    and the notes."""
    notes = folder / "notes"
    python = executable(folder / "python", f'echo "$*" >> {notes}')
    environment = {**os.environ, "PYTHON": str(python), **variables}
    words = ["bash", str(SCRIPT), "out", "llama-3.2-1b"]
    told = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    return told, notes.read_text().splitlines() if notes.exists() else []


def test_parts_that_an_engine_carries_itself_are_not_lacking(tmp_path: Path) -> None:
    site = tmp_path / "site" / "vllm"
    (site / "third_party" / "deep_gemm").mkdir(parents=True)
    (site / "__init__.py").write_text("raise SystemExit('an engine is not imported')")
    (site / "_flashmla_C.abi3.so").touch()
    start = f"PYTHONPATH={tmp_path}/site exec {sys.executable} -S"
    vllm = executable(tmp_path / "vllm", f'{start} "$@"')
    told, notes = edition(tmp_path, PYTHON_OF_VLLM="./vllm")
    runs = [each for each in notes if "bench run" in each]
    assert told.returncode == 0 and len(runs) == 3, told.stderr
    assert all("--lacks FlashInfer --lacks DeepGEMM --shape" in each for each in runs[1:])
    (site / "third_party" / "deep_gemm" / "include").mkdir()
    _, notes = edition(tmp_path, PYTHON_OF_VLLM=str(vllm), ENGINES="vllm")
    assert "--lacks FlashInfer --shape" in notes[-1]
    # a record of Penstock's has its commit only where the measuring interpreter runs it too
    assert "--python" not in runs[0] and f"--python {tmp_path}/./vllm" in runs[1]
    assert f"--out {tmp_path}/out/records/penstock-default-llama-3.2-1b" in runs[0]
    assert "sglang: left out, PYTHON_OF_SGLANG is not set" in told.stderr


def test_an_engine_that_is_asked_for_and_not_here_is_said_in_a_line(tmp_path: Path) -> None:
    told, notes = edition(tmp_path, ENGINES="penstock vllm")
    assert (told.returncode, told.stderr, notes) == (2, "vllm: PYTHON_OF_VLLM is not set\n", [])
    told, notes = edition(tmp_path, PYTHON_OF_VLLM="/bin/false")
    assert told.returncode == 1 and "failed: vllm: /bin/false does not run" in told.stderr
    assert not any("--engine vllm" in each for each in notes)


def test_more_flags_and_contexts_reach_the_server_and_only_the_flags_its_answers(
    tmp_path: Path,
) -> None:
    words = ["bash", str(SCRIPT), "--print", "out", "llama-3.2-1b"]
    more = {"CONTEXT": "9000", "MORE_FLAGS": "--x 1", "ENGINES": "penstock", "REFERENCE": "r"}
    told = subprocess.run(
        words, env={**os.environ, **more}, capture_output=True, text=True, timeout=60
    )
    _, answers, run = (shlex.split(each) for each in told.stdout.splitlines())
    flags = [each[each.index("--options") + 1] for each in (answers, run)]
    exact = "--dtype bfloat16 --x 1"
    assert flags == [exact, f"--load-format dummy --max-model-len 9000 {exact}"]


def test_a_stopped_edition_ends_what_it_runs_and_begins_nothing_more(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    python = executable(
        tmp_path / "python", f'[ "$4" = run ] || exit 0\necho $$ >> {begun}\nexec sleep 600'
    )
    environment = {**os.environ, "PYTHON": str(python), "PYTHON_OF_VLLM": "/bin/true"}
    words = ["bash", str(SCRIPT), str(tmp_path / "out"), "llama-3.2-1b"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as script:
        while not begun.exists() or not begun.read_text():
            assert script.poll() is None
            time.sleep(0.01)
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 143
    (child,) = begun.read_text().split()
    assert not Path(f"/proc/{child}").exists()
