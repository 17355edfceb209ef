"""vLLM's own result file becomes samples and a record: its figures come out again, what it doesn't
know is marked.

The file is made up in the shape that vllm/benchmarks/serve.py writes; the figures it would print
are computed here by its own definitions (throughput over the whole run; TPOT = (latency - ttft) /
(tokens - 1); latency from the sending).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_result import told

from penstock.almanac.record import Configuration, EngineInfo, MachineInfo, Record
from penstock.almanac.validate import validate
from penstock.bench.vllm_import import read_vllm, record_of
from penstock.errors import RecordError

ENGINE = EngineInfo(
    name="vllm",
    version="0.26.0",
    command="vllm serve x",
    configuration=Configuration(name="default", flags=[]),
)
MACHINE = MachineInfo(
    gpu=None, cpu="made up", cores=2, memory_mib=4096, system="Linux", python="3.11"
)


def write(tmp_path: Path, *results: Any) -> Path:
    path = tmp_path / "result.json"
    path.write_text("\n".join(json.dumps(each) for each in results))
    return path


def imported(tmp_path: Path, *results: dict[str, Any]) -> Record:
    found = read_vllm(write(tmp_path, *results))
    return record_of(
        found,
        tmp_path / "raw.parquet",
        engine=ENGINE,
        machine=MACHINE,
        goals=[0.05, 0.3],
        weights="real",
        dtype="bf16",
    )


def test_its_figures_come_out_again(tmp_path: Path) -> None:
    file = told()
    record = imported(tmp_path, file)
    (point,) = record.points
    ok = np.array(file["output_lens"]) > 0
    ttfts = np.array(file["ttfts"])[ok]
    rows = [row for row, good in zip(file["itls"], ok, strict=True) if good]
    itls = np.concatenate(rows)
    assert (point.name, point.kind, point.rate) == ("open 20", "open", 20.0)
    assert point.complete == file["completed"] and point.outcomes == {"cut": int((~ok).sum())}
    figures = point.figures
    assert figures.first_token and figures.inter_token and figures.per_token and figures.end_to_end
    assert figures.output_rate and figures.request_rate
    assert figures.first_token.mean.value == pytest.approx(ttfts.mean(), rel=1e-4)
    assert figures.first_token.p99.value == pytest.approx(np.percentile(ttfts, 99), rel=1e-4)
    assert figures.inter_token.p99.value == pytest.approx(np.percentile(itls, 99), rel=1e-4)
    assert figures.per_token.p50.value == pytest.approx(
        np.median([np.sum(row) / 15 for row in rows]), rel=1e-4
    )
    assert figures.end_to_end.mean.value == pytest.approx(
        ttfts.mean() + itls.sum() / len(rows), rel=1e-4
    )
    # from the first sending, not from the client's start
    span = file["duration"] - (file["start_times"][0] - 1000.0)
    assert figures.output_rate.value == pytest.approx(16 * ok.sum() / span, rel=1e-4)
    assert figures.request_rate.value == pytest.approx(ok.sum() / span, rel=1e-4)


def test_it_is_a_record_that_can_be_believed_and_is_never_ranked(tmp_path: Path) -> None:
    record = imported(
        tmp_path, told(), told(rate="inf", seed=1), told(rate="inf", users=8, seed=2), told(seed=3)
    )
    (tmp_path / "record.json").write_text(record.model_dump_json(by_alias=True))
    assert validate(tmp_path / "record.json", tmp_path / "raw.parquet") == record
    assert [point.name for point in record.points] == [
        "open 20",
        "saturation",
        "closed 8",
        "open 20 (2)",
    ]
    assert (
        record.shape.kind == "exact"
        and record.shape.name == "64x16"
        and record.shape.prompts == "text"
    )
    for point in record.points:
        assert {"client unknown", "intended start unknown", "text prompts", "client short"} <= set(
            point.marks
        )
        assert point.client.short
    assert record.when == "2026-01-31T12:00:00Z" and record.model.name == "meta-llama/Llama-3.2-1B"
    assert "<b>" not in record.model_dump_json()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ttfts": None}, "got `null` - at `$[0].ttfts`"),
        ({"ttfts": []}, "input_lens: 400 entries, ttfts has 0"),
        ({"itls": [["x"]] * 400}, r"got `str` - at `$[0].itls[0][0]`"),
        ({"itls": [[-1.0]] * 400}, r">= 0.0 - at `$[0].itls[0][0]`"),
        ({"ttfts": [float("nan")] * 400}, "malformed"),
        ({"output_lens": [1e300] * 400}, "at `$[0].output_lens[0]`"),
        ({"start_times": [1.0]}, "start_times: 1 entries, ttfts has 400"),
        ({"start_times": []}, "start_times: is missing"),
        ({"request_rate": "fast"}, "'fast' - at `$[0].request_rate`"),
        ({"max_concurrency": 1.5}, "at `$[0].max_concurrency`"),
        ({"date": "yesterday"}, "at `$[0].date`"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(
        RecordError, match=f"^result.json: is none of vllm bench serve .*{re.escape(says)}"
    ) as refused:
        read_vllm(write(tmp_path, told() | change))
    assert str(refused.value).isprintable()
