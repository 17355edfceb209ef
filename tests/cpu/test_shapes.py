"""`penstock bench shapes` at tiny size: the models it writes, what it computes of steps, and a run from end to end."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest

import penstock.kernels
from penstock.almanac.samples import Samples, from_lists
from penstock.bench.load import Seen
from penstock.bench.null_plan import Draw, Plan
from penstock.bench.null_server import NullServer
from penstock.demo import model_folder
from penstock.engine.roofline import limit_seconds
from penstock.errors import EngineError, UsageError
from penstock.jobs.shapes import Options, Results, run_shapes
from penstock.jobs.shapes_http import drive, figures
from penstock.jobs.shapes_limit import Machine
from penstock.jobs.shapes_model import SHAPES, has_weights, load_format, tensors, write_model
from penstock.jobs.shapes_parts import Ran, part_of_kernel, part_of_operator, split
from penstock.jobs.shapes_start import first_token_seconds
from penstock.jobs.shapes_tokenizer import made_up, rare_pair
from penstock.jobs.shapes_watch import Watch
from penstock.jobs.shapes_works import STOP, body_of, chosen, family, params_of, prompts_of
from penstock.llm import LLM
from penstock.models.generation_config import end_ids, read_generation_defaults
from penstock.models.model_config import read_model_config
from penstock.request import SamplingParams
from penstock.text.tokenizer import Tokenizer

TINY = SHAPES["tiny"]
KNOBS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 32, "kv_cache_tokens": 8192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(TINY, folder, weights=True)
    return folder


# --- the model's folder


@pytest.mark.parametrize(("name", "parameters"), [("llama-3.2-1b", 1_235_814_400), ("llama-3-8b", 8_030_261_248)])
def test_shapes_have_the_real_models_size(name: str, parameters: int) -> None:
    """The counts of meta-llama's own checkpoints."""
    assert sum(int(np.prod(size)) for _, size in tensors(SHAPES[name])) == parameters


def test_the_folder_is_read_as_any_model(folder: Path) -> None:
    config = read_model_config(folder)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (TINY.hidden, TINY.layers, TINY.vocab)
    ends = end_ids(config, read_generation_defaults(folder))
    assert len(ends) == TINY.ends and len(set(ends)) == TINY.ends and max(ends) < TINY.vocab
    assert has_weights(folder) and load_format(folder) == "auto"
    with LLM(str(folder), **KNOBS) as llm:
        out = llm.generate(["Question: "], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(out[0].outputs[0].token_ids) == 5


def test_lengths_are_geometric_by_the_share_of_ends(folder: Path) -> None:
    """One id in 16 ends a sample, all are equally likely: 400 samples are 16 tokens long on average, within 5 sigma."""
    with LLM(str(folder), **KNOBS) as llm:
        out = llm.generate([[1, 2, 3]], SamplingParams(n=400, max_tokens=1000, temperature=0.6, seed=1), use_tqdm=False)
    lengths = [len(sample.token_ids) for sample in out[0].outputs]
    assert abs(np.mean(lengths) - TINY.vocab / TINY.ends) < 5 * 16 / 400**0.5


def test_the_tokenizer_is_filled_up_and_still_encodes_as_before(folder: Path) -> None:
    filled, demo = Tokenizer.load(folder), Tokenizer.load(model_folder())
    text = "Question: Anna has 12 apples.\nAnswer:"
    assert filled.vocab_size == TINY.vocab and filled.encode(text) == demo.encode(text)
    assert all(filled.decode([token]) for token in range(demo.vocab_size, TINY.vocab))


def test_a_given_tokenizer_is_taken_gzipped_too(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json.gz"
    source.write_bytes(gzip.compress((model_folder() / "tokenizer.json").read_bytes()))
    write_model(TINY, tmp_path / "model", source)
    assert Tokenizer.load(tmp_path / "model").vocab_size == TINY.vocab
    assert load_format(tmp_path / "model") == "dummy"
    with pytest.raises(UsageError, match=r"there is no tokenizer.json at"):
        write_model(TINY, tmp_path / "other", tmp_path / "nothing")


def test_made_up_words_are_new_and_always_the_same() -> None:
    words = made_up({"a": 0, "b": 1}, 500)
    assert len(words) == 500 and list(words.values()) == list(range(2, 502)) and words == made_up({"a": 0, "b": 1}, 500)


def test_a_rare_pair_is_in_about_the_share_that_was_asked() -> None:
    pieces = [b"ab"] * 40 + [b"cd"] * 9 + [b" ef"] * 51
    assert rare_pair(pieces, 0.1) == "cd"
    with pytest.raises(UsageError, match="no token"):
        rare_pair([b"1", b"2"], 0.1)


# --- works


def test_works_are_asked_for_by_name() -> None:
    works = family("tiny").works
    assert chosen(works, ["all"]) == list(works)
    assert [work.name for work in chosen(works, ["one", "monkeys"])] == ["monkeys", "one"]
    with pytest.raises(UsageError, match=r"no work 'monkey': there are all, monkeys"):
        chosen(works, ["monkey"])
    with pytest.raises(UsageError, match="no shape 'gpt'"):
        family("gpt")


def test_a_work_asks_the_same_both_ways() -> None:
    works = {work.name: work for work in family("llama-3.2-1b").works}
    stops = works["monkeys-stops"]
    assert params_of(stops, "qu").stop == ["qu"] and body_of(stops, "m", "text", "qu")["stop"] == ["qu"]
    assert stops.sampling["stop"] == [STOP]
    ids = works["128-1024"]
    asked = prompts_of(ids, TINY, None, None, "run")
    assert (len(asked), len(asked[0])) == (1000, 128) and asked != prompts_of(ids, TINY, None, None, "again")
    body = body_of(ids, "m", asked[0], "qu")
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (1024, True, True)
    assert not params_of(ids, "qu").detokenize


# --- steps


class Asking:
    """A runner that is only asked."""

    num_blocks = 7

    def answer(self) -> int:
        return 42


def test_watch_counts_what_ran(folder: Path) -> None:
    """A group of 6 samples on a prompt of 40 tokens: 2 blocks are shared, and no token is computed and not counted."""
    with LLM(str(folder), **KNOBS, steps_ahead=0) as llm:
        watch = llm.engine.runner = Watch(llm.engine.runner)
        params = SamplingParams(n=6, max_tokens=4, ignore_eos=True)
        llm.generate([list(range(100, 140))], params, use_tqdm=False)
    steps = watch.steps.columns()
    assert steps["chunk"].sum() == 39 and steps["chunk_pairs"].sum() == 39 * 40 / 2
    assert steps["rows"].sum() == 6 * 4
    tokens_read = steps["own"] + steps["shared_pairs"]
    assert tokens_read.sum() == 6 * (40 + 41 + 42 + 43)
    assert Watch(Asking()).answer() == 42  # type: ignore[arg-type]


def test_a_watch_cuts_at_its_deadline_and_the_engine_goes_on(folder: Path) -> None:
    with LLM(str(folder), **KNOBS) as llm:
        watch = llm.engine.runner = Watch(llm.engine.runner)
        watch.begin(deadline=time.monotonic() - 1)
        long = SamplingParams(max_tokens=900, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3]], long, use_tqdm=False)
        assert watch.cut and len(watch.steps) < 10
        watch.begin()
        out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=7, ignore_eos=True), use_tqdm=False)
        assert len(out[0].outputs[0].token_ids) == 7 and not watch.cut


def test_the_limit_is_the_sum_of_its_terms() -> None:
    machine = Machine("cpu", 2, 1e9, (1, 100), (1e-4, 1e-3), (2e-4, 1e-2))
    names = ("rows", "own", "shared", "shared_pairs", "chunk", "chunk_pairs", "chunk_context")
    steps = dict.fromkeys(names, np.zeros(1))
    assert limit_seconds(steps, TINY, machine) == 0.0
    many = steps | {"rows": np.array([100.0])}
    stored = 100 * (TINY.kv_numbers + TINY.vocab) * 2 / 1e9
    assert limit_seconds(many, TINY, machine) == pytest.approx(TINY.layers * 1e-3 + 1e-2 + stored)
    read = many | {"own": np.array([1e6])}
    gained = limit_seconds(read, TINY, machine) - limit_seconds(many, TINY, machine)
    assert gained == pytest.approx(1e6 * TINY.kv_numbers * 2 / 1e9)
    rate = machine.best_rate(TINY.layer_weights)
    pairs = many | {"shared_pairs": np.array([1e6])}
    gained = limit_seconds(pairs, TINY, machine) - limit_seconds(many, TINY, machine)
    assert gained == pytest.approx(1e6 * 4 * TINY.heads * TINY.head_dim * TINY.layers / rate)


def test_few_rows_take_the_reading_of_the_weights() -> None:
    machine = Machine("cpu", 2, 1e6, (16, 64), (1e-6, 2e-6), (1e-6, 2e-6))
    seconds = machine.products(np.array([0.0, 1.0, 16.0]), 1000, machine.layer)
    assert seconds.tolist() == [0.0, 2e-3, 2e-3]


# --- parts


def test_parts_add_up_to_the_step_with_the_gap() -> None:
    ran = [
        Ran("nvjet_gemm", 0, 400),
        Ran("flash_fwd", 400, 500),
        Ran("flash_fwd", 450, 550),  # beside the other: the gap sees their union
        Ran("add_kernel", 900, 1200),  # half of it is past the window
    ]
    found = split(ran, 100, 1050, 1, part_of_kernel())
    assert found["parts_ms"] == pytest.approx(
        {"products": 300e-6, "attention": 200e-6, "sampling": 0, "elementwise": 150e-6, "gap": 350e-6}
    )
    assert found["busy_percent"] == pytest.approx(100 * 600 / 950)
    assert found["kernels"][0]["name"] == "nvjet_gemm"


def test_our_kernels_count_by_their_file(tmp_path: Path) -> None:
    (tmp_path / "decode.py").write_text("@triton.jit\ndef _own(q):\n    pass\n\ndef host():\n    pass\n")
    (tmp_path / "tiles.py").write_text("@jit\ndef _draw(q):\n    pass\n")
    (tmp_path / "norm.py").write_text("@triton.jit\ndef _norm(q):\n    pass\n")
    (tmp_path / "rows.py").write_text("@triton.jit\ndef _own(q):\n    pass\n")  # a second one of the name
    part_of = part_of_kernel(tmp_path)
    assert [part_of(name) for name in ("_own", "_own_0d1d2d", "_draw", "_norm", "host")] == [
        "attention",
        "attention",
        "sampling",
        "elementwise",
        "elementwise",
    ]
    named = {
        "products": "sm90_xmma_gemm_bf16bf16",
        "attention": "flash_fwd_kernel",
        "elementwise": "vectorized_elementwise_kernel",
    }
    assert {part: part_of(name) for part, name in named.items()} == {part: part for part in named}
    assert part_of_operator("aten::mm") == "products" and part_of_operator("aten::copy_") == "elementwise"


def test_the_files_that_are_named_hold_kernels() -> None:
    """The parts' lists follow the column of kernels: a file that is renamed has to be renamed there too."""
    there = {path.stem for path in (Path(penstock.kernels.__file__).parent / "triton").glob("*.py")}
    assert {"decode", "prefix", "prefill", "linear_small", "tile_sums", "draw", "filters"} <= there
    part_of = part_of_kernel()
    assert [part_of(name) for name in ("_own", "_prefix", "_prefill", "_linear_small", "_rms_norm")] == [
        "attention",
        "attention",
        "attention",
        "products",
        "elementwise",
    ]


# --- what clients bring


def two_posts(second: str) -> tuple[Samples, Seen]:
    """Two requests from 0 to 2 s of the point, 4 tokens in and 10 out, the second with this outcome."""
    pairs = {
        "point": "p", "start": 0, "intended": 0.0, "actual": 0.0, "first": 0.5, "end": 2.0, "events": 0, "gaps": [],
        "prompt_tokens": 4, "output_tokens": 10, "cached_tokens": 0, "asked_prompt": -1, "asked_output": -1,
        "window": True, "outcome": "ok",
    }  # fmt: skip
    samples = from_lists({name: [value, value] for name, value in pairs.items()} | {"outcome": ["ok", second]})
    seen = Seen(
        lag_p99=0.0, busy=0.1, late_p99=0.0, late_limit=1.0, events_per_second=0.0, requests_per_second=1.0,
        processes=1, cpu=0.1, seconds=2.0, again=0, begin=100.0, troubles={second: f"{second} 400"},
    )  # fmt: skip
    return samples, seen


def test_a_cut_work_takes_the_servers_count() -> None:
    work = chosen(family("tiny").works, ["monkeys"])[0]
    whole = figures(work, *two_posts("ok"), {"generation_tokens": 22, "wasted_tokens": 3})
    assert (whole["output_tokens"], whole["output_tokens_per_second"], whole["cut"]) == (20, 10.0, False)
    assert whole["thrown_away_percent"] == pytest.approx(100 * 5 / 25)
    assert (whole["begin"], whole["end"], whole["requests"]) == (100.0, 102.0, 2)
    cut = figures(work, *two_posts("unfinished"), {"generation_tokens": 17, "wasted_tokens": 3})
    assert (cut["output_tokens"], cut["cut"], cut["thrown_away_percent"]) == (17, True, None)
    with pytest.raises(EngineError, match="1 of 2 requests failed: status 400"):
        figures(work, *two_posts("status"), {})


class Nobody:
    """As much of a server as `drive` asks for."""

    model = "m"

    def __init__(self, port: int) -> None:
        self.port = port

    def check(self) -> None:
        """It lives."""


def test_a_work_is_driven_all_at_once_and_cut_in_time() -> None:
    work = chosen(family("tiny").works, ["128-1024"])[0]
    prompts = prompts_of(work, TINY, None, None, "run")
    with NullServer(Plan(gap=Draw("fixed", 0.01))) as server:
        samples, seen = drive(Nobody(server.port), work, prompts, "", 60.0)  # type: ignore[arg-type]
        cut, _ = drive(Nobody(server.port), work, prompts, "", 0.05)  # type: ignore[arg-type]
    assert set(samples.outcome) == {"ok"} and len(samples) == work.count and (samples.intended == 0).all()
    row = figures(work, samples, seen, {"generation_tokens": 0})
    assert row["output_tokens"] == samples.events.sum() == sum(len(gaps) + 1 for gaps in samples.gaps)
    assert 0 < row["first_token_ms_p50"] <= row["first_token_ms_p99"] and row["events_per_second"] > 0
    assert set(cut.outcome) == {"unfinished"}


# --- all of it


def test_a_run_from_end_to_end_gathers_its_results(tmp_path: Path) -> None:
    said: list[str] = []
    first = Options(shape="tiny", works=("one",), out=tmp_path, ways=("llm",), seconds=60, knobs=KNOBS)
    run_shapes(first, said.append)
    second = Options(shape="tiny", works=("128-1024",), out=tmp_path, seconds=60, knobs=KNOBS, profile=False)
    data = run_shapes(second, said.append)
    assert set(data["works"]) == {"tiny/one/llm", "tiny/128-1024/llm", "tiny/128-1024/http"}
    assert json.loads((tmp_path / "results.json").read_text()) == data
    one, at_once, served = (data["works"][key] for key in ("tiny/one/llm", "tiny/128-1024/llm", "tiny/128-1024/http"))
    assert one["output_tokens"] == one["steps"] == 64 and one["thrown_away_percent"] == 0.0
    assert sum(one["parts_ms"].values()) == pytest.approx(one["step_ms"], rel=1e-6)
    assert 0 < one["limit_percent"] < 100
    assert at_once["output_tokens"] == served["output_tokens"] == 6 * 12 and at_once["prompt_tokens"] == 6 * 6
    assert served["prompt_tokens"] == 6 * 6 and served["events_per_second"] > 0
    summed = json.loads(said[-1])
    assert set(summed["works"]) == set(data["works"]) and summed["shape"] == "tiny"


def test_no_time_and_broken_works_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    none = Options(shape="tiny", works=("one",), out=tmp_path, ways=("llm",), minutes=1e-9, knobs=KNOBS)
    assert run_shapes(none, said.append)["works"] == {}
    assert any("no time left for one (llm)" in line for line in said)
    broken = {**KNOBS, "kv_cache_tokens": 100}  # holds no sequence of the shape's length
    with pytest.raises(EngineError, match=r"1 works gave no figure: one \(llm\): kv_cache_tokens \(100\) holds no"):
        run_shapes(Options(shape="tiny", works=("one",), out=tmp_path, ways=("llm",), knobs=broken), said.append)


def test_bad_options_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--through must be one of"):
        Options(shape="tiny", works=("all",), out=tmp_path, ways=("grpc",))
    with pytest.raises(UsageError, match="--seconds must be above 0"):
        Options(shape="tiny", works=("all",), out=tmp_path, seconds=0)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        Results(tmp_path / "results.json")


def test_the_first_token_is_timed(folder: Path) -> None:
    knobs = {**KNOBS, "model": str(folder), "max_model_len": 256}
    assert 0 < first_token_seconds(knobs, cold=True) < 300
