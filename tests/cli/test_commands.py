"""The command line as a user meets it, with the real demo model where it takes one; a process where
one is killed."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from penstock.cli import main
from penstock.cli.engine_options import knob_parameters
from penstock.cli.exit_codes import stopped_by_sigterm, with_one_line
from penstock.config import Config
from penstock.demo import model_folder, problems_file
from penstock.engine.interrupts import held_interrupts
from penstock.errors import UsageError
from penstock.jobs import doctor as doctor_room

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
# nothing is merged: texts are equal to the last letter
EXACT = [
    "--dtype",
    "float32",
    "--prefix-groups",
    "off",
]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def penstock(*arguments: str) -> tuple[int, str, str]:
    """What the entry point ends with, prints and says, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        patch.setattr(sys, "argv", ["penstock", *arguments])
        main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def refused(*arguments: str) -> str:
    """What a command says that has to end with one line and exit code 2."""
    code, out, err = penstock(*arguments)
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("penstock: ") and err.count("\n") == 1, err
    return err


def test_help_lists_what_is_there_and_loads_no_torch() -> None:
    code = "import sys; sys.argv = ['penstock', '--help']\nfrom penstock.cli import app\n"
    code += (
        "app(standalone_mode=False)\nassert not {'torch', 'transformers', 'matplotlib', 'numpy'} &"
        " set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    commands = ended.stdout.partition("Commands:")[2].split()
    assert [c for c in ("demo", "monkeys", "run", "serve", "doctor") if c in commands] == [
        "demo",
        "monkeys",
        "run",
        "serve",
        "doctor",
    ]
    assert {"bench", "almanac", "batch", "build"} <= set(commands)


def test_version() -> None:
    import penstock as package

    assert penstock("--version") == (0, f"penstock {package.__version__}\n", "")


@pytest.mark.parametrize("command", ["serve", "run", "monkeys"])
def test_every_knob_is_an_option(command: str) -> None:
    code, out, _ = penstock(command, "--help")
    assert code == 0
    knobs = {knob.name for group in Config().groups() for knob in fields(group)}
    assert {parameter.name for parameter in knob_parameters(())} == knobs
    own = {"model"} if command != "run" else set()
    own |= {"skip_tokenizer_init"} if command == "monkeys" else set()  # prompts are text there
    for name in knobs - own:
        assert f"--{name.replace('_', '-')}" in out, name


def test_unknown_options_are_refused() -> None:
    err = refused("monkeys", "demo", "--no-such-thing")
    assert "no such option: --no-such-thing" in err and err.endswith("penstock monkeys -h\n")
    assert "no such command 'gibbon'" in refused("gibbon")
    assert "option '--out' requires an argument" in refused("demo", "--out")
    assert "missing option '--problems'" in refused("monkeys", "demo", "--out", "x")
    assert "invalid value for '--n'" in refused("demo", "--n", "many")
    code, out, err = penstock()
    assert code == 2 and "Commands:" in out + err


def test_a_stop_without_words_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        with_one_line(stopped)
    assert ended.value.exit_code == 130 and capsys.readouterr().err == "penstock: stopped\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm_stops_a_job_where_ctrl_c_is_ignored_too(
    ignored: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is in a background process of a shell."""

    def job() -> None:
        with held_interrupts():
            signal.raise_signal(signal.SIGTERM)
            steps.append(1)
        steps.append(2)

    steps: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        with pytest.raises(typer.Exit) as ended:
            stopped_by_sigterm(job)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert ended.value.exit_code == 143 and capsys.readouterr().err == "penstock: stopped\n"
    assert steps == ([] if ignored else [1])  # held to the end of the step
    assert signal.getsignal(signal.SIGTERM) is before


def test_bad_values_and_files_are_one_line(tmp_path: Path) -> None:
    problems = ["--problems", str(problems_file())]
    out = ["--out", str(tmp_path / "out")]
    broken = tmp_path / "broken.jsonl"
    broken.write_text(
        '{"question": "q", "answer": "#### 1"}\n{"question": "r", "answer": "none"}\n'
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 1, "prompt": "x"}\n')
    kept, few = (
        [str(tmp_path / "kept.jsonl")],
        ["--model", "demo", "--kv-cache-tokens", "64", "--device", "cpu"],
    )
    cases = {
        "temperature must be between": ["monkeys", "demo", *problems, *out, "--temperature", "-1"],
        "n must be between": ["monkeys", "demo", *problems, *out, "--n", "0"],
        "--top-p must be above 0.0": ["monkeys", "demo", *problems, *out, "--top-p", "0"],
        "--max-tokens must be at least 1": [
            "monkeys",
            "demo",
            *problems,
            *out,
            "--max-tokens",
            "0",
        ],
        "--max-num-seqs must be between 1 and": [
            "monkeys",
            "demo",
            *problems,
            *out,
            "--max-num-seqs",
            "0",
        ],
        "--served-model-name is empty": ["serve", "demo", "--served-model-name", ""],
        "row 2: answer doesn't end in": ["monkeys", "demo", "--problems", str(broken), *out],
        "no file": ["monkeys", "demo", "--problems", str(tmp_path / "none.jsonl"), *out],
        "--out /proc/none/out cannot be made": [
            "monkeys",
            "demo",
            *problems,
            "--out",
            "/proc/none/out",
        ],
        "--kv-cache-tokens (64) holds no sequence of --max-model-len": [
            "run",
            str(rows),
            "--model",
            "demo",
            *kept,
            *few,
        ],
        "is no folder": ["run", "--model", "demo", str(rows), str(tmp_path / "none" / "out.jsonl")],
        "there is no folder": [
            "run",
            str(rows),
            str(tmp_path / "out.jsonl"),
            "--model",
            str(tmp_path / "model"),
        ],
        "'int3' is not one of 'auto', 'bfloat16'": ["doctor", "--dtype", "int3"],
        "an empty path stands for --out:": ["demo", "--out", ""],
        "an empty path stands for --state-dir:": ["serve", "demo", "--state-dir="],
        "an empty path stands for OUT:": ["batch", "fetch", "batch_x", ""],
        "penstock: . is a folder: name a file": ["batch", "fetch", "batch_x", "."],
    }
    for says, arguments in cases.items():
        assert says in refused(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "rows.jsonl"]


def test_a_job_on_ray_opens_its_workers_as_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def workers(config: Config, **how: object) -> None:
        opened.append((config.told(), how))
        raise UsageError("no cluster in this test")

    monkeypatch.setattr("penstock.on_ray.ray_workers.RayWorkers", workers)
    rows, out = tmp_path / "rows.jsonl", str(tmp_path / "out")
    rows.write_text('{"id": 1, "prompt": "x"}\n')
    run = ["run", str(rows), out, "--model", "demo", "--max-num-seqs", "5"]
    monkeys = [
        "monkeys",
        "demo",
        "--problems",
        str(problems_file()),
        "--out",
        out,
        "--max-num-seqs",
        "5",
    ]
    for job in (run, monkeys):
        assert "no cluster" in refused(*job, "--on", "ray", "--address", "host:1", "--workers", "3")
        assert "no cluster" in refused(*job, "--on", "ray")
        assert "--workers is of a Ray cluster: say --on ray too" in refused(*job, "--workers", "3")
        assert "--address is of a Ray cluster: say --on ray too" in refused(
            *job, "--address", "auto"
        )
    assert "leave --on ray out" in refused(*monkeys, "--on", "ray", "--stop-when", "right")
    there, here = {"address": "host:1", "workers": 3}, {"address": None, "workers": None}
    assert [how for _, how in opened] == 2 * [there, here]
    assert {(knobs["model"], knobs["max_num_seqs"]) for knobs, _ in opened} == {("demo", 5)}


def test_models_are_listed_with_where_they_were_compared() -> None:
    code, out, err = penstock("models")
    assert (
        code == 0
        and not err
        and "Of published weights those that packages carry" in " ".join(out.split())
    )
    assert {line.split()[0] for line in out.splitlines() if "CPU" in line} >= {
        "llama",
        "phi3",
        "gemma3",
    }


def test_doctor_says_what_would_run() -> None:
    code, out, err = penstock(
        "doctor", "--dtype", "float32", "--kv-cache-tokens", "4608", "--device", "cpu"
    )
    assert (code, err) == (0, "")
    for word in (
        "torch",
        "processor",
        "float32 (as --dtype says)",
        "attention",
        "LlamaForCausalLM",
        "weights",
    ):
        assert word in out
    assert "KV tokens that fit  4,608 (" in out and "2 sequences of full length" in out
    assert "tokenizer           tokenizer.json, with a chat template" in out


def test_doctor_says_what_of_the_models_defaults_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_folder() / "config.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "num_beams": 4, "suppress_tokens": [1]}'
    )
    code, out, _ = penstock("doctor", str(tmp_path), "--load-format", "dummy")
    assert (
        code == 0
        and "not served          num_beams, suppress_tokens of its generation_config.json" in out
    ), out
    assert "tokenizer           none: " in out and "has no tokenizer.json; add it" in out


def test_doctor_says_what_of_a_models_texts_is_not_read(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder(), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{% for %}")
    _, out, _ = penstock("doctor", str(folder))
    assert (
        "tokenizer           tokenizer.json, with a chat template: " in out
        and "is not valid Jinja" in out
    )
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    _, out, _ = penstock("doctor", str(folder))
    assert "tokenizer           none: " in out and "cannot be read as a fast tokenizer" in out
    (folder / "generation_config.json").write_text('{"eos_token_id": 99999}')
    code, _, err = penstock("doctor", str(folder))
    assert code == 2 and "eos_token_id 99999 is outside the vocabulary" in err


def rows_of(path: Path) -> dict[object, dict[str, object]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {row.get("id", (row.get("problem"), row.get("sample"))): row for row in rows}
    assert len(by_id) == len(rows), "something was written twice"
    return by_id


def wait_for_lines(child: subprocess.Popen[str], path: Path, lines: int) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)


def test_run_killed_with_the_real_model(tmp_path: Path) -> None:
    """SIGKILL, then to the end: every id once, and every text as a run in one piece writes it."""
    source, out, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    questions = [
        json.loads(line)["question"] for line in problems_file().read_text().splitlines()[:14]
    ]
    with source.open("w") as file:
        for i, question in enumerate(questions):
            row = {
                "id": i,
                "prompt": f"Question: {question}\nAnswer:",
                "n": 2,
                "max_tokens": 32,
                "stop": ["Question:"],
            }
            file.write(json.dumps(row) + "\n")
        file.write(json.dumps({"id": "long", "prompt": "word " * 4000}) + "\n")
    child = start("run", str(source), str(out), "--model", "demo", "--max-num-seqs", "6", *EXACT)
    wait_for_lines(child, out, 6)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    before = len(rows_of(out))
    assert penstock("run", str(source), str(out), "--model", "demo", *EXACT)[0] == 0
    assert (
        penstock("run", str(source), str(whole), "--model", "demo", "--max-num-seqs", "16", *EXACT)[
            0
        ]
        == 0
    )
    assert rows_of(out) == rows_of(whole)
    assert 6 <= before <= len(rows_of(out)) == 15
    assert "2304" in str(rows_of(out)["long"]["error"])


def test_run_of_nothing_but_errors_fails(tmp_path: Path) -> None:
    """Each time: a pipeline that looks at the exit code alone mustn't go on with rows that are all
    errors."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(json.dumps({"id": i, "prompt": "word " * 4000}) + "\n" for i in range(2))
    )
    for said in ("2 of them with an error", "nothing was left to do"):
        code, _, err = penstock("run", str(source), str(out), "--model", "demo", *EXACT)
        assert (
            code == 2 and said in err and "penstock: no row could be run; the first because" in err
        ), err
    assert set(rows_of(out)) == {0, 1}


def test_generated_pages_are_up_to_date() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_serve_refuses_a_port_that_cannot_be(tmp_path: Path) -> None:
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
    assert "port" in refused("serve", "demo", "--port", "70000")


def doctored(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Config | None, int]:
    """The config that `penstock doctor` comes to, and its exit code."""
    seen: list[Config] = []
    monkeypatch.setattr(doctor_room, "print_doctor", seen.append)
    monkeypatch.setattr(sys, "argv", ["penstock", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return (seen[0] if seen else None), int(ended.value.code or 0)


def test_vllms_arguments_are_read_beside_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--tensor-parallel-size 1 -tp=1 --dtype half --max_num_seqs=7 --disable-log-stats"
        " --quantization None"
    )
    words += (
        " --hf-overrides {} --swap-space 4 --no-enable-lora --tokenizer x/y -O3 --trust-remote-code"
        " --max-model-len 500"
    )
    config, code = doctored(monkeypatch, *words.split(), "--model", "x/y")
    assert config is not None and code == 0
    assert (
        config.model.model,
        config.model.dtype,
        config.memory.max_model_len,
        config.batching.max_num_seqs,
    ) == (
        "x/y",
        "float16",
        500,
        7,
    )
    said = "penstock: --trust-remote-code changes nothing: no code of a model ever runs here\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "-pp 2",
            "--pipeline-parallel-size 2 is not served (only 1): a model is not cut by layers",
        ),
        ("--enable-lora", "--enable-lora is not served: one adapter is merged into the weights"),
        ("--lora-modules a=b c=d", "no such option: --lora-modules"),  # a server's
        ("--task", "option --task requires an argument"),
        (
            "--max-num-seq 3",
            "no such option: --max-num-seq (Possible options: --max-num-seqs): see",
        ),
        ("demo --model other", "unexpected extra argument"),
    ],
)
def test_what_is_refused_of_vllms_says_the_way_out(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctored(monkeypatch, *words.split()) == (None, 2)
    said = capsys.readouterr().err
    assert says in said and said.startswith("penstock: ") and said.count("\n") == 1


def test_a_knob_is_named_by_who_types_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If to its default: an artifact's choices are for what was left alone. `seed` is monkeys' own
    option."""
    seen: list[Config] = []
    monkeypatch.setattr(
        "penstock.jobs.monkeys.run_monkeys", lambda config, options, engine: seen.append(config)
    )
    job = ("monkeys", "demo", "--problems", "x", "--out", "y")
    assert (
        penstock(*job)[0]
        == penstock(*job, "--steps-ahead", "1", "--no-enable-prefix-caching")[0]
        == 0
    )
    assert [config.named for config in seen] == [
        {"model", "seed"},
        {"model", "seed", "steps_ahead", "enable_prefix_caching"},
    ]
    assert Config.of(**seen[1].told()) == seen[1] and "steps_ahead" in seen[1].told()
    left = Config.of(max_num_seqs=None)
    left.batching.max_num_batched_tokens = 64
    assert not left.named and left.told() == {"max_num_batched_tokens": 64}
