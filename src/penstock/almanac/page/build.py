"""Builds the almanac's web page. The page is a folder of static files, made from records, site/,
compact.py and downloads.py. The same records give the same bytes. Knows files; site/ decides what
the page shows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from penstock.almanac.page import compact
from penstock.almanac.page.compact import GroupKey, PageEntry
from penstock.almanac.page.downloads import NAMES, Downloads
from penstock.almanac.parse_record import read_bytes, record_of
from penstock.almanac.record import Record
from penstock.errors import RecordError, UsageError

_MARKER = "data/index.js"


@dataclass(frozen=True)
class Built:
    """The result of building the page. refused: (file, reason) of files that are no benchmark
    records and so are not on the page."""

    records: int
    groups: int
    refused: list[tuple[str, str]]


def build(source: Path | Iterable[Record], out: Path) -> Built:
    """Writes the page of the given records, or of the records under a folder, into `out`; an older
    page is overwritten.

    Raises UsageError when there is no such folder, `out` holds something that is no page, or
    pyarrow is missing.
    """
    if isinstance(source, Path) and not source.is_dir():
        raise UsageError(
            f"there is no folder of records at {source}: go where one is, or name one with"
            " --records",
            param="records",
        )
    _take(out)
    data = out / "data"
    refused: list[tuple[str, str]] = []
    found = _read(source, refused) if isinstance(source, Path) else _given(source)
    with _uncollected():
        entries = _entries(found, Downloads(data))
    grouped = _grouped(entries)
    for number, of_group in enumerate(grouped.values()):
        (data / f"g{number}.js").write_text(
            compact.group_script(number, of_group), encoding="ascii"
        )
    (data / "index.js").write_text(
        compact.index_script(grouped, _facts(data, refused)), encoding="ascii"
    )
    _write_site(out)
    return Built(len(entries), len(grouped), refused)


def _entries(found: Iterable[tuple[str, Record, str]], taken: Downloads) -> list[PageEntry]:
    """Returns the page's entry of each benchmark record; also adds each record to the download
    files `taken`."""
    entries: list[PageEntry] = []
    for file, record, text in found:
        rows = [compact.sample_rows(point.sample) for point in record.points]
        taken.add(file, record, text, rows)
        entries.append(compact.entry(file, record, rows))
    taken.close()
    return entries


@contextmanager
def _uncollected() -> Iterator[None]:
    """Runs without Python's cycle collector: records have no cycles, and repeated walks over all of
    them took a sixth of a build's time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _take(out: Path) -> None:
    """Makes the output folder and at once marks it as a page, so that a later build may overwrite
    it even if this one fails. Deletes an older page's group files, because there may be fewer
    groups now."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give a folder for the page", param="out")
    if out.is_dir() and any(out.iterdir()) and not (out / _MARKER).is_file():
        raise UsageError(
            f"{out} holds something that is no almanac page: give an empty or a new folder",
            param="out",
        )
    (out / "data").mkdir(parents=True, exist_ok=True)
    (out / _MARKER).touch()
    for old in (out / "data").glob("g*.js"):
        old.unlink()


def _read(root: Path, refused: list[tuple[str, str]]) -> Iterator[tuple[str, Record, str]]:
    """Yields (name, record, text) of every record under a folder, sorted by name. Adds other files
    to `refused`, with the reason."""
    runs: set[str] = set()
    for path in sorted(root.rglob("*.json")):
        name = path.relative_to(root).as_posix()
        try:
            record, text = _one(path)
            if record.run in runs:
                raise RecordError(f"{path.name}: run {record.run} is here already, in another file")
        except RecordError as error:
            refused.append((name, str(error).removeprefix(f"{path.name}: ")))
            continue
        runs.add(record.run)
        yield name, record, text


def _one(path: Path) -> tuple[Record, str]:
    """Returns a file's record and its text. Records were validated when they entered the almanac;
    here only the format is checked again (`record_of`: also hostile texts and duplicate keys)."""
    if path.is_symlink():
        raise RecordError(f"{path.name}: is a link: put the record itself there")
    content = read_bytes(path)
    return record_of(content, path.name), content.decode("utf-8")


def _given(records: Iterable[Record]) -> Iterator[tuple[str, Record, str]]:
    for record in records:
        yield f"{record.run}.json", record, record.model_dump_json(by_alias=True)


def _grouped(entries: list[PageEntry]) -> dict[GroupKey, list[PageEntry]]:
    """Groups entries by subject (model, machine, shape), sorted by the subjects' labels. Within a
    group the newest record is first."""
    groups: dict[GroupKey, list[PageEntry]] = {}
    for each in entries:
        groups.setdefault(each.about, []).append(each)
    for of_group in groups.values():
        of_group.sort(key=lambda each: (each.line["when"], each.line["run"]), reverse=True)
    return dict(
        sorted(groups.items(), key=lambda each: (each[0].model, each[0].machine, each[0].shape))
    )


def _facts(data: Path, refused: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "scale": [compact.SMALLEST, compact.LARGEST, compact.STEPS],
        "downloads": [[name, (data / name).stat().st_size] for name in NAMES],
        "refused": refused,
        "form": Record.model_json_schema(by_alias=True),
    }


# --- the page's own files, from the folder site/


def _write_site(out: Path) -> None:
    """Joins the parts of site/: views into index.html, scripts into one function, styles into one
    sheet."""
    site = resources.files("penstock.almanac.page") / "site"
    page = _text(site / "index.html").replace("<!-- views -->", _joined(site / "views", ".html"))
    (out / "index.html").write_text(page, encoding="utf-8")
    (out / "page.css").write_text(_joined(site / "style", ".css"), encoding="utf-8")
    script = f'"use strict";\n(() => {{\n{_joined(site / "script", ".js")}\n}})();\n'
    (out / "page.js").write_text(script, encoding="utf-8")


def _joined(folder: Traversable, ending: str) -> str:
    files = sorted(
        (file for file in folder.iterdir() if file.name.endswith(ending)),
        key=lambda file: file.name,
    )
    return "\n".join(_text(file) for file in files)


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")
