"""The examples' Modal forms: written by the command that their page says, imported without an
account, the service run here with the demo model. Nothing is deployed."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli import app

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
needs_modal = pytest.mark.skipif(
    find_spec("modal") is None, reason="modal isn't installed: make packaging"
)


def test_the_app_is_what_its_page_says_that_wrote_it(tmp_path: Path) -> None:
    page = (EXAMPLES / "modal_monkeys" / "README.md").read_text()
    (line,) = re.findall(r"^penstock (deploy modal .+)", page, re.M)
    (tmp_path / "pyproject.toml").touch()  # a checkout, two folders above
    out = tmp_path / "examples" / "modal_monkeys" / "app.py"
    out.parent.mkdir(parents=True)
    done = CliRunner().invoke(
        app, [*shlex.split(line), "--package", str(tmp_path), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert out.read_text() == (EXAMPLES / "modal_monkeys" / "app.py").read_text()


def test_the_service_is_built_by_a_line_that_our_parser_takes() -> None:
    """Its model is that of the page, and the shape what the service says that it was fitted to."""
    tree = ast.parse((EXAMPLES / "build_and_serve" / "modal_service.py").read_text())
    values = {
        n.targets[0].id: n.value
        for n in tree.body
        if isinstance(n, ast.Assign) and hasattr(n.targets[0], "id")
    }
    artifact = ast.literal_eval(values["ARTIFACT"])
    words = [
        ast.literal_eval(e) if isinstance(e, ast.Constant) else artifact
        for e in values["BUILD"].elts
    ]  # type: ignore[attr-defined]
    command: Any = get_command(app)
    asked = command.commands["build"].make_context("build", words[2:]).params
    assert words[:2] == ["penstock", "build"] and str(asked["out"]) == artifact
    assert asked["shape"] == ["256x256:128"] and len(asked["revision"]) == 40


@needs_modal
def test_the_app_is_imported_without_an_account(tmp_path: Path) -> None:
    done = run_beside(
        "modal_monkeys",
        "import app; print(type(app.Server).__name__, app.opened() == app.MODEL)",
        tmp_path,
    )
    assert done.stdout.split() == ["Server", "True"], done.stderr


@needs_modal
@pytest.mark.torch
def test_the_services_method_answers(tmp_path: Path) -> None:
    code = """
import modal_service
modal_service.ARTIFACT = "demo"
batch = modal_service.Service().answer.local(["Why does ice float?"] * 2, {"max_tokens": 3, "temperature": 0})
print([answer["tokens"] for answer in batch["answers"]])
"""
    done = run_beside("build_and_serve", code, tmp_path)
    assert done.stdout.splitlines()[-1:] == ["[3, 3]"], done.stderr


def run_beside(example: str, code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in an example's folder, with nothing where Modal's servers and its account would
    be."""
    environment = os.environ | {
        "MODAL_SERVER_URL": "http://127.0.0.1:9",
        "HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command,
        cwd=EXAMPLES / example,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
