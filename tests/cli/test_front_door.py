"""The first minutes: what `make demo` ends with, commands without a model, and the README's server
as it is pasted."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.root import _for_words

pytestmark = pytest.mark.torch

REPOSITORY = Path(__file__).parents[2]


def test_the_demo_ends_with_how_to_go_on() -> None:
    # A make that runs the tests would hand its own flags and variables to these two.
    env = {
        name: text
        for name, text in os.environ.items()
        if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    }

    def last_line(*words: str) -> str:
        made = subprocess.run(
            ["make", *words], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True
        )
        return made.stdout.splitlines()[-1]

    assert last_line("-n", "demo").startswith(
        'echo "go on with: source .venv/bin/activate && penstock serve demo'
    )
    assert (
        last_line("-s", "demo", "PY=true")
        == "go on with: PYTHONPATH=src true -m penstock serve demo"
    )


@pytest.mark.parametrize("words", [["serve"], ["run", "in.jsonl", "out.jsonl"]])
def test_without_a_model_it_says_which_there_is(words: list[str]) -> None:
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2 and ended.output.count("\n") == 1, ended.output
    assert (
        f"{words[0]} has no model" in ended.output
        and "`demo` is the one in the package" in ended.output
    )


def test_the_readmes_server_can_be_pasted() -> None:
    page = (REPOSITORY / "README.md").read_text().split("## Server")[1]
    start, ask = re.findall(r"```sh\n(.*?)```", page, re.S)[:2]
    (command,) = [line for line in start.splitlines() if line.startswith("penstock serve")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    python = f"exec {sys.executable} -m {command}".replace("8000", port)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["bash", "-c", python], stdout=pipe, stderr=pipe, text=True, env=dict(os.environ)
    ) as serving:
        try:
            assert (
                serving.stdout is not None
                and "penstock serves demo at" in serving.stdout.readline()
            )
            curl = ask.replace("curl ", "curl -sS ").replace("8000", port)
            told = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
            assert len(json.loads(told.stdout)["choices"]) == 4, told.stdout
            root = subprocess.run(
                ["curl", "-sS", f"http://127.0.0.1:{port}/"], capture_output=True, check=True
            )
            assert json.loads(root.stdout)["openapi"] == "/openapi.json"
        finally:
            serving.terminate()
            assert serving.stderr is not None
            said = serving.stderr.read()
    where = f"listens on http://127.0.0.1:{port}, keys: none, for this machine alone"
    for word in ("penstock: loads ", "KV tokens", "rows and contexts of", where):
        assert sum(word in line for line in said.splitlines()) >= 1, (word, said)
    assert re.search(r"penstock: loads \S+ in (bfloat16|float32) on cpu\n", said), said
    assert re.search(r"penstock: weights (\d+) of \1, in ", said), said


@pytest.mark.parametrize("words", [[], ["serve"], ["bench", "run", "URL"], ["nonsense"]])
def test_only_the_named_command_has_options(words: list[str]) -> None:
    """What `--help` tells of the others is as it would be with all."""

    def options(of: Any, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], tuple[int, str]]:
        found = {at: (len(of.params), of.get_short_help_str())}
        for name, command in getattr(of, "commands", {}).items():
            found |= options(command, (*at, name))
        return found

    every = options(typer.main.get_command(app))
    few = options(typer.main.get_command(_for_words(app, words)))
    assert {at: text for at, (_, text) in few.items()} == {at: t for at, (_, t) in every.items()}
    named = tuple(words[:2]) if words[:1] == ["bench"] else tuple(words)
    kept = {at for at, found in few.items() if found == every[at]}
    groups = {at for at in every if any(other[:-1] == at for other in every if other)}
    assert named in kept or named == ("nonsense",)
    assert every[("serve",)][0] > 50
    assert all(few[at][0] == 0 for at in every if at and at not in groups and at != named)
