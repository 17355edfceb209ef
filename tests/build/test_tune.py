"""Tuning, over a model that only tells times: what is tried with what, what is taken, what is taken
back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from penstock.artifact.describe import describe_decision
from penstock.artifact.manifest import Decision, StepSeconds, Value
from penstock.build import choose_weights
from penstock.build import tune as tune_file
from penstock.build.options import BuildOptions, WorkShape
from penstock.build.source import SourceModel
from penstock.build.trial import OpenModel, Timing, in_time
from penstock.build.tune import Tuned, Tuner
from penstock.build.work_sample import WorkSample, shape_work
from penstock.config import Config
from penstock.demo import model_folder
from penstock.errors import CapacityError, UsageError
from penstock.kernels.choose import _pick
from penstock.models.read_config import read_model_config

pytestmark = pytest.mark.torch

# knobs that differ from their defaults -> how many times as fast
Speed = Callable[[dict[str, Any]], float]


class Told:
    """In place of an OpenModel: a token takes a millisecond, divided by `speed` of the knobs."""

    opened: ClassVar[list[dict[str, Any]]] = []
    speed: Speed = staticmethod(lambda knobs: 1.0)
    room = 9  # models at once
    clock = 0.0
    table_seconds = 0.0  # that steps may be timed for

    def __init__(self, config: Config, folder: Path) -> None:
        if len(self.opened) >= self.room:
            raise CapacityError("no room")
        usual = Config()
        here = {n: getattr(place, n) for n, place in config.places().items()}
        self.knobs = {
            n: v for n, v in here.items() if v != getattr(usual.places()[n], n)
        } | config.tuned
        self.opened.append(self.knobs)
        self.runner = SimpleNamespace(max_rows=256, max_batched_tokens=2048, grouping=True)

    @staticmethod
    def time_steps(runner: Any, first: Sequence[Any], seconds: float) -> StepSeconds:
        Told.table_seconds = seconds
        return StepSeconds()

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.remove(self.knobs)

    def run(self, works: Sequence[WorkSample], knobs: Mapping[str, Value] | None = None) -> Timing:
        tokens = sum(sum(work.outputs) for work in works)
        told = {**self.knobs, **(knobs or {})}
        seconds = tokens / 1e3 / Told.speed({n: v for n, v in told.items() if v is not None})
        Told.clock += seconds
        return Timing(
            seconds, tokens, sum(len(work.prompts) for work in works), seconds, 0.25 * seconds
        )


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tuned]:
    def run(
        speed: Speed,
        *,
        device: str = "cpu",
        room: int = 9,
        tunables: Mapping[str, int] | None = None,
        coarse_kv: str | None = None,
        **told: Any,
    ) -> Tuned:
        Told.opened, Told.speed, Told.room, Told.clock = [], staticmethod(speed), room, 0.0  # type: ignore[assignment]
        found = [Decision(name=n, chosen=value, default=0) for n, value in (tunables or {}).items()]
        monkeypatch.setattr(tune_file, "OpenModel", Told)
        monkeypatch.setattr(tune_file, "find_device", lambda name: torch.device(device))
        monkeypatch.setattr(tune_file, "tune_kernels", lambda *_: found)
        monkeypatch.setattr(tune_file, "time_steps", Told.time_steps)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(tune_file, "find_ops", gpu_ops)
        work = shape_work(WorkShape(16, 8, 10), read_model_config(model_folder()), 2304)
        options = BuildOptions(model="demo", out=str(model_folder()), **told)
        return Tuner(options, [work], coarse_kv, clock=lambda: Told.clock).run()

    return run


def named(tuned: Tuned) -> dict[str, Decision]:
    return {decision.name: decision for decision in tuned.decisions}


def test_nothing_wins_and_the_defaults_stay(tuned: Callable[..., Tuned]) -> None:
    found = tuned(lambda knobs: 1.0)
    assert (
        found.engine == {}
        and found.tunables == {}
        and {d.name for d in found.decisions}
        == {
            "max_num_batched_tokens",
            "steps_ahead",
        }
    )
    assert all(d.chosen == d.default and d.won_percent == 0 for d in found.decisions)
    (expected,) = found.expected
    assert (
        expected.output_tokens_per_second == pytest.approx(1000) and expected.share_of_limit == 0.25
    )


@pytest.mark.parametrize(("device", "least"), [("cpu", 160.0), ("cuda", 30.0)])
def test_time_that_knobs_leave_is_the_tables(
    tuned: Callable[..., Tuned], device: str, least: float
) -> None:
    """Of five minutes; on a GPU what is left is for knobs that a model is opened with."""
    tuned(lambda knobs: 1.0, device=device, tune_minutes=5.0)
    assert least <= Told.table_seconds < least + 20.0


@pytest.mark.parametrize(("best", "then"), [(2, 4), (6, 6)])
def test_the_number_of_drafts_is_tried_on_a_model_opened_for_the_most(
    tuned: Callable[..., Tuned], best: int, then: int
) -> None:
    """The user's own text, which names no number, is the default. Later models are opened for what
    was chosen, and for the default that it is compared with."""
    seen = list[int]()

    def speed(knobs: Mapping[str, Value]) -> float:
        for opened in Told.opened:
            seen.append(json.loads(opened["speculative_config"]).get("num_speculative_tokens", 4))
        count = json.loads(knobs["speculative_config"]).get("num_speculative_tokens", 4)
        return 1.0 / (1 + abs(count - best))

    asked = '{"method": "ngram"}'
    found = tuned(speed, knobs={"speculative_config": asked})
    chosen = json.dumps({"method": "ngram", "num_speculative_tokens": best})
    assert found.engine == {"speculative_config": chosen}
    decision = named(found)["speculative_config"]
    assert decision.default == asked and decision.won_percent == pytest.approx(200.0)
    assert list(dict.fromkeys(seen)) == [8, then]
    fixed = '{"method": "ngram", "num_speculative_tokens": 4}'
    found = tuned(speed, knobs={"speculative_config": fixed})
    assert "speculative_config" not in named(found)


def test_a_winner_is_taken_and_the_next_is_tried_with_it(tuned: Callable[..., Tuned]) -> None:
    """Two steps ahead pay beside fewer tokens of a step alone."""

    def speed(knobs: dict[str, Any]) -> float:
        fewer = knobs.get("max_num_batched_tokens") == 512
        return (1.1 if fewer else 1.0) * (1.2 if fewer and knobs.get("steps_ahead") == 2 else 1.0)

    found = tuned(speed)
    assert found.engine == {"max_num_batched_tokens": 512, "steps_ahead": 2}
    assert named(found)["steps_ahead"].won_percent == pytest.approx(20.0)
    assert named(found)["all together"].won_percent == pytest.approx(32.0)
    assert found.expected[0].output_tokens_per_second == pytest.approx(1320)


def test_what_is_no_faster_together_is_taken_back(tuned: Callable[..., Tuned]) -> None:
    """A tunable that its kernels gain by, and whole runs lose by."""
    found = tuned(
        lambda knobs: 0.9 if "linear.small_rows" in knobs else 1.0,
        tunables={"linear.small_rows": 4},
    )
    assert found.engine == found.tunables == {}
    assert named(found)["linear.small_rows"].chosen == 0
    assert named(found)["linear.small_rows"].note.startswith("4 was taken back")
    assert named(found)["all together"].chosen == "defaults"
    assert found.expected[0].output_tokens_per_second == pytest.approx(1000)


def test_knobs_that_a_model_is_opened_with(tuned: Callable[..., Tuned]) -> None:
    def speed(knobs: dict[str, Any]) -> float:
        return (1.05 if knobs.get("max_num_seqs") == 16 else 1.0) * (
            0.9 if knobs.get("kv_cache_dtype") == "fp8" else 1
        )

    found = tuned(speed, device="cuda")
    assert found.engine == {"max_num_seqs": 16, "max_cudagraph_capture_size": 16}
    assert named(found)["kv_cache_dtype"].chosen == "auto"
    assert Told.opened == []
    assert "kv_cache_dtype" not in named(tuned(speed, device="cuda", kv_cache_dtype="fp8"))
    coarse = named(
        tuned(lambda knobs: 1.0 + ("kv_cache_dtype" in knobs), device="cuda", coarse_kv="KL 1 off")
    )
    assert (coarse["kv_cache_dtype"].chosen, coarse["kv_cache_dtype"].note) == ("auto", "KL 1 off")
    assert "max_num_seqs" not in named(tuned(speed, device="cuda", knobs={"max_num_seqs": 64}))


def test_where_two_engines_do_not_fit_it_is_said(tuned: Callable[..., Tuned]) -> None:
    found = tuned(lambda knobs: 1.0, device="cuda", room=1)
    assert named(found)["max_num_seqs"].note == "not timed: no room"
    assert found.engine == {"max_cudagraph_capture_size": 16}  # which is not timed


def test_what_the_user_named_is_not_tried(tuned: Callable[..., Tuned]) -> None:
    found = tuned(lambda knobs: 1.0, knobs={"steps_ahead": 2, "max_num_batched_tokens": 1024})
    assert found.decisions == [] and found.engine == {}


def test_latency_is_less_of_milliseconds(tuned: Callable[..., Tuned]) -> None:
    found = tuned(lambda knobs: 2.0 if knobs.get("steps_ahead") == 0 else 1.0, objective="latency")
    assert found.engine == {"steps_ahead": 0} and found.expected[0].request_ms == pytest.approx(
        40.0
    )
    said = describe_decision(named(found)["steps_ahead"])
    assert (
        said == "steps_ahead: 0, default 1, +100.0 %, noise 0.0 %, 40, by default 80 ms a request"
    )


def test_no_time_times_nothing(tuned: Callable[..., Tuned]) -> None:
    found = tuned(
        lambda knobs: 2.0 if knobs else 1.0, tune_minutes=0.0, tunables={"linear.small_rows": 4}
    )
    assert (found.decisions, found.engine, found.tunables, found.expected) == ([], {}, {}, [])
    assert Told.clock == 0.0 and len(found.works) == 1
    found = tuned(
        lambda knobs: 1.0, tune_minutes=0.0, device="cuda", knobs={"max_cudagraph_capture_size": 8}
    )
    assert found.engine == {}


def test_runs_are_cut_to_the_time_there_is() -> None:
    work = shape_work(WorkShape(16, 100, 10), read_model_config(model_folder()), 2304)

    class Slow(Told):
        def run(
            self, works: Sequence[WorkSample], knobs: Mapping[str, Value] | None = None
        ) -> Timing:
            seconds = sum(len(each.prompts) * 0.1 + sum(each.outputs) * 0.01 for each in works)
            return Timing(seconds, 1, 1, seconds, None)

    def cut(room: float) -> WorkSample:
        (found,) = in_time(Slow(Config(), Path()), [work], room, lambda line: None)  # type: ignore[arg-type]
        return found

    Told.opened, Told.room = [], 9
    assert cut(20.0) is work
    assert cut(6.0).outputs == [48] * 10 and len(cut(6.0).prompts) == 10
    assert len(cut(1.2).prompts) == 5 and max(cut(1.2).outputs) < 20
    assert len(cut(0.0).prompts) == 1


def test_a_model_that_is_opened_runs_works_and_sees_how_long_answers_are() -> None:
    config = Config.of(model="demo", device="cpu", max_model_len=256)
    work = WorkSample(
        told="rows",
        prompts=[list(range(40, 60)), [7, 8, 9]],
        sampling=[{"n": 2, "temperature": 0.6, "seed": 1}, {}],
        outputs=[40, 12],
        concurrency=3,
        ends=True,
    )
    with OpenModel(config, model_folder()) as model:
        answers = model.answers(work)
        seen = model.look(work)
        timing = model.run([seen], {"steps_ahead": 2, "max_num_batched_tokens": 256})
    lengths = [len(answer) for answer in answers]
    assert len(lengths) == 3 and seen.ends is False
    assert seen.outputs == [round((lengths[0] + lengths[1]) / 2), lengths[2]]
    assert timing.output_tokens == 2 * seen.outputs[0] + seen.outputs[1] and timing.requests == 2
    assert 0 < timing.latency <= timing.seconds and timing.least_seconds is None


def gpu_ops(config: Config) -> Any:
    """The columns that would be picked on the GPU that torch tells of, without loading them."""
    device = torch.device("cuda")
    picked = {
        op: _pick(op, device, torch.bfloat16, "auto").column for op in ("attention", "linear_fp8")
    }
    return SimpleNamespace(why={op: (column, "") for op, column in picked.items()})


Check = Callable[[dict[str, Any], str | None, tuple[int, int]], None]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks numbers that are asked for on a GPU of this compute capability."""

    def run(told: dict[str, Any], quantized: str | None, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(choose_weights, "find_device", lambda name: torch.device("cuda"))
        monkeypatch.setattr(choose_weights, "find_ops", gpu_ops)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
        source = SourceModel(
            folder="", revision=None, files={}, largest_shard=1, quantized=quantized
        )
        choose_weights.check_scheme(BuildOptions(model="m", out="out", **told), source)

    return run


@pytest.mark.parametrize(
    ("told", "quantized", "capability", "match"),
    [
        (
            {"quantization": "int8"},
            "awq",
            (9, 0),
            "is quantized already .awq.: build it with --quantization none",
        ),
        ({"keep_wide": ["a"]}, "awq", (9, 0), "is quantized already"),
        (
            {"quantization": "fp8"},
            None,
            (8, 0),
            "slower than bfloat16 on a some GPU, .*: take int8 or int4",
        ),
        ({"quantization": "fp8"}, None, (8, 9), "slower than bfloat16"),
        (
            {"kv_cache_dtype": "fp8"},
            None,
            (8, 6),
            "kv_cache_dtype fp8 needs .* this one has 8.6: leave it auto",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_the_work(
    told: dict[str, Any],
    quantized: str | None,
    capability: tuple[int, int],
    match: str,
    check: Check,
) -> None:
    with pytest.raises(UsageError, match=match):
        check(told, quantized, capability)


def test_numbers_that_the_start_takes_are_taken(check: Check) -> None:
    check({"kv_cache_dtype": "fp8"}, None, (8, 9))
    check({"kv_cache_dtype": "fp8", "quantization": "fp8"}, None, (9, 0))
    check({}, "awq", (8, 0))
    check({"quantization": "nvfp4"}, None, (8, 0))


def test_a_cpu_takes_floats_of_eight_and_four_bits_and_says_what_it_costs() -> None:
    told = BuildOptions(model="m", out="out", quantization="fp8", knobs={"device": "cpu"})
    source = SourceModel(folder="", revision=None, files={}, largest_shard=1, quantized=None)
    choose_weights.check_scheme(told, source)
    assert choose_weights.choose_weights(told, source, []).note.startswith(
        "asked for; float8 weights are widened"
    )
    four = BuildOptions(model="m", out="out", quantization="nvfp4", knobs={"device": "cpu"})
    choose_weights.check_scheme(four, source)
    assert choose_weights.choose_weights(four, source, []).note.startswith(
        "asked for; weights in four-bit floats are"
    )
    int8 = BuildOptions(model="m", out="out", quantization="int8", knobs={"device": "cpu"})
    assert choose_weights.choose_weights(int8, source, []).note == "asked for"
