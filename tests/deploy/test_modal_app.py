"""The file that `penstock deploy modal` writes: read, imported without account or network, its
server started."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock.deploy.write_modal_app as room
from penstock.cli import app
from penstock.deploy.modal_deployment import ModalDeployment
from penstock.deploy.write_modal_app import default_package, modal_app, modal_missing

REPOSITORY = Path(__file__).resolve().parents[2]
ARGUMENTS = {  # everything that the template knows
    "model": "meta-llama/Llama-3.1-8B",
    "name": "llama",
    "revision": "0123abc",
    "hub_secret": "huggingface",
    "key_secret": "key",
    "max_concurrency": 999,
    "min_containers": 1,
    "max_containers": 3,
    "gpu": "H200:2",
    "knobs": {"tensor_parallel_size": 2, "max_num_seqs": 512},
}


def written(folder: Path, **more: Any) -> Path:
    """An app in a file, of the checkout that these tests lie in."""
    out = folder / "app.py"
    deployment = ModalDeployment(
        **{"model": "demo", "name": "demo", "package": str(REPOSITORY), "gpu": None, **more}
    )
    out.write_text(modal_app(deployment, out))
    return out


def constants(path: Path) -> dict[str, Any]:
    """The file's own literals, by name."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def server_arguments(path: Path) -> dict[str, Any]:
    """What the file says to `@app.server`, literals alone."""
    (server,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef))
    (call,) = server.decorator_list
    assert isinstance(call, ast.Call) and ast.unparse(call.func) == "app.server"
    return {
        k.arg: ast.literal_eval(k.value)
        for k in call.keywords
        if k.arg and isinstance(k.value, ast.Constant)
    }


def test_the_file_says_what_the_deployment_does(tmp_path: Path) -> None:
    path = written(tmp_path, **ARGUMENTS)
    deployment = ModalDeployment(package=str(REPOSITORY), **ARGUMENTS)
    found = constants(path)
    assert (found["MODEL"], found["SERVE"]) == (deployment.from_hub(), deployment.serve_options())
    assert (found["BUILD"], found["MONKEYS"]) == (
        deployment.build_command(),
        deployment.monkeys_options(),
    )
    assert (found["ARTIFACT"], found["GPU"]) == (deployment.artifact, "H200:2")
    said = server_arguments(path)
    assert len(said) == 9 and all(
        getattr(deployment, name) == value for name, value in said.items()
    )


def test_nothing_of_ours_is_in_it(tmp_path: Path) -> None:
    tree = ast.parse(written(tmp_path, **ARGUMENTS).read_text())
    imported = [
        n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    assert sorted(map(str, imported)) == ["modal", "pathlib", "socket", "subprocess", "time"]


@pytest.mark.parametrize(
    ("package", "installed"),
    [
        ("penstock==0.1.0", '"penstock[parquet,plot]==0.1.0"'),
        (
            "git+https://example.org/penstock@main",
            '"penstock[parquet,plot] @ git+https://example.org/penstock@main"',
        ),
    ],
)
def test_a_package_from_elsewhere_needs_no_checkout(
    package: str, installed: str, tmp_path: Path
) -> None:
    text = written(tmp_path, package=package).read_text()
    assert installed in text and "add_local_dir" not in text
    assert ('"git"' in text) == package.startswith("git+")


@pytest.mark.parametrize(
    "more", [ARGUMENTS, {}, {"package": "penstock==0.1.0"}], ids=["all", "demo", "released"]
)
def test_the_file_is_in_order(more: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, **more)
    for words in (
        ["check", "--select", "E,F,I,B,UP,SIM,RUF", "--line-length", "120"],
        ["format", "--check"],
    ):
        length = [] if words[0] == "check" else ["--line-length", "120"]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, *length, str(path)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    find_spec("modal") is None, reason="modal isn't installed: pip install -e '.[modal]'"
)
@pytest.mark.parametrize("more", [ARGUMENTS, {}], ids=["all", "demo"])
def test_it_is_imported_without_account_or_network(more: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, **more)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environment = os.environ | {
            "MODAL_SERVER_URL": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "HOME": str(tmp_path / "home"),
        }
        code = (
            "import app; print([type(each).__name__ for each in (app.Server, app.build,"
            " app.monkeys)], app.opened())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=path.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    assert (
        "['Server', 'Function', 'Function']" in done.stdout
        and str(constants(path)["MODEL"]) in done.stdout
    )
    assert not (tmp_path / "home").exists()


class FakeModal:
    """Modal's words without Modal: each takes anything and gives a decorator that leaves what it is
    put on."""

    def __getattr__(self, name: str) -> FakeModal:
        return self

    def __call__(self, *taken: Any, **named: Any) -> Any:
        return taken[0] if len(taken) == 1 and callable(taken[0]) else self

    def __invert__(self) -> FakeModal:
        return self


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Gives a function that runs the file and returns it as a module. Its `penstock` is the given
    shell script."""

    def start(script: str) -> Any:
        program = tmp_path / "bin" / "penstock"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setitem(sys.modules, "modal", FakeModal())  # type: ignore[arg-type]
        spec = spec_from_file_location("written_app", written(tmp_path))
        assert spec is not None and spec.loader is not None
        module: Any = module_from_spec(spec)
        spec.loader.exec_module(module)
        port = _free_port()
        module.SERVE = [str(port) if word == str(module.PORT) else word for word in module.SERVE]
        module.PORT = port
        return module

    return start


@pytest.mark.torch
def test_the_server_answers_under_modals_address_and_ends_on_its_word(
    started: Callable[[str], Any],
) -> None:
    module = started(f'exec {sys.executable} -m penstock "$@"')
    server = module.Server()
    server.start()
    try:
        body = {"model": "demo", "prompt": "Tom has 3", "max_tokens": 4, "temperature": 0}
        assert _asked(module.PORT, "/health/ready")["ready"] is True  # it listens no sooner
        assert _asked(module.PORT, "/v1/completions", body)["usage"]["completion_tokens"] == 4
    finally:
        server.stop()
    assert server.process.returncode == 0


def test_a_server_that_does_not_come_up_is_not_waited_for(started: Callable[[str], Any]) -> None:
    with pytest.raises(RuntimeError, match="its last line"):
        started("exit 1").Server().start()


def test_the_command_writes_once_and_says_what_is_next(tmp_path: Path) -> None:
    out = tmp_path / "app.py"
    words = [
        "deploy",
        "modal",
        "Qwen/Qwen3-8B",
        "--out",
        str(out),
        "--max-num-seqs",
        "64",
        "--gpu",
        "L40S",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and f"modal deploy {out}" in done.output
    assert (modal_missing() is None) == (find_spec("modal") is not None)
    assert ("penstock[modal]" in done.output) == (modal_missing() is not None)
    assert constants(out)["MODEL"] == ["Qwen/Qwen3-8B", "--max-num-seqs", "64"]
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "is there" in again.output


@pytest.mark.parametrize(
    ("found", "says"),
    [(None, "isn't installed here"), ("1.4.9", "is 1.4.9 here"), ("1.5.1", ""), ("1.10.0", "")],
)
def test_a_client_that_is_absent_or_old_is_a_line(
    found: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(room, "version", version)
    told = modal_missing()
    assert (told is None) == (not says)
    assert told is None or (says in told and "penstock[modal]" in told and "\n" not in told)


def test_an_app_lies_beside_the_checkout_that_it_names(tmp_path: Path) -> None:
    assert default_package() == str(REPOSITORY)
    path = written(tmp_path)
    named = path.read_text().split("Path(__file__).parent / ")[1].split(",")[0]
    assert (tmp_path / json.loads(named)).resolve() == REPOSITORY


def test_a_folder_without_a_package_is_a_line(tmp_path: Path) -> None:
    words = [
        "deploy",
        "modal",
        "demo",
        "--gpu",
        "none",
        "--package",
        str(tmp_path),
        "--out",
        str(tmp_path / "a.py"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "no checkout" in done.output and not (tmp_path / "a.py").exists()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _asked(port: int, path: str, body: Any = None) -> Any:
    """A JSON answer to a request as Modal's proxy sends it on."""
    headers = {
        "Host": "workspace--demo-server.us-east.modal.direct",
        "Content-Type": "application/json",
    }
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)
