"""What an import brings along, seen in a fresh interpreter: the way in is light, a room without
torch loads none.

The laws in `laws.py` see a file's own imports; these see everything that those import in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "penstock"
HEAVY = ("torch", "transformers", "matplotlib", "triton", "ray", "modal")


def loaded_after(code: str) -> list[str]:
    """Runs `code` in a fresh interpreter and tells which heavy packages it loaded."""
    code = f"import sys\n{code}\nprint('loaded:', *[p for p in {HEAVY!r} if p in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.rsplit("loaded:", 1)[1].split()


def modules_of(room: str) -> list[str]:
    paths = sorted((PACKAGE / room).rglob("*.py"))
    names = [
        path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
        for path in paths
    ]
    return [name.removesuffix(".__init__") for name in names]


def test_the_package_is_light() -> None:
    assert (
        loaded_after("import penstock; penstock.SamplingParams(); penstock.Config(); dir(penstock)")
        == []
    )


@pytest.mark.parametrize("room", ["schedule", "text", "bench", "almanac", "artifact"])
def test_a_room_without_torch_loads_none(room: str) -> None:
    modules = modules_of(room)
    loaded = loaded_after("\n".join(f"import {name}" for name in modules)) if modules else []
    assert loaded == []


@pytest.mark.parametrize("arguments", [["demo", "--help"], ["serve", "--help"]])
def test_the_command_line_is_light(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ['penstock', *{arguments!r}]
from penstock.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
"""
    assert loaded_after(code) == []


@pytest.mark.parametrize("asked", [None, "0"])
def test_large_pages_are_asked_for_unless_the_user_said_otherwise(asked: str | None) -> None:
    name = "THP_MEM_ALLOC_ENABLE"
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment |= {} if asked is None else {name: asked}
    code = f"import os, penstock; print(os.environ['{name}'])"
    out = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert out.strip() == (asked or "1")


def test_heavy_packages_are_seen() -> None:
    assert loaded_after("sys.modules['torch'] = sys") == ["torch"]
