"""Names that want to be more than names, in every file that takes Penstock elsewhere: what
`penstock deploy` writes is read back and is what was given; what deploy/ has hands every word on as
one."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli import app
from penstock.deploy.modal_deployment import ModalDeployment
from penstock.deploy.write_modal_app import modal_app, write_modal_app
from penstock.errors import PenstockError, UsageError
from penstock.on_ray.deployment import RayDeployment
from penstock.on_ray.run_service import ServeFile, read_serve_file, write_serve_file

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
HOSTILE = [
    '"""\nraise SystemExit("ran")\n"""',
    '"""; raise SystemExit("ran"); """',
    "'''\nraise SystemExit('ran')\n'''",
    '\\"""\nraise SystemExit("ran")\n"""',
    'ends in "',
    "ends in \\",
    "\\N{no such}\\x\\u1\\U1",
    "{{ 7 * 7 }}{% raw %}{# no #}",
    "${HOME} $(touch ran) `touch ran`; touch ran #",
    "one\ntwo\r\nthree\x0cfour\x85five\u2028six",
    "a\ttab, a bell \x07, an \x1b[2J and a \x7f",
    "\u202edesrever \u2066si siht",
    "beyond 16 bits: \U0001f600",
    "half a surrogate: \udc80",
    "- a: [list]\n? {of: yaml}: &x !!python/object/apply:os.system [touch ran]",
    "*x",
    "!!binary x",
    "yes",
    "null",
    "0x10",
    "",
    " ",
    "---",
    "%YAML",
    "a: b # c",
    "--host=0.0.0.0",
]


def constants(tree: ast.Module) -> dict[str, Any]:
    """The file's own lists and texts, by name; what calls something is none."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Constant):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    return found


def shape(tree: ast.Module) -> list[str]:
    """The file with every text taken out: what is left is code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        if isinstance(node, ast.List):
            node.elts = [each for each in node.elts if not isinstance(each, ast.Constant)]
    return ast.unparse(tree).splitlines()


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_modal_app_holds_names_as_texts_alone(name: str, tmp_path: Path) -> None:
    """Of the file's name / and NUL are no part."""
    file = name.replace("/", "") or "app.py"
    plain = ModalDeployment(model="/penstock/m", name="demo", package="git+https://a", gpu=None)
    given = ModalDeployment(
        model=f"/penstock/{name}", name="demo", package=f"git+https://{name}", gpu=None
    )
    text = modal_app(given, tmp_path / file)
    # as Python reads it from a disk: half a surrogate would be none of UTF-8
    tree = ast.parse(text.encode())
    found = constants(tree)
    assert (found["MODEL"], found["SERVE"]) == (given.from_hub(), given.serve_options())
    assert (found["BUILD"], found["MONKEYS"]) == (given.build_command(), given.monkeys_options())
    said = ast.get_docstring(tree, clean=False)
    assert said is not None and said.startswith(f"/penstock/{name} on Modal, ")
    words = shlex.split(said.partition("API.\n\n")[2], comments=True)
    assert words[:5] == ["modal", "run", f"{file}::build", "modal", "deploy"] and words[5] == file
    assert shape(tree) == shape(ast.parse(modal_app(plain, tmp_path / "app.py")))
    assert all(sign.isprintable() or sign == "\n" for sign in text)


def test_a_modal_app_names_a_checkout_of_any_name(tmp_path: Path) -> None:
    checkout = tmp_path / '"""\nraise SystemExit("ran")'
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    text = modal_app(
        ModalDeployment(model="demo", name="demo", package=str(checkout), gpu=None),
        tmp_path / "app.py",
    )
    assert checkout.name in [
        node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)
    ]


def test_a_hub_id_is_no_option() -> None:
    for model in ("-x/y", "--host/y", "a/-y"):
        with pytest.raises(UsageError, match="will not be in the container"):
            ModalDeployment(model=model, name="demo", package="git+https://a", gpu=None)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_serve_file_holds_names_as_texts_alone(name: str, tmp_path: Path) -> None:
    args = {
        "model": f"/{name}",
        "name": name,
        "served_model_name": name,
        "api_key_file": f"/{name}",
        "host": name,
    }
    file = ServeFile(RayDeployment.of(args), 8123, f"/{name}")
    write_serve_file(file, tmp_path / "app.yaml")
    assert read_serve_file(tmp_path / "app.yaml") == file
    assert len(list(yaml.safe_load_all((tmp_path / "app.yaml").read_text()))) == 1


@pytest.mark.parametrize(
    "words", [["modal", "demo", "--gpu", "none"], ["ray", "--model", "demo"]], ids=lambda w: w[0]
)
def test_what_is_to_be_typed_next_is_of_whole_words(words: list[str], tmp_path: Path) -> None:
    if words[0] == "ray":
        pytest.importorskip("ray")
    out = tmp_path / "a; touch ran #\udc80\n"
    done = CliRunner().invoke(app, ["deploy", *words, "--out", str(out)])
    assert done.exit_code == 0 and out.is_file()
    told, _, commands = done.stdout.partition(": ")
    assert "\n" not in told and shlex.split(commands)[3 if words[0] == "ray" else 2].startswith(
        f"{tmp_path}/a; touch "
    )


@pytest.mark.parametrize("link", [False, True])
def test_a_generated_file_is_written_over_nothing_and_through_no_link(
    link: bool, tmp_path: Path
) -> None:
    """A link to nothing too: the file would lie where somebody else said."""
    out, elsewhere = tmp_path / "app", tmp_path / "elsewhere"
    if link:
        out.symlink_to(elsewhere)
    else:
        os.mkfifo(out)
    deployment = ModalDeployment(model="demo", name="demo", package="git+https://a", gpu=None)
    for write in (
        lambda: write_modal_app(deployment, out),
        lambda: write_serve_file(ServeFile(RayDeployment.of({"model": "demo"})), out),
    ):
        with pytest.raises(UsageError, match="is there already"):
            write()
    assert not elsewhere.exists() and out.is_symlink() == link


MANY = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}' if n else '1'] * 10)}]\n" for n in range(9))
ALIASES = f"{MANY}applications: [{{import_path: 'penstock.on_ray.app:build_app', args: {{model: *x8}}}}]".encode()


@pytest.mark.parametrize(
    "content",
    [None, b"\xff", b"a: *b", b"[" * 100_000, ALIASES],
    ids=["fifo", "bytes", "alias", "deep", "aliases"],
)
def test_a_serve_file_that_is_none_is_a_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(PenstockError) as caught:
        read_serve_file(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


# --- deploy/


@pytest.mark.parametrize(
    "name", ["$(touch ran)", "a b; touch ran #", '"', "'", "-x", "new\nline", "*", "\\"]
)
def test_the_slurm_array_hands_every_name_on_as_one_word(name: str, tmp_path: Path) -> None:
    for folder in ("in", name):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.jsonl").touch()
        (tmp_path / folder / f"{name}.jsonl.gz").touch()
    program = tmp_path / "bin" / "penstock"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" END >> told\n")
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    script = [str(DEPLOY / "run_array.sh"), name, f"{name}.out", "--model", name]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    folder = f"./{name}" if name.startswith("-") else name
    told = [one.split("\0")[:-1] for one in (tmp_path / "told").read_text().split("END\0")[:-1]]
    assert told == [
        ["run", f"{folder}/{name}.jsonl{end}", f"{folder}.out/{name}.jsonl", "--model", name]
        for end in ("", ".gz")
    ]
    assert not (tmp_path / "ran").exists()


def test_no_file_of_deploy_gives_a_name_to_a_shell_or_to_yaml() -> None:
    """Compose puts MODEL into a word of a list, after the file was read; Kubernetes' words are
    lists too."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["penstock"]
    commands = [service["command"], service["healthcheck"]["test"]]
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        for container in document["spec"].get("template", {}).get("spec", {}).get("containers", []):
            commands += [container["args"], container["lifecycle"]["preStop"]["exec"]["command"]]
            assert "command" not in container
    assert "${MODEL:-demo}" in service["command"] and len(commands) == 4
    for words in commands:
        assert isinstance(words, list) and not {"sh", "bash", "CMD-SHELL"} & {*words}
