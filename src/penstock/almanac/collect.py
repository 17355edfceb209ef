"""Adds benchmark records to the almanac and reads them. It also decides each record's path:

    <root>/<engine>/<date>/<gpu>.<model>.<shape>.<configuration>.<run>.json
    root: almanac/records

Knows files and names; validate.py decides whether a record can be believed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from penstock import __version__
from penstock.almanac.parse_record import one_line, read_record
from penstock.almanac.record import Record
from penstock.almanac.validate import derived_anew, validate
from penstock.errors import RecordError

RECORD, RAW = "record.json", "raw.parquet"  # names of the two files in a benchmark run's folder
_LONGEST = 60  # characters of one part of a file name


def place_of(record: Record) -> Path:
    """Returns a benchmark record's path relative to the root. Names in the record cannot lead the
    path out of the root; the file name always has five parts."""
    gpu = record.machine.gpu
    machine = (
        "cpu"
        if gpu is None
        else safe(gpu.name)
        if gpu.count == 1
        else f"{gpu.count}x{safe(gpu.name)}"
    )
    parts = (
        machine,
        *map(safe, (record.model.name, record.shape.name, record.engine.configuration.name)),
        record.run,
    )
    return Path(safe(record.engine.name)) / record.when[:10] / f"{'.'.join(parts)}.json"


def safe(name: str) -> str:
    """Returns a name that is safe as a part of a file name: letters, digits, - and _. A dot, which
    separates the parts, becomes _."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", name.replace(".", "_"))[:_LONGEST].strip("-_")
    return plain or "unnamed"


def add(
    run_folder: Path,
    root: Path,
    *,
    commit: str | None = None,
    tell: Callable[[str], object] = print,
) -> Path:
    """Adds a run to the almanac, after deriving every number again from its raw data. Returns the
    path of the new record file.

    commit: the git commit of these sources. A benchmark record made by the same commit must have
    the same numbers; a difference raises RecordError. For a record made by another commit the newly
    derived numbers are stored, and `tell` is called with one line about the changes. Raises
    RecordError for a run that cannot be believed, lacks a file, or is in the almanac already.
    """
    source, raw = run_folder / RECORD, run_folder / RAW
    if not source.is_file():
        raise RecordError(
            f"{run_folder.name}: holds no {RECORD}: is the run finished, and the folder a run's?"
        )
    record, otherwise = _believed(source, raw, commit)
    path = root / place_of(record)
    there, _ = read_all(root)
    for place, other in there.items():
        if record.raw is not None and other.raw == record.raw and root / place != path:
            raise RecordError(
                f"{run_folder.name}: raw: the same raw data is {place}'s: a run is added once"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.write_text(record.model_dump_json(by_alias=True) + "\n", encoding="utf-8")
    try:
        os.link(aside, path)  # unlike a rename, a link never replaces an existing file
    except FileExistsError as error:
        raise RecordError(
            f"{path.relative_to(root)}: is in the almanac already: a run is added once"
        ) from error
    finally:
        aside.unlink()
    if otherwise:
        more = f" (and {len(otherwise) - 1} more)" if len(otherwise) > 1 else ""
        tell(
            f"{run_folder.name}: derived anew, for {_sources(record)} derived otherwise:"
            f" {otherwise[0]}{more}"
        )
    return path


def _believed(source: Path, raw: Path, commit: str | None) -> tuple[Record, list[str]]:
    """Returns the benchmark record to add, and the names of numbers that differ from those in the
    run's folder."""
    told = read_record(source)
    names_raw(told, source)
    if told.raw is None:
        return validate(source), []
    if not raw.is_file():
        raise RecordError(
            f"{source.parent.name}: its record names raw data, but there is no {RAW} to derive it"
            " from again"
        )
    derived, otherwise = derived_anew(source, raw)
    ours = (told.client.penstock, told.client.commit) == (__version__, commit)
    if ours and otherwise:
        raise RecordError(f"{source.name}: {otherwise[0]}")
    return told if ours else derived, otherwise


def _sources(record: Record) -> str:
    client = record.client
    return f"Penstock {client.penstock}{f' at {client.commit}' if client.commit else ''}"


def names_raw(record: Record, path: Path) -> None:
    """Raises RecordError for a benchmark record that has load levels but names no raw data."""
    if record.raw is None and record.points:
        raise RecordError(
            f"{path.name}: raw: is missing, and points cannot be derived again without what it"
            " names"
        )


def read_all(root: Path) -> tuple[dict[str, Record], dict[str, str]]:
    """Returns (records, problems), two dicts whose keys are paths below root. A bad file is a
    problem and does not hide good ones. Other problems are a benchmark record at a wrong path, and
    a run that is there twice (equal run name or equal raw data).
    """
    records: dict[str, Record] = {}
    problems: dict[str, str] = {}
    if not root.is_dir():
        return records, {one_line(str(root)): "is no folder of records"}
    # keys are run names and checksums of raw data; a checksum is longer than any name
    runs: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            continue
        try:
            _take(path, name, records, runs)
        except RecordError as error:
            problems[name] = str(error)
    return records, problems


def _take(path: Path, name: str, records: dict[str, Record], runs: dict[str, str]) -> None:
    if path.is_symlink() or not path.is_file():
        raise RecordError(f"{path.name}: is no plain file")
    if path.suffix != ".json":
        raise RecordError(f"{path.name}: is no .json file: nothing else belongs among the records")
    record = validate(path)
    names_raw(record, path)
    if (place := place_of(record).as_posix()) != name:
        raise RecordError(f"{path.name}: belongs at {place}")
    if record.run in runs:
        raise RecordError(f"{path.name}: run {record.run} is {runs[record.run]} already")
    if record.raw is not None and record.raw.sha256 in runs:
        raise RecordError(
            f"{path.name}: raw: the same raw data is {runs[record.raw.sha256]}'s already"
        )
    runs[record.run] = name
    if record.raw is not None:
        runs[record.raw.sha256] = name
    records[name] = record
