"""Traces in their three forms, and what is wrong with one: the numbers of its lines."""

import json
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.simulate.load_source import LoadOptions, LoadSource
from penstock.simulate.read_trace import TraceRow, read_trace


def written(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def test_rows_with_arrivals_and_lengths(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        {"arrival": 2.5, "prompt_tokens": 100, "output_tokens": [5, 9], "max_tokens": 64},
        "",
        {
            "arrival": 0,
            "prompt_tokens": 40,
            "output_tokens": 7,
            "n": 3,
            "shared_tokens": 32,
            "header": "a",
        },
    )
    assert read_trace(path) == [
        TraceRow(0, 40, [7, 7, 7], 0, 32, "a"),
        TraceRow(2.5, 100, [5, 9], 64, 0, ""),
    ]


def test_azures_columns(tmp_path: Path) -> None:
    path = written(
        tmp_path / "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    first, second = read_trace(path)
    assert (first, second.prompt, second.outputs) == (TraceRow(0.0, 374, [44]), 396, [109])
    assert second.arrival == pytest.approx(4.314579, abs=1e-5)
    later = written(
        tmp_path / "2024.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,2162,5",
    )
    assert read_trace(later) == [TraceRow(0.0, 2162, [5])]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal"])
def test_what_a_run_wrote(tmp_path: Path, name: str) -> None:
    answer = {"text": "", "finish_reason": "stop"}
    written(
        tmp_path / "out.jsonl",
        {"id": "a", "outputs": [{**answer, "token_count": 12}, {**answer, "token_count": 30}]},
        {"id": "b", "error": "too long"},
    )
    assert read_trace(tmp_path / name, 80) == [TraceRow(None, 80, [12, 30])]
    with pytest.raises(
        UsageError,
        match=r"^the rows of a run don't say how long prompts were: say it by --prompt-to",
    ):
        read_trace(tmp_path / name)


def test_broken_rows_are_told_by_their_numbers(tmp_path: Path) -> None:
    good = {"arrival": 1, "prompt_tokens": 4, "output_tokens": 4}
    broken = [
        "{",
        [1],
        {**good, "prompt_tokens": 0},
        {**good, "arrival": "now"},
        {**good, "tokens": 4},
        {"arrival": 1, "prompt_tokens": 4},
        {**good, "shared_tokens": 4},
        {**good, "output_tokens": []},
    ]
    path = written(tmp_path / "t.jsonl", good, *broken, good)
    with pytest.raises(UsageError) as error:
        read_trace(path)
    told = str(error.value)
    assert (
        "\n" not in told
        and told.startswith("8 rows are bad")
        and "t.jsonl line 2: it is no JSON" in told
    )
    assert (
        "line 3: a row is a JSON object" in told
        and "line 4: prompt_tokens must be a whole number from 1, not 0" in told
    )
    csv = written(
        tmp_path / "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46,1,2",
        "then,1,2",
    )
    with pytest.raises(UsageError, match=r"t.csv line 3: Invalid isoformat"):
        read_trace(csv)


@pytest.mark.parametrize(
    ("name", "lines", "told"),
    [
        ("none.jsonl", None, "cannot be read"),
        ("empty.jsonl", [], "has no rows"),
        ("other.csv", ["when,in,out"], "TIMESTAMP is missing"),
        (
            "half.jsonl",
            [
                '{"arrival": 1, "prompt_tokens": 4, "output_tokens": 4}',
                '{"prompt_tokens": 4, "output_tokens": 4}',
            ],
            "says of some rows when they arrived",
        ),
    ],
)
def test_a_file_that_is_no_trace(
    tmp_path: Path, name: str, lines: list[object] | None, told: str
) -> None:
    if lines is not None:
        written(tmp_path / name, *lines)
    with pytest.raises(UsageError, match=told):
        read_trace(tmp_path / name)


def test_a_traces_rows_at_its_own_times_or_as_a_job(tmp_path: Path) -> None:
    rows = [{"arrival": 2 * n, "prompt_tokens": 10 + n, "output_tokens": [5, 6]} for n in range(4)]
    path = written(tmp_path / "t.jsonl", *rows)
    own = LoadSource(LoadOptions(trace=path)).arriving()
    assert own.arrival.tolist() == [0, 2, 4, 6] and own.prompt.tolist() == [10, 11, 12, 13]
    assert own.samples.tolist() == [2] * 4 and own.limit.tolist() == [6] * 4 and not own.at_once
    assert LoadSource(LoadOptions(trace=path, load_times=4)).arriving().arrival.tolist() == [
        0,
        0.5,
        1,
        1.5,
    ]
    job = LoadSource(LoadOptions(trace=path, requests=6)).job(6)
    assert job.at_once and job.prompt.tolist() == [10, 11, 12, 13, 10, 11]
    half = LoadSource(LoadOptions(trace=path, seed=1)).arriving(0.5)
    assert 0 < len(half) < 4 and set(half.prompt.tolist()) < {10, 11, 12, 13}


def test_a_rate_and_a_curve() -> None:
    flat = LoadSource(LoadOptions(shape="100x20", rate=50.0, seconds=40.0)).arriving()
    assert (
        len(flat) == pytest.approx(2000, rel=0.1) and (flat.arrival[1:] >= flat.arrival[:-1]).all()
    )
    assert flat.output.tolist() == [20] * len(flat) and not flat.limit.any()
    curve = LoadSource(
        LoadOptions(shape="100x20", rate=50.0, seconds=40.0, curve=(0.0, 1.0, 0.0, 2.0))
    ).arriving()
    parts = [
        int(((curve.arrival >= low) & (curve.arrival < low + 10)).sum()) for low in (0, 10, 20, 30)
    ]
    assert parts[0] == parts[2] == 0 and parts[3] == pytest.approx(2 * parts[1], rel=0.15)
    ends = LoadSource(
        LoadOptions(shape="100x20", rate=50.0, seconds=40.0, lengths="geometric", max_tokens=60)
    ).arriving()
    assert (
        ends.output.mean() == pytest.approx(19, rel=0.1)
        and ends.output.max() == 60
        and set(ends.limit) == {60}
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "say what is asked"),
        ({"shape": "100"}, "there is no shape '100'"),
        ({"shape": "9x9"}, "say how much is asked"),
        ({"shape": "9x9", "rate": 0.0}, "rate must be above 0"),
        ({"shape": "9x9", "rate": 1.0, "requests": 4}, "a job of --requests has no rate"),
        ({"shape": "9x9", "rate": 1.0, "lengths": "long"}, "lengths must be exact or geometric"),
        ({"shape": "9x9", "rate": 1.0, "max_tokens": 4}, "say --lengths geometric"),
        ({"shape": "9x9", "rate": 1.0, "shared_tokens": 9}, "shared_tokens must be below"),
        ({"shape": "9x9", "rate": 1.0, "curve": (0.0, 0.0)}, "a curve is of heights"),
    ],
)
def test_options_that_go_ill_together(options: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        LoadSource(LoadOptions(**options))  # type: ignore[arg-type]
