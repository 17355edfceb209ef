"""Writes the file of a Modal app. The file uses Modal's own API and calls Penstock only by command
lines.

Knows ModalDeployment and a Jinja template. Never imports Modal, needs no account and deploys
nothing.
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

# extras for reading problem sets from the hub and for the report of `monkeys`
EXTRAS = "parquet,plot"
IN_IMAGE = "/opt/penstock"  # folder of Penstock's checkout in the container image
LEAST = (1, 5, 1)  # the first version of Modal's package that has app.server
WIDE = 120  # longest line of the written file, characters


def write_modal_app(deployment: ModalDeployment, out: Path) -> None:
    """Writes the app to `out`, a new file. Raises UsageError if the file exists or if the package
    cannot be found."""
    write_new(out, modal_app(deployment, out).encode())


def modal_app(deployment: ModalDeployment, out: Path) -> str:
    """Returns the text of the app. The path of Penstock's checkout is written relative to the
    folder of `out`."""
    checkout, requirement = _package(deployment.package, out.parent)
    loader = Environment(
        loader=PackageLoader("penstock", "deploy"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the template writes Python; _python and _inside quote its strings
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
    """Returns the checkout that this Penstock runs from; None if it was installed without one."""
    checkout = Path(__file__).resolve().parents[3]
    return str(checkout) if (checkout / "pyproject.toml").is_file() else None


def modal_missing() -> str | None:
    """Returns an error message if Modal's client isn't installed or is older than `app.server`;
    else None."""
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
    """Returns the checkout's folder relative to the app's (None if `package` is no folder) and the
    requirement for pip."""
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
    """Returns the text as a Python string literal in double quotes."""
    return f'"{_inside(text)}"'


def _inside(text: str) -> str:
    """Returns the text escaped for a Python string in double quotes, single or triple. Escapes
    quotes, line ends, and characters that could mislead a reader (marks that change the writing
    direction). JSON's escapes are unsuitable: they write characters above 16 bits as surrogate
    pairs, which Python doesn't join."""
    return escaped(text.replace("\\", "\\\\").replace('"', '\\"'))


def _command(file: str, verb: str, function: str = "") -> str:
    """Returns the shell command `modal VERB FILE`, escaped for a Python string. function: text
    after the file's name."""
    return _inside(f"modal {verb} {shlex.quote(file + function)}")


def _words(words: list[str]) -> str:
    """Returns a list of words as Python source: on one line if it fits, else one option with its
    value per line."""
    line = f"[{', '.join(map(_python, words))}]"
    if len(line) < WIDE - len("MONKEYS = "):
        return line
    rows: list[list[str]] = []
    for word in words:
        if not rows or word.startswith("--"):
            rows.append([])
        rows[-1].append(_python(word))
    return "[\n" + "".join(f"    {', '.join(row)},\n" for row in rows) + "]  # fmt: skip"
