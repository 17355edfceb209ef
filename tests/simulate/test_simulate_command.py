"""`penstock simulate` by its command line, and a table measured and simulated with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from made_artifact import edit, make_artifact
from made_steps import made_file, made_table, step_seconds
from typer.testing import CliRunner, Result

from penstock.artifact.manifest import BuiltFor, StepSeconds
from penstock.artifact.step_file import read_steps
from penstock.cli import app
from penstock.execute.step_table import TimedStep, steps_like

pytestmark = pytest.mark.torch


def simulate(*words: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, words)])


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_file(tmp_path_factory.mktemp("table"), price=3.6)


OPEN = ("--shape", "64x16", "--rate", 200, "--seconds", 1)


def test_a_table_for_people(table: Path) -> None:
    found = simulate("--table", table, *OPEN, "--goal", "ttft_p95=0.5", "--load-times", 2)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == "200 requests/s, 64x16 tokens (exact)" and lines[1].startswith(
        "400 requests/s"
    )
    assert (
        "first token p50, p95" in lines[3]
        and "$/M tokens" in lines[3]
        and lines[4].endswith("kept")
    )
    assert "times are the engine's: HTTP and text come on top" in found.stdout


def test_json_for_programs(table: Path) -> None:
    found = simulate(
        "--table",
        table,
        "--shape",
        "64x16",
        "--requests",
        500,
        "--replicas",
        3,
        "--price",
        2,
        "--json",
    )
    (answer,) = json.loads(found.stdout)
    assert (answer["replicas"], answer["simulated_replicas"], answer["model"]) == (3, 2, "made")
    assert answer["cost"] == pytest.approx(answer["gpu_hours"] * 2) and answer["missed"] == {}


def test_two_tables_are_compared_by_gpus(table: Path, tmp_path: Path) -> None:
    other = made_file(tmp_path, "tp2.json", tensor_parallel_size=2)
    found = simulate("--table", table, "--table", other, *OPEN, "--goal", "ttft_p95=0.5")
    assert (
        f"fewest with 1 GPU, {table}: --tensor-parallel-size 1 --data-parallel-size 1"
        in found.stdout
    )
    strange = made_file(tmp_path, "strange.json", model="another")
    refused = simulate("--table", table, "--table", strange, *OPEN)
    assert (
        refused.exit_code == 2
        and "the tables are of different models (another, made)" in refused.stderr
    )


def test_a_picture(table: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    found = simulate(
        "--table", table, *OPEN, "--scale", "0:2", "--cold-start", 1, "--picture", picture
    )
    assert found.exit_code == 0, found.output
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and "0 to 1" in found.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "say what is simulated: --artifact DIR or --table FILE"),
        (("--measure", "demo"), "--measure MODEL and --out FILE go together"),
        (("--table", "T", *OPEN, "--scale", "4"), "scale is LEAST:MOST replicas"),
        (("--table", "T", *OPEN, "--curve", "1,x"), "a curve is of numbers with commas between"),
        (("--table", "T", *OPEN, "--scale", "0:2", "--replicas", "2"), "leave --replicas out"),
        (
            ("--table", "T", "--shape", "64x16", "--requests", 9, "--scale", "0:2"),
            "scale is for requests that",
        ),
        (
            ("--table", "T", "--shape", "64x16", "--requests", 9, "--picture", "p.png"),
            "a picture is of requests that",
        ),
        (("--table", "T", *OPEN, "--dtype", "float32"), "dtype is what a table is measured with"),
        (("--table", "T", *OPEN, "--idle", 5), "idle is of --scale LEAST:MOST"),
        (("--table", "T", *OPEN, "--most", 5), "most bounds the search for the fewest replicas"),
        (
            ("--measure", "demo", "--out", "new.json", "--shape", "9x9"),
            "shape is for simulating: leave it out beside",
        ),
        (("--measure", "demo", "--out", "T"), "steps.json is there already: name another --out"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    table: Path, words: tuple[object, ...], told: str
) -> None:
    found = simulate(*(table if word == "T" else word for word in words))
    assert found.exit_code == 2 and told in found.stderr
    assert (
        found.stderr.strip().splitlines()[-1].startswith("penstock: ")
        and "Traceback" not in found.output
    )


def test_an_artifact_has_a_table_or_says_that_it_has_none(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "built", max_num_seqs=8, tensor_parallel_size=2)
    refused = simulate("--artifact", folder, *OPEN)
    assert (
        refused.exit_code == 2
        and "no table of step seconds: make one by penstock build --retune" in refused.stderr
    )
    edit(folder, step_seconds=msgspec.structs.replace(made_table(), engine=None))
    assert "has a table of an older penstock" in simulate("--artifact", folder, *OPEN).stderr
    edit(folder, step_seconds=made_table(), price=4.0)
    (found,) = json.loads(simulate("--artifact", folder, *OPEN, "--json").stdout)
    assert (found["gpus"], found["model"], found["cost_hour"]) == (2, "demo", pytest.approx(4.0))


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (16, ("--requests", 64)),
        (16, ("--rate", 20, "--seconds", 2)),
        (128, ("--samples", 8, "--requests", 16)),
    ],
)
def test_the_steps_of_a_work_answer_for_it(
    tmp_path: Path, samples: int, words: tuple[object, ...]
) -> None:
    """A build with little time times these alone; for more rows than it was built for it says how
    to time more."""
    facts = BuiltFor(
        told="64x32:16",
        prompts=16,
        samples=samples,
        concurrency=16,
        prompt_tokens=64,
        longest_prompt=64,
        output_tokens=32,
        longest_output=32,
        shared_tokens=0,
    )
    runner: Any = SimpleNamespace(max_rows=64, max_batched_tokens=512, grouping=True)
    steps = steps_like(facts, runner)
    took = [
        step_seconds(step.rows, step.context + step.shared, step.prompt_tokens) for step in steps
    ]
    columns: Any = {name: [getattr(step, name) for step in steps] for name in TimedStep._fields}
    folder = make_artifact(tmp_path / "built", max_num_seqs=16)
    edit(folder, step_seconds=StepSeconds(**columns, seconds=took, engine=made_table().engine))
    asked = ("--artifact", folder, "--shape", "64x32", *words)
    found = simulate(*asked, "--max-num-seqs", 16, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)[0]["output_rate"] > 0
    if "--rate" not in words:
        refused = simulate(*asked)
        assert (
            refused.exit_code == 2
            and f"penstock build --retune {folder} --tune-minutes N" in refused.stderr
        )


def test_a_table_is_measured_and_simulated_with(tmp_path: Path) -> None:
    """The demo model's steps, few of them, as they are on this machine."""
    out = tmp_path / "demo.json"
    bounds = (
        "--max-num-seqs",
        4,
        "--max-num-batched-tokens",
        64,
        "--max-model-len",
        256,
        "--kv-cache-tokens",
        4096,
    )
    measured = simulate("--measure", "demo", "--device", "cpu", "--out", out, *bounds)
    assert measured.exit_code == 0, measured.output
    steps = read_steps(out)
    held = steps.step_seconds.engine
    assert held is not None and (held.max_rows, held.max_batched_tokens, held.max_model_len) == (
        4,
        64,
        256,
    )
    assert (
        steps.model == "demo"
        and min(steps.step_seconds.seconds) > 0
        and {0, 1, 4} <= set(steps.step_seconds.rows)
    )
    (answer,) = json.loads(
        simulate("--table", out, "--shape", "32x8", "--requests", 40, "--json").stdout
    )
    assert answer["output_rate"] > 0 and answer["busy"] > 0.9


def test_simulating_loads_no_torch(table: Path) -> None:
    words = ["simulate", "--table", str(table), *map(str, OPEN)]
    code = f"import sys; from penstock.cli import app; app({words!r}, standalone_mode=False)"
    code += "; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"
