"""What `make wheel` makes: the wheels hold what they must and nothing else, and each runs where
only it is installed.

pip installs a wheel alone into a fresh environment, to which packages of this Python are lent: to
penstock all of them, to penstock-client exactly those that its metadata names.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock
from penstock.bench.null_server import NullPlan, NullServer

pytest.importorskip("hatchling", reason="make packaging")

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "penstock"
CLIENT = REPOSITORY / "packages" / "client"
SHORT = [
    "--short",
    "--no-ladder",
    "--warm-up",
    "0.1",
    "--window",
    "0.5",
    "--longest",
    "5",
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
MACHINE = {
    "gpu": None,
    "cpu": "a CPU",
    "cores": 2,
    "memory_mib": 1000,
    "system": "Linux",
    "python": "3.11",
}


def built(project: Path, kind: str, out: Path) -> Path:
    """Builds a project's wheel or sdist into a new folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(REPOSITORY, "wheel", tmp_path_factory.mktemp("made") / "wheel")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(CLIENT, "wheel", tmp_path_factory.mktemp("made") / "client")


def contents(wheel: Path) -> dict[str, bytes]:
    """A wheel's files of the package, its metadata aside."""
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist() if ".dist-info/" not in name}


def told(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(opened.read(name))


def project(folder: Path) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


def test_the_wheel_is_the_package_and_nothing_else(wheel: Path) -> None:
    files = [
        path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    found = contents(wheel)
    assert sorted(found) == sorted(path.relative_to(PACKAGE.parent).as_posix() for path in files)
    for name in (
        "py.typed",
        "demo/model/model.safetensors",
        "demo/problems/test.jsonl",
        "almanac/page/site/index.html",
        "bench/peers/vllm.toml",
        "jobs/report.html.jinja",
        "archived.txt",
    ):
        assert f"penstock/{name}" in found
    assert not [name for name in found if "test_" in name or "client.txt" in name]


def test_the_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(built(REPOSITORY, "sdist", tmp_path / "sdist")) as opened:
        opened.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert contents(built(source, "wheel", tmp_path / "wheel")) == contents(wheel)
    assert contents(built(source / "packages" / "client", "wheel", tmp_path / "client"))


def test_the_version_stands_in_one_place(wheel: Path, client: Path) -> None:
    assert [told(each)["Version"] for each in (wheel, client)] == [penstock.__version__] * 2
    assert all("version" not in project(folder) for folder in (REPOSITORY, CLIENT))


def test_the_client_is_a_part_of_penstock_with_the_same_requirements(
    wheel: Path, client: Path
) -> None:
    ours, theirs = contents(wheel), contents(client)
    assert theirs.pop("penstock/cli/client.txt")
    assert theirs.items() <= ours.items()
    needs = {line for line in told(client).get_all("Requires-Dist", []) if "extra ==" not in line}
    base = {re.sub(r"; extra == .*", "", line) for line in told(wheel).get_all("Requires-Dist", [])}
    assert needs <= base and any("torch" in line for line in base)


# --- where only a wheel is installed


def environment(folder: Path, *wheels: Path) -> Path:
    """Makes an environment and has pip install wheels into it, without what they require. Returns
    its `bin`."""
    venv.create(folder, symlinks=True, with_pip=False)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "-q",
        "--no-compile",
    ]
    for each in wheels:  # one after the other: of two at once pip would look for those they require
        done = subprocess.run(
            [*pip, "--no-deps", "--no-index", str(each)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return folder / "bin"


def packages_of(folder: Path) -> Path:
    return Path(
        sysconfig.get_path(
            "purelib", vars={"base": str(folder), "platbase": str(folder)}, scheme="venv"
        )
    )


def required(lines: list[str]) -> Iterator[str]:
    """Names of the distributions that requirements ask for, and of those that these ask for."""
    for line in lines:
        asked = Requirement(line)
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            yield asked.name
            yield from required(metadata.requires(asked.name) or [])


def lend(folder: Path, wheel: Path) -> set[str]:
    """Links what a wheel requires, from this Python's packages.
    Returns the distributions' names."""
    names = set(required(told(wheel).get_all("Requires-Dist", [])))
    for name in names:
        found = metadata.distribution(name)
        for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
            target = packages_of(folder) / top
            if not target.exists():
                target.symlink_to(Path(str(found.locate_file(top))))
    return names


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, without the sources that this process may have by PYTHONPATH."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def client_tools(client: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment of the client alone."""
    folder = tmp_path_factory.mktemp("client") / "env"
    tools = environment(folder, client)
    assert not {"torch", "transformers", "huggingface_hub"} & lend(folder, client)
    return tools


def test_the_client_measures_keeps_and_shows_without_torch(
    client: Path, client_tools: Path, tmp_path: Path
) -> None:
    modules = [
        name.removesuffix(".py").replace("/", ".")
        for name in contents(client)
        if name.endswith(".py")
    ]
    imports = "\n".join(
        f"import {name.removesuffix('.__init__')}" for name in modules if "__main__" not in name
    )
    done = run(
        client_tools / "python",
        "-c",
        f"{imports}\nimport sys\nassert 'torch' not in sys.modules",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    with NullServer(NullPlan()) as server:
        url = f"http://127.0.0.1:{server.port}"
        machine = tmp_path / "machine.json"
        machine.write_text(json.dumps(MACHINE))
        asked = [
            "bench",
            "run",
            url,
            "--model",
            "null",
            "--shape",
            "8x4",
            "--machine",
            machine,
            "--out",
            "out",
        ]
        done = run(client_tools / "penstock", *asked, *SHORT, folder=tmp_path)
    assert done.returncode == 0 and "saturation" in done.stdout, done.stdout + done.stderr
    for words in (
        ["validate", "out"],
        ["add", "out", "--records", "kept"],
        ["build", "--records", "kept", "--out", "p"],
    ):
        done = run(client_tools / "penstock", "almanac", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "p" / "index.html").is_file()


def test_what_the_client_lacks_is_one_line_with_the_way_out(
    client_tools: Path, tmp_path: Path
) -> None:
    model = ["bench", "run", "--engine", "llamacpp", "--model", "demo", "--shape", "8x4"]
    texts = [
        "bench",
        "run",
        "http://127.0.0.1:1",
        "--model",
        "x",
        "--shape",
        "8x4",
        "--text",
        "--tokenizer",
        ".",
    ]
    for words, says in (
        (
            ["serve", "demo"],
            "`pip install penstock` for the engine's commands (this is penstock-client)",
        ),
        (model, "the demo model is in penstock, and this is penstock-client"),
        (texts, "pip install 'penstock-client[text]'"),
    ):
        done = run(client_tools / "penstock", *words, folder=tmp_path)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
    done = run(client_tools / "python", "-c", "from penstock import LLM", folder=tmp_path)
    assert done.stderr.splitlines()[-1].endswith("this is penstock-client: pip install penstock")


def test_both_in_one_environment_are_refused(wheel: Path, client: Path, tmp_path: Path) -> None:
    tools = environment(tmp_path / "env", wheel, client)
    lend(tmp_path / "env", client)
    done = run(tools / "penstock", "--version", folder=tmp_path)
    assert done.returncode == 2 and "pip uninstall penstock-client penstock" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.torch
def test_the_wheel_runs_the_demo(wheel: Path, tmp_path: Path) -> None:
    tools = environment(tmp_path / "env", wheel)
    others = [path for path in sys.path if path.endswith("site-packages")]
    # a .pth in these is not read
    (packages_of(tmp_path / "env") / "lent.pth").write_text("\n".join(others))
    done = run(tools / "penstock", "demo", "--n", "2", "--limit", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "demo-out" / "samples.jsonl").read_text().splitlines()) == 2
    where = run(
        tools / "python", "-c", "import penstock; print(penstock.__file__)", folder=tmp_path
    )
    assert where.stdout.startswith(str(tmp_path / "env"))
