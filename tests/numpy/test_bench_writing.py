"""What a record says of where the bench came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.bench import writing
from penstock.bench.writing import archived, commit

ROOT = Path(__file__).parents[2]


def test_an_archive_knows_its_commit(tmp_path: Path) -> None:
    asked = ["git", "-C", str(ROOT), "archive", "HEAD", "src/penstock/archived.txt"]
    done = subprocess.run(asked, capture_output=True)
    if done.returncode:
        pytest.skip("this is no checkout that has the file")
    subprocess.run(["tar", "x", "-C", str(tmp_path)], input=done.stdout, check=True)
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert archived(tmp_path / "src/penstock/archived.txt") == head.stdout[:12]


def test_a_checkout_that_was_changed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", "-C", str(tmp_path), *who, *words], text=True).strip()

    git("init", "-q")
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-q", "-m", "first")
    git("tag", "v1")
    monkeypatch.setattr(writing, "HOUSE", tmp_path)
    head = git("rev-parse", "HEAD")[:12]
    assert commit() == head
    (tmp_path / "new.txt").write_text("lies there")
    assert commit() == head
    (tmp_path / "a.py").write_text("2")
    assert commit() == f"{head}+changed"
    monkeypatch.setattr(writing, "HOUSE", tmp_path.parent)
    assert commit() is None


def test_a_checkout_or_an_installed_package_is_no_archive(tmp_path: Path) -> None:
    as_checked_in = tmp_path / "archived.txt"
    as_checked_in.write_text("$Format:%H$\n")
    assert archived(as_checked_in) is None
    assert archived(tmp_path / "none.txt") is None
