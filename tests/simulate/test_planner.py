"""Answers: the fewest replicas that keep goals, jobs whose middle is not simulated, goals that
nothing keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_steps import made_file, made_table, step_seconds

from penstock.errors import CheckpointError, UsageError
from penstock.simulate.goals import parse_goals
from penstock.simulate.load_source import LoadOptions, LoadSource
from penstock.simulate.planner import Planner
from penstock.simulate.simulated_engine import SimulatedEngine, open_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SimulatedEngine:
    return open_engine(made_file(tmp_path_factory.mktemp("table")), {"max_num_seqs": 4})


def planner(engine: SimulatedEngine, *goals: str, few: int | None = None, **load: Any) -> Planner:
    source = LoadSource(LoadOptions(**{"shape": "64x32", **load}))
    return Planner(engine, source, parse_goals(goals, job=source.is_job), few=few)


def test_the_fewest_replicas_are_the_fewest(engine: SimulatedEngine) -> None:
    asked = planner(engine, "ttft_p95=0.1", rate=300.0, seconds=1.0)
    found = asked.fewest(64)
    assert not found.missed and found.replicas > 1
    assert asked.answer(found.replicas - 1).missed
    assert found.gpus == found.replicas and found.figures.percentile("ttft", 95) <= 0.1


def test_a_goal_that_a_request_alone_misses_is_hopeless(engine: SimulatedEngine) -> None:
    with pytest.raises(
        UsageError,
        match=r"ttft_p50=0.0005 can't be kept by any number .* takes 0.00\d+ s by itself",
    ):
        planner(engine, "ttft_p50=0.0005", rate=5.0, seconds=5.0).fewest(64)
    with pytest.raises(
        UsageError, match=r"ttft_p95, 0.1 s, is missed with 1 replicas .* too: they fall ever"
    ):
        planner(engine, "ttft_p95=0.1", rate=300.0, seconds=2.0).fewest(1)
    with pytest.raises(
        UsageError, match=r"hours=1e-06 can't be kept by any number .* a request of the job takes"
    ):
        planner(engine, "hours=1e-6", requests=50).fewest(4)


def test_a_long_job_goes_on_as_its_middle_does(engine: SimulatedEngine) -> None:
    asked = planner(engine, requests=4 * 60, lengths="geometric")
    line = asked.answer(1).figures
    whole, _ = asked._some(1, 4 * 60)
    assert line.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert line.output_rate == pytest.approx(whole.output_rate, rel=0.1)
    assert line.requests == 240 and line.gpu_seconds == pytest.approx(line.seconds)


def test_a_job_over_many_replicas_counts_each(engine: SimulatedEngine) -> None:
    one, many = (planner(engine, requests=10**9).answer(count) for count in (1, 4000))
    assert (many.simulated, many.gpus, many.figures.requests) == (2, 4000, 10**9)
    assert many.figures.seconds == pytest.approx(one.figures.seconds / 4000, rel=0.05)
    assert many.figures.gpu_seconds == pytest.approx(one.figures.gpu_seconds, rel=0.05)
    assert planner(engine, requests=97).answer(10).figures.requests == 97, (
        "some replicas have a request less"
    )
    rows, steps = 4, step_seconds(4, 80)
    assert many.figures.output_rate < 4000 * rows / steps


def test_replicas_that_are_alike_have_the_same_times(engine: SimulatedEngine) -> None:
    told = {"rate": 300.0, "seconds": 1.5}
    all_of_them = planner(engine, few=8, **told).answer(8).figures
    some = planner(engine, few=4, **told).answer(8).figures
    assert some.output_rate == pytest.approx(all_of_them.output_rate, rel=0.1)
    assert some.percentile("e2e", 50) == pytest.approx(all_of_them.percentile("e2e", 50), rel=0.15)


def test_what_never_ends_is_told_as_missed(engine: SimulatedEngine) -> None:
    """It is stopped once the goal is lost."""
    answer = planner(engine, "e2e_p95=0.2", rate=1000.0, seconds=3.0).answer(1, hurry=True)
    ((goal, reached),) = answer.missed
    assert goal.name == "e2e_p95" and reached == float("inf") and answer.figures.seconds < 3.0


@pytest.mark.parametrize(
    "text", ["ttft=1", "ttft_p95", "ttft_p95=fast", "ttft_p95=-1", "cost_p50=3", "ttft_p950=1"]
)
def test_what_is_no_goal(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no goal: write ttft_p95=1.0"):
        parse_goals([text], job=False)


def test_goals_are_of_their_kind_of_load() -> None:
    with pytest.raises(UsageError, match="ttft_p95 is no goal of a job: write hours=2"):
        parse_goals(["ttft_p95=1"], job=True)
    with pytest.raises(UsageError, match="hours is no goal of requests that arrive"):
        parse_goals(["hours=1"], job=False)


def test_knobs_are_bounded_by_the_table(tmp_path: Path) -> None:
    path = made_file(tmp_path)
    assert open_engine(path, {"kv_cache_tokens": 1600}).limits.num_blocks == 101
    for knobs, told in (
        ({"max_num_seqs": 65}, "was measured with max_num_seqs 64, and 65 are asked"),
        ({"max_num_batched_tokens": 600}, "measured with max_num_batched_tokens 512"),
        ({"max_model_len": 4096}, "measured with max_model_len 2,048"),
        ({"kv_cache_tokens": 10**6}, "was measured with 65,520 tokens of KV"),
        ({"quantization": "fp8"}, "quantization is what a table is measured with"),
    ):
        with pytest.raises(UsageError, match=told):
            open_engine(path, knobs)
    with pytest.raises(UsageError, match="was measured with made, not other"):
        open_engine(path, {}, "other")


def test_windows_take_pages_of_the_same_memory(tmp_path: Path) -> None:
    """A block takes two pages more until its window has passed: by pages, as the engine that was
    timed counts them."""
    path = made_file(tmp_path, table=made_table(window=256, window_tables=2))
    limits = open_engine(path, {}).limits
    assert (limits.num_blocks, limits.window, limits.window_tables) == (3 * 4096, 256, 2)
    assert open_engine(path, {"kv_cache_tokens": 1600}).limits.num_blocks == 3 * 101
    asked = {"kv_cache_tokens": 4800}
    engines = [open_engine(made_file(tmp_path, "plain.json"), asked), open_engine(path, asked)]
    plain, windowed = (
        planner(each, shape="16x1400", requests=20).answer(1).figures.seconds for each in engines
    )
    assert windowed < 0.8 * plain, "more of them run at once"


def test_a_load_that_no_engine_takes(engine: SimulatedEngine) -> None:
    with pytest.raises(
        UsageError,
        match=r"the longest request, prompt and answer, has 3,064 tokens, and .* takes 2,048",
    ):
        planner(engine, shape="64x3000", rate=1.0).answer(1)


def test_files_without_a_table(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no.json is no table of step seconds"):
        open_engine(tmp_path / "no.json", {})
    with pytest.raises(
        CheckpointError, match=r"cannot be read .*: name an artifact's folder, or a file"
    ):
        open_engine(tmp_path / "none.json", {})
    with pytest.raises(
        CheckpointError,
        match=r"is no artifact: penstock build makes one; a file with a table of steps is",
    ):
        open_engine(tmp_path, {})
