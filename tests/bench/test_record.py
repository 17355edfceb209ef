"""What a record says of where the bench came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.almanac.record import ClientHealth
from penstock.bench import write_record
from penstock.bench.write_record import archived, commit, word, worst

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


def test_what_lies_beside_the_package_changes_no_commit_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped run goes on after its log was committed, or a record added: they are no part of what measures."""
    git(tmp_path, "init", "-q")
    head = put(tmp_path, "src/a.py", "1")
    monkeypatch.setattr(write_record, "HOUSE", tmp_path / "src")
    assert put(tmp_path, "LOG.md", "a run") != head == commit()
    (tmp_path / "LOG.md").write_text("another run")
    put(tmp_path, "records/r.json", "{}", commit=False)
    assert commit() == head
    put(tmp_path, "src/b.py", "2", commit=False)
    assert (commit() or "").startswith(f"{head}+changed.")


def test_an_environment_in_somebodys_checkout_has_no_commit_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    put(tmp_path, "theirs.py", "1")
    package = tmp_path / "venv" / "penstock"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1")
    monkeypatch.setattr(write_record, "HOUSE", package)
    assert commit() is None
    (tmp_path / ".gitignore").write_text("venv\n")
    assert commit() is None


def test_a_checkout_or_an_installed_package_is_no_archive(tmp_path: Path) -> None:
    as_checked_in = tmp_path / "archived.txt"
    as_checked_in.write_text("$Format:%H$\n")
    assert archived(as_checked_in) is None
    assert archived(tmp_path / "none.txt") is None


def test_a_point_of_which_one_start_was_before_the_calibration_is_judged_as_uncalibrated() -> None:
    """What the almanac refuses to call good: no headroom, and more than half a core."""
    before = ClientHealth(lag_p99=0.001, busy=0.4, headroom=None, late_p99=0.002, short=False)
    after = ClientHealth(lag_p99=0.002, busy=0.7, headroom=3.0, late_p99=0.001, short=False)
    both = ClientHealth(lag_p99=0.002, busy=0.7, headroom=None, late_p99=0.002, short=True)
    assert worst([before, after]) == worst([after, before]) == both
    assert worst([before, before]) == before and worst([after, after]) == after
    idle = after.model_copy(update={"busy": 0.3})
    assert not worst([before, idle]).short and worst([before, idle]).headroom is None
