"""Writes a run's .parquet or .gz output. It is the last step of a run: such an OUT is made from the
journal's lines once all of them are there.

    OUT.parquet.jsonl (+ .journal), which the run appends to --all rows are there--> OUT.parquet,
    whole or not at all

Knows the format of rows; no engine.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from penstock.almanac.samples import needs_pyarrow
from penstock.disk import write_whole
from penstock.errors import JournalError
from penstock.journal import journal_of

# types of values that a copied column keeps; a column of mixed or other types is stored as JSON
# text
_PLAIN = (str, int, float, bool)
SUFFIXES = (".parquet", ".gz")
ROW_GROUP = 4096  # rows of a Parquet row group


def ledger_of(out: Path) -> Path:
    """Returns the file that a run appends its rows to: OUT itself, or, for a .parquet or .gz OUT,
    which cannot be appended to, a file beside it.

    Raises JournalError if OUT exists and was not made by a run with this name, UsageError if
    pyarrow is missing.
    """
    if not out.name.endswith(SUFFIXES):
        return out
    if out.name.endswith(".parquet"):
        needs_pyarrow()
    ledger = out.with_name(out.name + ".jsonl")
    if out.exists() and not ledger.exists():
        raise JournalError(
            f"{out} is there already and no run wrote it: move it away or name another output"
        )
    return ledger


def finish_output(ledger: Path, out: Path) -> None:
    """Makes OUT from the file of finished rows (ledger), which must be complete; does nothing if
    they are the same file. Raises JournalError, CapacityError."""
    if ledger != out:
        write = _write_parquet if out.name.endswith(".parquet") else _write_gz
        try:
            write_whole(out, lambda file: write(ledger, file))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            # pyarrow's errors are ValueErrors and TypeErrors
            raise JournalError(
                f"{ledger} holds a row that no run wrote ({error}): name another output, or delete"
                f" it and {journal_of(ledger).name} to begin anew"
            ) from error


def _write_gz(ledger: Path, file: BinaryIO) -> None:
    with (
        ledger.open("rb") as lines,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed,
    ):
        shutil.copyfileobj(lines, packed, 1 << 20)


def _write_parquet(ledger: Path, file: BinaryIO) -> None:
    """Writes the ledger's rows as Parquet. Ids are integers if all are, else texts."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    whole = all(isinstance(row["id"], int) and abs(row["id"]) < 2**63 for row in _rows(ledger))
    entry = pa.struct(
        {
            "token_id": pa.int64(),
            "logprob": pa.float64(),
            "rank": pa.int64(),
            "decoded_token": pa.string(),
        }
    )
    output = {
        "text": pa.string(),
        "finish_reason": pa.string(),
        "token_count": pa.int64(),
        "logprobs": pa.list_(pa.struct({"token_id": pa.int64(), "top": pa.list_(entry)})),
    }
    columns = {
        "id": pa.int64() if whole else pa.string(),
        "outputs": pa.list_(pa.struct(output)),
        "error": pa.string(),
    }
    carried = _carried(ledger, set(columns))
    kinds = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema(
        columns | {name: kinds.get(kind, pa.string()) for name, kind in carried.items()}
    )
    texts = {name for name, kind in carried.items() if kind not in kinds}
    with ParquetWriter(file, schema, compression="zstd") as writer:
        rows = _rows(ledger)
        while some := list(islice(rows, ROW_GROUP)):
            told = some if whole else [row | {"id": _text(row["id"])} for row in some]
            told = (
                [row | {name: _json(row[name]) for name in texts & row.keys()} for row in told]
                if texts
                else told
            )
            writer.write_table(pa.Table.from_pylist(told, schema))


def _carried(ledger: Path, own: set[str]) -> dict[str, type]:
    """Returns the names of columns that rows copy from the input, beside OUT's own, with the common
    type of their values; `object` if they have none."""
    kinds: dict[str, set[type]] = {}
    for row in _rows(ledger):
        for name in row.keys() - own:
            value = row[name]
            fits = type(value) in _PLAIN and not (type(value) is int and abs(value) >= 2**63)
            kinds.setdefault(name, set()).update(
                {type(value) if fits else object} if value is not None else ()
            )
    told = {
        name: {float} if found == {int, float} else found for name, found in sorted(kinds.items())
    }
    return {name: next(iter(found)) if len(found) == 1 else object for name, found in told.items()}


def _json(value: Any) -> str | None:
    return None if value is None else _text(value) if isinstance(value, str) else json.dumps(value)


def _text(key: str | int) -> str:
    # escape unpaired surrogates, which Parquet texts cannot hold
    return str(key).encode("utf-8", "backslashreplace").decode()


def _rows(ledger: Path) -> Iterator[dict[str, Any]]:
    with ledger.open("rb") as lines:
        for line in lines:
            yield json.loads(line)
