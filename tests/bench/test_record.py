"""What a record says of where the bench came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.bench import write_record
from penstock.bench.write_record import archived, commit, word

ROOT = Path(__file__).parents[2]


def test_an_archive_knows_its_commit(tmp_path: Path) -> None:
    asked = ["git", "-C", str(ROOT), "archive", "HEAD", "src/penstock/archived.txt"]
    done = subprocess.run(asked, capture_output=True)
    if done.returncode:
        pytest.skip("this is no checkout that has the file")
    subprocess.run(["tar", "x", "-C", str(tmp_path)], input=done.stdout, check=True)
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert archived(tmp_path / "src/penstock/archived.txt") == head.stdout[:12]


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.check_output(["git", "-C", str(folder), *who, *words], text=True).strip()


def put(folder: Path, name: str, text: str, *, commit: bool = True) -> str:
    """Writes and adds a file, and commits it unless told otherwise; the head that comes of it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    git(folder, "add", "--force", name)
    if commit:
        git(folder, "commit", "-q", "-m", name)
    return git(folder, "rev-parse", "HEAD")[:12]


def test_a_checkout_that_was_changed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    head = put(tmp_path, "src/a.py", "1")
    monkeypatch.setattr(write_record, "HOUSE", tmp_path / "src")
    assert commit() == head
    (tmp_path / "src" / "new.txt").write_text("lies there")
    assert commit() == head
    told = []
    for text in ("2", "3", "2", "\xff"):  # changed, changed further, as it was; no UTF-8
        (tmp_path / "src" / "a.py").write_text(text, encoding="latin-1")
        told.append(commit() or "")
    assert all(each.startswith(f"{head}+changed.") and each == word(each) for each in told)
    assert told[0] == told[2] and len(set(told)) == 3
    assert commit() != put(tmp_path, "src/a.py", "2") == commit()
    monkeypatch.setattr(write_record, "HOUSE", tmp_path.parent)
    assert commit() is None
