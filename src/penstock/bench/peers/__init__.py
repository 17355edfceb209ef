"""Engines that the bench can start. Each engine (peer) has a TOML file. A file is added here once
the bench has run the engine.

    says       description of the engine
    install    the command that installs the pinned version
    version    a command that prints the version
    command    the command that serves; words may contain {python} {model} {host} {port}
    ready      a path that answers 200 once the engine serves
    stop       the signal that ends it
    path       the path of its completions
    ids        whether prompts may be token ids
    served     its name for the model; default {model}
    samples    whether it takes n; default true
    without    fields of a body that it does not accept
    drafts     counters of its /metrics: accepted draft tokens, and steps with a draft
    [more]     further fields that it needs, with {output} filled in
    [environment]  variables of its process

{python} is the interpreter that has the engine, {bin} the folder of that interpreter.

Knows these files; nothing else about an engine.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.errors import EngineError, UsageError

FOLDER = Path(__file__).parent
VERSION_PATIENCE = 120.0
_VERSION = re.compile(r"\d+(?:\.\w+)+(?:\+[\w.]+)?|(?<=version: )\d+")
# llama.cpp's build number, by which releases are named; 0 means unknown and does not match
_BUILD = re.compile(r"\(build ([1-9]\d*)")


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of an engine's TOML file. name: the file's name."""

    says: str
    install: str
    version: list[str]
    command: list[str]
    ready: str
    stop: Literal["SIGTERM", "SIGINT"]
    path: str
    ids: bool
    served: str = "{model}"
    samples: bool = True
    without: list[str] = []
    drafts: list[str] = []
    more: dict[str, Any] = {}
    environment: dict[str, str] = {}
    name: str = ""

    def words(self, python: str, model: str, host: str, port: int) -> list[str]:
        """Returns the command line that starts the server."""
        return _filled(
            self.command, python=python, bin=_bin(python), model=model, host=host, port=str(port)
        )

    def served_as(self, model: str) -> str:
        return self.served.replace("{model}", model)

    def version_of(self, python: str) -> str:
        """Returns the version that its version command prints. Raises EngineError when it is not
        installed."""
        words = _filled(self.version, python=python, bin=_bin(python))
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=VERSION_PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(
                f"{self.name} cannot be asked for its version ({error}): {self.install}"
            ) from error
        said = done.stdout + done.stderr if done.returncode == 0 else ""
        if built := _BUILD.search(said):
            return f"b{built[1]}"
        told = _VERSION.search(said)
        if told is None:
            last = ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
            raise EngineError(
                f"{self.name} isn't there for {python} ({last[:200]}): {self.install}; then name"
                " --python"
            )
        return told[0]

    @property
    def signal(self) -> signal.Signals:
        return signal.Signals[self.stop]


def known() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def peer(name: str) -> Peer:
    """Returns the peer of this name, or of this .toml file. Raises UsageError."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if (path.parent == FOLDER and path.stem not in known()) or not path.is_file():
        raise UsageError(
            f"there is no engine {name!r}: there are {', '.join(known())}, or give a URL",
            param="engine",
        )
    try:
        told = msgspec.toml.decode(path.read_bytes(), type=Peer)
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise UsageError(f"{path.name}: {error}", param="engine") from error
    return msgspec.structs.replace(told, name=path.stem)


def _bin(python: str) -> str:
    """Returns the folder of a Python interpreter. Links are not followed, because a virtual
    environment's programs lie beside the link."""
    return str(Path(python).parent)


def _filled(words: list[str], **values: str) -> list[str]:
    for name, value in values.items():
        words = [word.replace("{" + name + "}", value) for word in words]
    return words
