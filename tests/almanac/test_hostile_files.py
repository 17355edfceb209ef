"""Files of the almanac that are none, or that are far more than they look: a line each, in bounded
memory and time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_samples import open_loop
from typer.testing import CliRunner

from penstock.almanac.page.build import build
from penstock.almanac.parse_record import LARGEST, read_record
from penstock.almanac.samples import read_parquet, write_parquet
from penstock.almanac.validate import validate
from penstock.cli import app
from penstock.errors import RecordError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Columns = dict[str, Any]


def columns_of(folder: Path) -> Columns:
    """A sound raw file's columns."""
    write_parquet(open_loop(seconds=5.0), folder / "sound.parquet")
    table = pq.ParquetFile(folder / "sound.parquet").read()
    return {name: table.column(name) for name in table.column_names}


def times(columns: Columns, count: int) -> Columns:
    """Their first row, so often."""
    first = pa.array(np.zeros(count, np.int64))
    return {name: column.chunk(0).take(first) for name, column in columns.items()}


def written(folder: Path, columns: Columns) -> Path:
    pq.write_table(pa.table(columns), folder / "raw.parquet", compression="zstd")
    return folder / "raw.parquet"


def many_rows(columns: Columns) -> Columns:
    return times(columns, 2_000_000)


def long_lists(columns: Columns) -> Columns:
    return times(columns, 200) | {
        "gaps": pa.array([np.zeros(200_000, np.float32)] * 200, pa.list_(pa.float32()))
    }


@pytest.mark.parametrize("bomb", [many_rows, long_lists])
def test_a_small_raw_file_of_much_is_refused_before_it_is_read(
    bomb: Callable[[Columns], Columns], tmp_path: Path
) -> None:
    """In a process that may have 256 MB more than it has to begin with."""
    raw = written(tmp_path, bomb(columns_of(tmp_path)))
    assert raw.stat().st_size < 200_000
    code = (
        "import resource, sys, pyarrow.parquet; from pathlib import Path\n"
        "from penstock.almanac.samples import read_parquet\n"
        "own = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (own + (256 << 20),) * 2)\n"
        "read_parquet(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(raw)], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert (
        last.startswith("penstock.errors.RecordError: raw.parquet: its ")
        and "MiB of memory" in last
    ), done.stderr


def test_texts_that_repeat_are_there_once(tmp_path: Path) -> None:
    columns = times(columns_of(tmp_path), 20_000)
    columns["point"] = pa.array(["x" * 1000]).take(pa.array(np.zeros(20_000, np.int64)))
    samples = read_parquet(written(tmp_path, columns))
    assert len({id(point) for point in samples.point}) == 1 and len(samples) == 20_000


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("point", [1] * 9),
        ("point", [None] * 9),
        ("point", [["a"]] * 9),
        ("point", [{"a": 1}] * 9),
        ("point", [b"\xff"] * 9),
        ("start", ["1"] * 9),
        ("start", [None] * 9),
        ("start", [1.5] * 9),
        ("start", [2**40] * 9),
        ("start", [[1]] * 9),
        ("intended", ["1"] * 9),
        ("intended", [True] * 9),
        ("window", [1] * 9),
        ("gaps", [1.0] * 9),
        ("gaps", [None] * 9),
        ("gaps", [[[1.0]]] * 9),
        ("gaps", [["a"]] * 9),
        ("outcome", ["none of ours"] * 9),
        ("outcome", None),
        ("gaps", None),
    ],
)
def test_a_column_that_is_none_of_ours_is_a_line(
    name: str, column: list[Any] | None, tmp_path: Path
) -> None:
    columns = {each: values[:9] for each, values in columns_of(tmp_path).items()}
    columns.pop(name) if column is None else columns.update({name: pa.array(column)})
    with pytest.raises(RecordError) as caught:
        read_parquet(written(tmp_path, columns))
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_columns_beside_ours_are_not_read_and_an_unknown_time_is_nan(tmp_path: Path) -> None:
    columns = {each: values[:9] for each, values in columns_of(tmp_path).items()}
    columns |= {"more": pa.array(["x"] * 9), "first": pa.array([None] * 9, pa.float64())}
    again = read_parquet(written(tmp_path, columns))
    assert len(again) == 9 and np.isnan(again.first).all()


# --- what is no file


def test_a_page_is_built_past_what_is_no_record(tmp_path: Path) -> None:
    root = tmp_path / "records"
    (root / "folder.json").mkdir(parents=True)
    os.mkfifo(root / "pipe.json")
    (root / "link.json").symlink_to("/dev/zero")
    with (root / "long.json").open("wb") as file:
        file.truncate(10 << 30)
    built = build(root, tmp_path / "page")
    assert built.records == 0
    assert {name: reason[:22] for name, reason in built.refused} == {
        "folder.json": "cannot be read: it is ",
        "pipe.json": "cannot be read: it is ",
        "link.json": "is a link: put the rec",
        "long.json": "cannot be read: it has",
    }
    done = CliRunner().invoke(
        app, ["almanac", "build", "--records", str(root), "--out", str(tmp_path / "again")]
    )
    assert done.exit_code == 1 and done.output.count("penstock: refused ") == 4


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_record_or_its_raw_data_that_is_no_file_is_a_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    for read in (read_record, validate, read_parquet):
        with pytest.raises(RecordError, match="it is no plain file"):
            read(path)


def test_a_record_is_read_no_further_than_it_may_be_long(tmp_path: Path) -> None:
    with (tmp_path / "long.json").open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(RecordError, match="are the most"):
        read_record(tmp_path / "long.json")
