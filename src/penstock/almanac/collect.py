"""The almanac's files: where a record belongs, how one gets there, and all of them read.

    <root>/<engine>/<date>/<gpu>.<model>.<shape>.<configuration>.<run>.json         root:
    almanac/records

It knows files and names; whether a record can be believed is validate.py's.
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

RECORD, RAW = "record.json", "raw.parquet"  # in a run's folder
_LONGEST = 60  # characters of a part of a name


def place_of(record: Record) -> Path:
    """Returns its path relative to the root. Whatever the names in the record hold, it lies below
    the root and has five parts."""
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
    """Returns a name as a part of a file's: letters, digits, - and _ alone; a dot, which parts the
    parts, is a _."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", name.replace(".", "_"))[:_LONGEST].strip("-_")
    return plain or "unnamed"


def add(
    run_folder: Path,
    root: Path,
    *,
    commit: str | None = None,
    tell: Callable[[str], object] = print,
) -> Path:
    """Takes a run into the almanac: its record, after every number was derived again from its raw
    data. Returns the new file. commit: of these sources. Where the record names the same, a number
    that comes out otherwise is a fault; where it names others, what these derive goes in, and
    `tell` hears in one line what that changes. Raises RecordError for a run that cannot be
    believed, lacks a file, or is there already."""
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
        os.link(aside, path)  # unlike a rename, it never replaces one that is there
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
    """Returns the record that goes in, and what of it other sources have derived otherwise."""
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
    """Raises RecordError for a record of points that names no raw data."""
    if record.raw is None and record.points:
        raise RecordError(
            f"{path.name}: raw: is missing, and points cannot be derived again without what it"
            " names"
        )


def read_all(root: Path) -> tuple[dict[str, Record], dict[str, str]]:
    """Returns every record below root by its place, and what is wrong with the others by theirs.
    One bad file hides no good one. A record at another place than its own is a problem too, and so
    is a run that stands there twice, by its name or by its raw data."""
    records: dict[str, Record] = {}
    problems: dict[str, str] = {}
    if not root.is_dir():
        return records, {one_line(str(root)): "is no folder of records"}
    # by name, and by the checksum of the raw data, which is longer than any name
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
