"""Journals that no run wrote: valid checksums around nonsense, lines without end, links, somebody's
files. Each is one line, in bounded memory, and nothing is written, cut or taken away."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.disk import check_writable, write_new, write_whole
from penstock.errors import JournalError, UsageError
from penstock.jobs.finish_output import finish_output
from penstock.journal import Journal, journal_of
from penstock.journal_lines import LONGEST_LINE

RUN = {"model": "demo"}
ROW = b'{"x": 1}\n'


def sealed(body: str | bytes) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    return b"%08x %b\n" % (zlib.crc32(body), body)


def line(
    key: str = "1", row: bytes = ROW, length: int | str | None = None, checksum: str | None = None
) -> bytes:
    length = len(row) if length is None else length
    return sealed(f"{length} {checksum or f'{zlib.crc32(row):08x}'} {key}")


HEAD = sealed("penstock-journal " + json.dumps({"version": 1, "run": RUN}))
HEADERS = {
    "word": sealed("nonsense"),
    "empty": sealed(""),
    "no JSON": sealed("penstock-journal nope"),
    "a list": sealed("penstock-journal []"),
    "no run": sealed('penstock-journal {"version": 1}'),
    "run of a list": sealed('penstock-journal {"version": 1, "run": []}'),
    "deep": sealed("penstock-journal " + "[" * 100_000),
    "no UTF-8": sealed(b"penstock-journal \xff"),
    "deep run": sealed(
        'penstock-journal {"version": 1, "run": {"model": ' + "[" * 900 + "]" * 900 + "}}"
    ),
    "digits": sealed("penstock-journal " + "9" * 5000),
}
LINES = {
    "word": sealed("hello"),
    "spaces": sealed("   "),
    "no length": line(length="x"),
    "below 0": line(length=-1),
    "nothing": line(row=b""),
    "one byte": line(row=b"\n"),
    "digits": line(length="9" * 5000),
    "no checksum": line(checksum="zz"),
    "no key": line("nope"),
    "an object": line('{"a": 1}'),
    "null": line("null"),
    "a float": line("1.5"),
    "deep": line("[" * 100_000),
    "no UTF-8": sealed(b"9 00000000 \xff"),
    "twice": line("7") + line("7", b""),
}


def written(folder: Path, journal: bytes, data: bytes = ROW) -> Path:
    out = folder / "out.jsonl"
    out.write_bytes(data)
    journal_of(out).write_bytes(journal)
    return out


def refused(out: Path, says: str) -> None:
    """Opening it is one line that names it, and leaves both files as they are."""
    before = [path.read_bytes() for path in (out, journal_of(out))]
    with pytest.raises(JournalError, match=says) as caught:
        Journal(out, RUN)
    assert str(out) in str(caught.value) and len(str(caught.value)) < 500
    assert [path.read_bytes() for path in (out, journal_of(out))] == before


@pytest.mark.parametrize("head", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("data", [ROW, b""], ids=["rows", "no rows"])
def test_a_header_of_a_valid_checksum_around_nonsense(
    head: bytes, data: bytes, tmp_path: Path
) -> None:
    if b'"run": {' in head:
        with pytest.raises(JournalError):
            Journal(written(tmp_path, head), RUN)
    else:
        refused(written(tmp_path, head, data), "no journal that this version reads")


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_a_line_of_a_valid_checksum_around_nonsense(lines: bytes, tmp_path: Path) -> None:
    refused(written(tmp_path, HEAD + lines, ROW * 3), "holds a line that no run wrote")


@pytest.mark.parametrize("length", [10**6, 10**12, 10**30])
def test_a_length_beyond_the_rows(length: int, tmp_path: Path) -> None:
    refused(written(tmp_path, HEAD + line(length=length)), "was changed since its run wrote it")


@pytest.mark.parametrize(
    "row", [b"nope\n", b"[1]\n", b"null\n", b"[" * 100_000 + b"\n", b"\xff\xff\n"]
)
def test_a_row_that_is_no_object(row: bytes, tmp_path: Path) -> None:
    with (
        Journal(written(tmp_path, HEAD + line(row=row), row), RUN) as journal,
        pytest.raises(JournalError, match="holds a row that no run wrote"),
    ):
        list(journal.rows())


@pytest.mark.parametrize("begin", [b"", HEAD], ids=["alone", "behind a header"])
def test_a_line_without_end_takes_little_memory(begin: bytes, tmp_path: Path) -> None:
    """200 MB of it, read by a process of its own that may have 256 MB more than it has to begin
    with."""
    out = written(tmp_path, begin)
    with journal_of(out).open("ab") as file:
        file.truncate(len(begin))
        file.write(b"x")
        file.truncate(200 << 20)  # zeros, and no room on the disk
    code = (
        "import resource, sys; from pathlib import Path; from penstock.journal import Journal\n"
        "own = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (own + (128 << 20),) * 2)\n"
        f"Journal(Path(sys.argv[1]), {RUN!r})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("penstock.errors.JournalError:"), done.stderr
    assert journal_of(out).stat().st_size == 200 << 20 and out.read_bytes() == ROW


def test_zeros_that_a_power_cut_leaves_are_no_line_without_end(tmp_path: Path) -> None:
    with Journal(written(tmp_path, HEAD + line("1") + bytes(LONGEST_LINE)), RUN) as journal:
        assert len(journal) == 1


def test_a_key_longer_than_a_line_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl", RUN) as journal:
        with pytest.raises(JournalError, match="longer than a journal's line"):
            journal.add("x" * LONGEST_LINE, {})
        journal.add("x" * (1 << 20), {})
    with Journal(tmp_path / "out.jsonl", RUN) as journal:
        assert len(journal) == 1


@pytest.mark.parametrize(
    "words", [b"somebody's words", b"deadbeef and no journal", b"\0words", b"words\0\0"]
)
def test_somebodys_file_in_the_place_of_a_journal_stays(words: bytes, tmp_path: Path) -> None:
    refused(written(tmp_path, words, b""), "no journal that this version reads")


@pytest.mark.parametrize("cut", range(0, len(HEAD), 7))
@pytest.mark.parametrize("zeros", [0, 30])
def test_a_header_that_a_power_cut_tore_begins_anew(cut: int, zeros: int, tmp_path: Path) -> None:
    with Journal(written(tmp_path, HEAD[:cut] + bytes(zeros), b""), RUN) as journal:
        journal.add(1, {})
    with Journal(tmp_path / "out.jsonl", RUN) as journal:
        assert len(journal) == 1


# --- links


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal"])
@pytest.mark.parametrize(
    "content", [None, b"", b"somebody's words"], ids=["to nothing", "to an empty file", "to words"]
)
def test_a_link_in_the_place_of_a_journals_file(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    if content is not None:
        target.write_bytes(content)
    (tmp_path / name).symlink_to("target")
    with pytest.raises(JournalError, match="is a link: name the file that it leads to"):
        Journal(tmp_path / "out.jsonl", RUN)
    assert (tmp_path / name).is_symlink()
    assert (target.read_bytes() if target.exists() else None) == content
    assert {path.name for path in tmp_path.iterdir()} <= {name, "target"}


@pytest.mark.parametrize("name", ["out.gz", "out.parquet"])
def test_a_link_that_came_in_the_place_of_out_while_its_run_went_on(
    name: str, tmp_path: Path
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    ledger, out, target = tmp_path / f"{name}.jsonl", tmp_path / name, tmp_path / "target"
    ledger.write_text('{"id": 1, "error": "none"}\n')
    target.write_bytes(b"somebody's words")
    out.symlink_to(target)
    with pytest.raises(JournalError, match="is a link: name the file"):
        finish_output(ledger, out)
    assert target.read_bytes() == b"somebody's words" and out.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {ledger.name, name, "target"}


@pytest.mark.parametrize(
    "write",
    [
        check_writable,
        lambda path: write_whole(path, b"ours"),
        lambda path: write_new(path, b"ours"),
    ],
    ids=["check_writable", "write_whole", "write_new"],
)
def test_no_link_is_written_through(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    with pytest.raises((JournalError, UsageError), match=r"is a link|is there already"):
        write(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("row", ['{"id": 1, "outputs": "words"}', '{"no": "id"}', "nope", "[1]"])
def test_rows_that_no_run_wrote_make_no_parquet(row: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    ledger = tmp_path / "out.parquet.jsonl"
    ledger.write_text(row + "\n")
    with pytest.raises(JournalError, match="holds a row that no run wrote"):
        finish_output(ledger, tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == [ledger.name]


def test_a_new_file_that_finds_no_room_is_not_left_by_half(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from penstock.disk import write_new\n"
        "from penstock.errors import JournalError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    write_new(Path(sys.argv[1]), bytes(50_000))\n"
        "except JournalError as error:\n"
        "    print(error)\n"
    )
    out = tmp_path / "app.py"
    told = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True
    )
    assert "cannot be written (file too large)" in told.stdout and not out.exists()
