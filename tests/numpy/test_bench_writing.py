"""What a record says of where the bench came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.bench.writing import archived

ROOT = Path(__file__).parents[2]


def test_an_archive_knows_its_commit(tmp_path: Path) -> None:
    asked = ["git", "-C", str(ROOT), "archive", "HEAD", "src/penstock/archived.txt"]
    done = subprocess.run(asked, capture_output=True)
    if done.returncode:
        pytest.skip("this is no checkout that has the file")
    subprocess.run(["tar", "x", "-C", str(tmp_path)], input=done.stdout, check=True)
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert archived(tmp_path / "src/penstock/archived.txt") == head.stdout[:12]


def test_a_checkout_or_an_installed_package_is_no_archive(tmp_path: Path) -> None:
    as_checked_in = tmp_path / "archived.txt"
    as_checked_in.write_text("$Format:%H$\n")
    assert archived(as_checked_in) is None
    assert archived(tmp_path / "none.txt") is None
