"""The bench's and the almanac's commands from end to end, against `fake_engine.py`: exit codes,
faults, files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from bench_runs import ENGINE
from made_records import write_records
from typer.testing import CliRunner, Result
from vllm_result import told

from penstock.almanac.record import Record
from penstock.bench.calibrate import Calibration, Rung, write_ceiling
from penstock.bench.cpu_pinning import cores_here
from penstock.cli import app

QUICK = [
    "--short",
    "--no-ladder",
    "--warm-up",
    "0.1",
    "--window",
    "0.5",
    "--longest",
    "600",
    "--drain",
    "0.1",
    "--at-once",
    "12",
    "--alone",
    "2",
    "--enough",
    "10",
    "--bisections",
    "1",
    "--goal",
    "1",
]


@pytest.fixture(autouse=True)
def no_ceiling_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of its GPUs: of a server at a URL nobody knows which of several it has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.bench.machine_probe._gpu", lambda visible: None)


def penstock(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def fake(folder: Path) -> Path:
    path = folder / "fake.toml"
    path.write_text(f"""
says = "for tests"
install = "nothing"
version = ["{{python}}", "--version"]
command = ["{{python}}", "{ENGINE}", "{{port}}"]
ready = "/health"
stop = "SIGTERM"
path = "/v1/completions"
ids = true
""")
    return path


def run(engine: Path, out: Path, *more: object) -> Result:
    words = ("--engine", engine, "--model", "tiny", "--shape", "8x4", "--out", out)
    return penstock("bench", "run", *words, *QUICK, *more)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run's folder, and what the run said."""
    folder = tmp_path_factory.mktemp("done")
    rung = Rung(1, 5000.0, 0.001, 4.0, 3000.0, 0.001, 20.0)
    with pytest.MonkeyPatch.context() as here:
        here.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        here.setattr("penstock.bench.machine_probe._gpu", lambda visible: None)
        write_ceiling(Calibration("a CPU", 2, "3.11", "0.1.0", "2026-11-20T00:00:00Z", [rung]))
        words = (
            "--price",
            "3",
            "--random-weights",
            "--env",
            "VLLM_X=1",
            "--model-name",
            "Tiny",
            "--processes",
            "1",
        )
        result = run(fake(folder), folder / "a", *words)
    assert result.exit_code == 0
    return folder / "a", result.stdout


def test_a_run_a_comparison_and_the_way_into_the_almanac(
    tmp_path: Path, done: tuple[Path, str]
) -> None:
    out, told = done
    assert "saturation" in told and "report/index.html" in told
    record = Record.model_validate_json((out / "8x4" / "record.json").read_text())
    assert (record.engine.name, record.model.name, record.model.weights) == (
        "fake",
        "Tiny",
        "random",
    )
    assert (
        record.engine.configuration.name == "tuned"
        and record.engine.configuration.environment["VLLM_X"] == "1"
    )
    assert (
        record.method.goals == [1.0] and record.method.short and record.method.price_per_hour == 3
    )
    cores = len(cores_here())
    assert record.machine.server_cores == (None if cores < 2 else cores - 1)
    assert cores < 2 or record.machine.cores == cores
    assert record.engine.version == ".".join(map(str, sys.version_info[:3]))
    assert (record.client.ceiling_events, record.client.ceiling_requests) == (5000.0, 3000.0)
    assert all(
        point.client.headroom is not None and point.client.headroom > 1 for point in record.points
    )
    compared = penstock("bench", "compare", out, out / "8x4")
    assert (
        compared.exit_code == 0
        and "B / A" in compared.stdout
        and "not alike: A is a short run" in compared.stdout
    )
    records = tmp_path / "records"
    added = penstock("almanac", "add", out, "--records", records)
    assert added.exit_code == 0 and len(list(records.rglob("*.json"))) == 1
    again = penstock("almanac", "add", out, "--records", records)
    assert again.exit_code == 1 and "added once" in again.stderr
    assert penstock("almanac", "validate", records, out).exit_code == 0


def test_the_almanac_of_this_folder_is_validated_with_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = penstock("almanac", "validate")
    assert nothing.exit_code == 2 and "no folder almanac/records here" in nothing.stderr
    write_records(tmp_path / "almanac" / "records", 3, rows=60)
    assert (
        "3 of 3 records hold together, 3 not re-derived" in penstock("almanac", "validate").stdout
    )
    first = sorted((tmp_path / "almanac" / "records").rglob("*.json"))[0]
    first.rename(first.with_name("elsewhere.json"))
    moved = penstock("almanac", "validate")
    assert moved.exit_code == 1 and "belongs at" in moved.stderr and "2 of 3" in moved.stdout
    inside = write_records(tmp_path / "points" / "of-mine", 1, rows=60)
    assert (
        "1 of 1" in penstock("almanac", "validate", tmp_path / "points" / "of-mine").stdout
        and len(inside) == 1
    )


def test_a_forged_record_is_refused_by_name_and_the_others_are_not(
    tmp_path: Path, done: tuple[Path, str]
) -> None:
    shutil.copytree(done[0], tmp_path / "a")
    assert "1 of 1 records" in penstock("almanac", "validate", tmp_path / "a").stdout
    path = tmp_path / "a" / "8x4" / "record.json"
    forged = json.loads(path.read_text())
    forged["points"][0]["output_tokens"] += 4
    (tmp_path / "a" / "8x4" / "forged.json").write_text(json.dumps(forged))
    found = penstock("almanac", "validate", tmp_path / "a")
    assert found.exit_code == 1 and "1 of 2 records" in found.stdout
    assert "refused" in found.stderr and "forged.json" in found.stderr
    assert penstock("almanac", "validate", tmp_path / "nothing").exit_code == 1
    (tmp_path / "empty").mkdir()
    assert penstock("almanac", "validate", tmp_path / "empty").exit_code == 2


def test_nothing_measured_is_an_error_of_one_line(tmp_path: Path) -> None:
    found = run(fake(tmp_path), tmp_path / "a", "--options", "begins=no says='no GPU here'")
    assert found.exit_code == 1 and "nothing could be measured: did not start" in found.stderr
    assert (
        found.stderr.strip().splitlines()[-1].startswith("penstock: ")
        and "no GPU here" in found.stderr
    )


def imported(folder: Path, *more: str, text: str | None = None) -> Result:
    """What `bench import` makes of a file of vLLM's."""
    (folder / "vllm.json").write_text(json.dumps(told()) if text is None else text)
    words = (
        "--engine-version",
        "0.26.0",
        "--command",
        "vllm serve m --max-num-seqs 8",
        "--dtype",
        "bfloat16",
    )
    return penstock("bench", "import", folder / "vllm.json", "--out", folder / "i", *words, *more)


def test_what_another_client_has_measured_is_imported(tmp_path: Path) -> None:
    found = imported(tmp_path)
    assert found.exit_code == 0 and "vllm 0.26.0" in found.stdout
    assert penstock("almanac", "validate", tmp_path / "i").exit_code == 0
    assert imported(tmp_path).exit_code == 2  # never into a folder that is there


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "a URL, or --engine NAME"),
        (("http://127.0.0.1:1", "--engine", "vllm"), "not both"),
        (("http://127.0.0.1:1", "--options", "x"), "--options goes with --engine alone"),
        (("http://127.0.0.1:1", "--starts", "2"), "--starts goes with --engine alone"),
        (
            ("--engine", "penstock", "--engine-version", "1"),
            "--engine-version goes with a URL alone",
        ),
        (
            ("--engine", "nosuch"),
            "there is no engine 'nosuch': there are llamacpp, penstock, transformers, vllm",
        ),
        (("http://127.0.0.1:1",), "nothing serves at http://127.0.0.1:1/"),
        (("http://192.0.2.7:1",), "describe that machine with --machine FILE.json"),
        (("ftp://x",), "is no URL of a server"),
        (("http://127.0.0.1:1", "--goal", "-1"), "--goal -1.0 is no time"),
        (("http://127.0.0.1:1", "--short", "--full"), "give one"),
        (
            ("http://127.0.0.1:1", "--window", "99", "--longest", "9"),
            "--longest 9 is less than --window 99",
        ),
        (
            ("--engine", "vllm", "--python", "/nowhere/python"),
            "vllm cannot be asked for its version",
        ),
        (("--engine", "penstock", "--env", "X"), "--env 'X' is no NAME=VALUE"),
        (
            ("--engine", "penstock", "--options", "a 'b"),
            """--options "a 'b" is none as a shell takes it: No closing""",
        ),
        (("http://127.0.0.1:1", "--python", "p"), "--python goes with --engine alone"),
        (
            ("http://127.0.0.1:1", "--tokenizer", "t"),
            "--tokenizer is of no use where prompts go as ids",
        ),
        (
            ("http://127.0.0.1:1", "--text", "--vocabulary", "99"),
            "--vocabulary is of no use where prompts go as texts",
        ),
        (
            ("http://127.0.0.1:1", *(f"--goal={at}" for at in range(1, 22))),
            "21 goals: a record holds 20",
        ),
    ],
)
def test_what_cannot_be_asked_is_told_in_one_line(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    found = penstock(
        "bench", "run", *words, "--model", "m", "--shape", "8x4", "--out", tmp_path / "o"
    )
    assert found.exit_code in (1, 2) and says in found.stderr
    assert found.stderr.strip().count("\n") == 0 and found.stderr.startswith("penstock: ")
