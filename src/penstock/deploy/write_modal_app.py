"""Writes the file of a Modal app as a person would: Modal's own words, and nothing of ours in it
but command lines.

It knows the deployment's dataclass and a template. It never imports Modal, asks for no account and
deploys nothing.
"""

from __future__ import annotations

import os
import shlex
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from penstock.deploy.modal_deployment import FOLDER, PORT, ModalDeployment
from penstock.disk import write_new
from penstock.errors import UsageError, escaped

EXTRAS = "parquet,plot"  # for the hub's problems and the report of `monkeys`
IN_IMAGE = "/opt/penstock"  # where the image has a checkout
LEAST = (1, 5, 1)  # the first Modal that has app.server
WIDE = 120  # characters of a line


def write_modal_app(deployment: ModalDeployment, out: Path) -> None:
    """Writes the app to `out`, a new file. Raises UsageError where one is, or where the package
    cannot be had."""
    write_new(out, modal_app(deployment, out).encode())


def modal_app(deployment: ModalDeployment, out: Path) -> str:
    """Returns the text of the app that will lie at `out`; a checkout is named from there."""
    checkout, requirement = _package(deployment.package, out.parent)
    loader = Environment(
        loader=PackageLoader("penstock", "deploy"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it writes Python, whose texts _python and _inside quote
    )
    tools = ["build-essential", "git"] if "git+" in requirement else ["build-essential"]
    return loader.get_template("modal_app.py.jinja").render(
        d=deployment,
        command=partial(_command, out.name),
        port=PORT,
        folder=FOLDER,
        checkout=checkout,
        in_image=IN_IMAGE,
        requirement=requirement,
        apt=", ".join(map(_python, tools)),
        inside=_inside,
        py=_python,
        words=_words,
    )


def default_package() -> str | None:
    """Returns the checkout that this Penstock runs from;
    None where it was installed without one."""
    checkout = Path(__file__).resolve().parents[3]
    return str(checkout) if (checkout / "pyproject.toml").is_file() else None


def modal_missing() -> str | None:
    """Returns a line where Modal's client isn't here or is older than `app.server`; None where it
    will do."""
    try:
        found = version("modal")
    except PackageNotFoundError:
        return (
            "Modal's client isn't installed here, and the file needs it: pip install"
            " 'penstock[modal]'"
        )
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < LEAST:
        return (
            f"Modal's client is {found} here, and the file needs 1.5.1 or later: pip install -U"
            " 'penstock[modal]'"
        )
    return None


def _package(package: str, beside: Path) -> tuple[str | None, str]:
    """A checkout's folder as seen from the app's, or None; and what pip installs."""
    if "://" in package:
        return None, f"penstock[{EXTRAS}] @ {package}"
    if package.startswith("penstock") and "==" in package:
        name, _, number = package.partition("==")
        return None, f"{name.partition('[')[0]}[{EXTRAS}]=={number}"
    folder = Path(package)
    if not (folder / "pyproject.toml").is_file():
        raise UsageError(
            f"{package} is no checkout of Penstock (no pyproject.toml in it): name one, an address "
            "(git+https://..., https://....whl), or penstock==VERSION",
            param="package",
        )
    return os.path.relpath(folder.resolve(), beside.resolve()), f"{IN_IMAGE}[{EXTRAS}]"


def _python(text: str) -> str:
    """A text as Python has it, in double quotes."""
    return f'"{_inside(text)}"'


def _inside(text: str) -> str:
    """A text as it stands between double quotes of Python, one or three. What could end them, end
    the line, or look like something else (a sign that turns the direction of what is read) is an
    escape: JSON's would be halves for signs beyond 16 bits, which Python doesn't join."""
    return escaped(text.replace("\\", "\\\\").replace('"', '\\"'))


def _command(file: str, verb: str, function: str = "") -> str:
    """A line for a shell that hands the file to Modal."""
    return _inside(f"modal {verb} {shlex.quote(file + function)}")


def _words(words: list[str]) -> str:
    """A list of words: on one line where they fit, else an option a line with its value."""
    line = f"[{', '.join(map(_python, words))}]"
    if len(line) < WIDE - len("MONKEYS = "):
        return line
    rows: list[list[str]] = []
    for word in words:
        if not rows or word.startswith("--"):
            rows.append([])
        rows[-1].append(_python(word))
    return "[\n" + "".join(f"    {', '.join(row)},\n" for row in rows) + "]  # fmt: skip"
