"""Parquet and gz: rows in, and OUT made of the journal's lines once all are there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest
from fake_llm import FakeLLM

from penstock.config import Config
from penstock.errors import JournalError, UsageError
from penstock.jobs.finish_output import finish_output
from penstock.jobs.open_llm import OpenLLM
from penstock.jobs.run import run_file

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.torch


def opener(llm: FakeLLM) -> OpenLLM:
    return cast(OpenLLM, lambda config: llm)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, ids: list[Any]) -> Path:
    rows = [
        {"id": ids[0], "prompt": "x", "n": 2, "messages": None},
        {
            "id": ids[1],
            "prompt": None,
            "n": None,
            "messages": [{"role": "user", "content": "Hi", "name": None}],
        },
        {"id": ids[2], "prompt": "y" * 30_000, "n": 1, "messages": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("ids", [[1, 2, 3], ["a", "b", "c"]])
def test_parquet_in_and_out(tmp_path: Path, ids: list[Any]) -> None:
    source, out, llm = write_rows(tmp_path / "in.parquet", ids), tmp_path / "out.parquet", FakeLLM()
    outcome = run_file(source, out, Config(), opener(llm))
    assert (outcome.done, outcome.failed) == (3, 1)
    assert llm.asked[1].messages == [{"role": "user", "content": "Hi"}]
    found = pq.ParquetFile(out).read().to_pylist()
    ledger = lines(tmp_path / "out.parquet.jsonl")
    assert [row["id"] for row in found] == [row["id"] for row in ledger] and {
        row["id"] for row in found
    } == set(ids)
    for row, told in zip(found, ledger, strict=True):
        outputs = (
            [{**output, "logprobs": None} for output in told["outputs"]]
            if "outputs" in told
            else None
        )
        assert (row["outputs"], row["error"]) == (outputs, told.get("error"))


def test_logprobs_and_odd_ids_have_their_columns(tmp_path: Path) -> None:
    top = [{"token_id": 5, "logprob": -0.5, "rank": 1, "decoded_token": "x"}]
    output = {
        "text": "x",
        "finish_reason": "stop",
        "token_count": 1,
        "logprobs": [{"token_id": 5, "top": top}],
    }
    ledger, out = tmp_path / "o.parquet.jsonl", tmp_path / "o.parquet"
    ledger.write_text(
        "".join(
            json.dumps({"id": i, "outputs": [output]}) + "\n" for i in (1, "1", "\ud800", 2**70)
        )
    )
    finish_output(ledger, out)
    found = pq.ParquetFile(out).read().to_pylist()
    assert [row["id"] for row in found] == ["1", "1", "\\ud800", str(2**70)]
    assert all(row["outputs"] == [output] for row in found)


def test_gz_out_goes_on_where_it_was(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl.gz"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"p {i}"}) + "\n" for i in range(40)))
    with pytest.raises(KeyboardInterrupt):
        run_file(source, out, Config(), opener(FakeLLM(dies_after=20)))
    there = {row["id"] for row in lines(tmp_path / "out.jsonl.gz.jsonl")}
    assert not out.exists() and 0 < len(there) < 40
    second = FakeLLM()
    run_file(source, out, Config(), opener(second))
    assert {prompt.key for prompt in second.asked} == set(range(40)) - there
    found = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert sorted(row["id"] for row in found) == list(range(40))


def test_what_is_refused(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in.parquet", [1, 2, 3]), tmp_path / "out.parquet"
    out.write_bytes(b"something")
    with pytest.raises(JournalError, match="there already and no run wrote it"):
        run_file(source, out, Config(), opener(FakeLLM()))
    source.write_bytes(b"no parquet")
    with pytest.raises(UsageError, match=r"in\.parquet cannot be read after row 0"):
        run_file(source, tmp_path / "other.parquet", Config(), opener(FakeLLM()))
    pq.write_table(pa.table({"id": [1], "prompt": [b"bytes"]}), source)
    with pytest.raises(UsageError, match=r"row 1 of .* holds what JSON has no word for .*bytes"):
        run_file(source, tmp_path / "other.parquet", Config(), opener(FakeLLM()))


def test_carried_columns_have_their_types(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    extra = [
        {"answer": 1, "score": 1, "mixed": 1, "right": True, "text": "a", "metadata": {"k": [1]}},
        {"answer": 2, "score": 0.5, "mixed": "b", "right": None, "text": "\ud800"},
    ]
    source.write_text(
        "".join(json.dumps({"id": i, "prompt": "p", **more}) + "\n" for i, more in enumerate(extra))
    )
    run_file(
        source, out, Config(), opener(FakeLLM()), ("answer", "score", "mixed", "right", "text")
    )
    found = sorted(pq.ParquetFile(out).read().to_pylist(), key=lambda row: row["id"])
    names = ("answer", "score", "mixed", "right", "text", "metadata")
    assert [tuple(row[name] for name in names) for row in found] == [
        (1, 1.0, "1", True, "a", '{"k": [1]}'),
        (2, 0.5, "b", None, "\\ud800", None),
    ]


def test_the_plain_copy_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl.gz"
    source.write_text('{"id": 1, "prompt": "x"}\n')
    run_file(source, out, Config(), opener(FakeLLM()))
    assert f"{out}.jsonl and {out.name}.jsonl.journal may be deleted" in capsys.readouterr().err
    run_file(source, tmp_path / "plain.jsonl", Config(), opener(FakeLLM()))
    assert "deleted" not in capsys.readouterr().err
