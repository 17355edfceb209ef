"""What of an artifact is taken when it is opened, what is told, and what is refused: on the CPU,
with a manifest that says what a build would. Where a GPU's would differ, the machine is made up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from made_artifact import BINARY, MANIFEST, edit, flip, make_artifact

from penstock import LLM, SamplingParams
from penstock.artifact.manifest import BuiltFor, BuiltOn, read_manifest
from penstock.config import Config
from penstock.engine import fitted
from penstock.engine.fitted import differences, fit, ranks_of
from penstock.errors import CheckpointError, EngineError, UsageError
from penstock.execute import open_runner
from penstock.jobs.doctor import print_doctor
from penstock.kernels.binaries import Binaries

pytestmark = pytest.mark.torch

SMALL = {"device": "cpu", "kv_cache_tokens": 4096}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_artifact(
        tmp_path / "made", max_num_seqs=48, steps_ahead=2, prefix_groups="off", max_model_len=64
    )


def fit_of(folder: Path, **named: Any) -> fitted.Fitted:
    found = fit(Config.of(model=str(folder), **{"device": "cpu"} | named), folder)
    assert found is not None
    return found


def test_what_was_left_alone_is_the_artifacts_and_what_was_named_is_the_users(folder: Path) -> None:
    found = fit_of(folder, steps_ahead=1, prefix_groups="auto")
    assert (found.config.batching.max_num_seqs, found.config.schedule.steps_ahead) == (48, 1)
    assert (
        found.config.schedule.prefix_groups == "auto"
        and found.taken == ["max_num_seqs"]
        and not found.notes
    )
    assert found.config.memory.max_model_len is None, "it bounds no request"
    again = Config.of(**found.config.told())
    assert (
        again.batching.max_num_seqs == 48
        and fit_of(folder, max_num_seqs=7).config.batching.max_num_seqs == 7
    )


@pytest.mark.parametrize(
    ("asked", "drafts"),
    [
        ({"method": "ngram"}, 6),
        ({"method": "ngram", "num_speculative_tokens": 3}, 3),
        ({"method": "ngram", "prompt_lookup_max": 8}, 4),
        (None, None),
    ],
)
def test_how_many_drafts_is_the_artifacts_choice_where_the_same_is_asked_for(
    tmp_path: Path, asked: dict[str, Any] | None, drafts: int | None
) -> None:
    chosen = json.dumps({"method": "ngram", "num_speculative_tokens": 6})
    folder = make_artifact(tmp_path / "made", speculative_config=chosen)
    speculative = fit_of(folder, speculative_config=asked).config.speculative
    assert (None if speculative is None else speculative.num_speculative_tokens) == drafts


@pytest.mark.parametrize(
    ("samples", "shared", "plain"), [(16, 15, True), (32, 0, False), (16, 48, False)]
)
def test_graphs_of_shared_prefixes_are_left_for_later_where_the_work_shares_none(
    samples: int, shared: int, plain: bool, folder: Path
) -> None:
    lengths = {"prompt_tokens": 64, "longest_prompt": 64, "output_tokens": 9, "longest_output": 9}
    work = BuiltFor(
        told="64x9:4", prompts=16, samples=samples, concurrency=4, shared_tokens=shared, **lengths
    )
    edit(folder, built_for=[msgspec.structs.replace(work, samples=16, shared_tokens=0), work])
    assert fit_of(folder).config.plain_graphs == plain and not Config().plain_graphs


def test_an_artifact_is_for_so_many_ranks(tmp_path: Path) -> None:
    """Opened as it was built, elsewhere too; another number is refused with the way out."""
    two = make_artifact(tmp_path / "two", built={"processor": "another"}, tensor_parallel_size=2)
    found = fit_of(two)
    assert found.config.parallel.tensor_parallel_size == 2
    assert fit_of(two, tensor_parallel_size=2).config.parallel.tensor_parallel_size == 2
    assert (
        ranks_of(Config.of(model=str(two))) == 2
        and ranks_of(Config.of(model="demo", tensor_parallel_size=4)) == 4
    )
    with pytest.raises(
        UsageError, match="built for tensor_parallel_size 2, not 4: leave the option out, or"
    ):
        fit_of(two, tensor_parallel_size=4)
    one = make_artifact(tmp_path / "one")
    with pytest.raises(
        UsageError, match=r"built for tensor_parallel_size 1, not 2: .* --tensor-parallel-size 2"
    ):
        fit_of(one, tensor_parallel_size=2)
    answers = []
    for folder in (one, two):
        with LLM(str(folder), dtype="float32", **SMALL) as llm:
            assert llm.facts.about.get("ranks", 1) == (2 if folder == two else 1)
            outs = llm.generate(
                "1 + 1 =", SamplingParams(n=4, max_tokens=8, ignore_eos=True, seed=3)
            )
            answers.append([out.token_ids for out in outs[0].outputs])
    assert answers[0] == answers[1]


def test_an_engine_takes_them(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And more samples at once than it was built for, longer ones too, are only slower."""
    with LLM(str(folder), sealed=True, **SMALL) as llm:
        assert llm.facts.max_num_seqs == 48 and llm.facts.about["artifact"] == [
            "max_num_seqs",
            "steps_ahead",
            "prefix_groups",
        ]
        assert llm.engine.steps_ahead == 2 and llm.facts.max_model_len > 64
        outs = llm.generate(
            "1 + 1 =" + " 2" * 60, SamplingParams(n=96, max_tokens=4, ignore_eos=True)
        )[0].outputs
        assert [len(out.token_ids) for out in outs] == [4] * 96
        assert (llm.stats()["jit_compiles"], llm.stats()["jit_loads"]) == (0, 0)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("named", [{"max_num_seqs": 200}, {"max_num_batched_tokens": 32}])
def test_choices_that_go_ill_with_what_was_named_are_left_out(
    tmp_path: Path, named: dict[str, int]
) -> None:
    folder = make_artifact(tmp_path / "made", max_num_seqs=64, max_num_batched_tokens=128)
    found = fit_of(folder, **named)
    ((name, value),) = named.items()
    places = found.config.places()
    assert getattr(places[name], name) == value and "goes ill" in found.notes[0]
    assert (found.config.batching.max_num_seqs, found.config.batching.max_num_batched_tokens) in [
        (200, None),
        (None, 32),
    ]


def test_sealed_is_for_artifacts() -> None:
    with pytest.raises(
        UsageError, match=r"sealed is for artifacts, and .*: make one by penstock build"
    ):
        LLM("demo", sealed=True, **SMALL)


H200 = BuiltOn(
    device="NVIDIA H200",
    capability=(9, 0),
    memory_bytes=1,
    processor="x",
    driver="580.1",
    torch="2.11",
    triton="3.6.0",
    cuda="13.0",
)


@pytest.mark.parametrize(
    ("here", "told"),
    [
        ({}, []),
        (
            {"device": "NVIDIA H100"},
            ["built on NVIDIA H200, opened on NVIDIA H100: its choices are taken as they are"],
        ),
        (
            {"device": "NVIDIA A100", "capability": (8, 0)},
            ["compute capability 8.0): its choices are left out"],
        ),
        ({"device": "cpu", "capability": None}, ["opened on a CPU: its choices are left out"]),
        (
            {"triton": "3.7.0"},
            [
                "with triton 3.6.0, opened with 3.7.0: kernels that are others by it are compiled"
                " anew"
            ],
        ),
        (
            {"torch": "2.12", "driver": "570"},
            ["torch 2.11, opened with 2.12", "driver 580.1, opened with 570"],
        ),
        ({"triton": None, "driver": None}, []),
    ],
)
def test_what_differs_is_told_a_line_each(
    folder: Path, here: dict[str, Any], told: list[str]
) -> None:
    edit(folder, built_on=H200)
    notes = differences(folder, read_manifest(folder), msgspec.structs.replace(H200, **here))
    assert len(notes) == len(told) and all(
        part in note for part, note in zip(told, notes, strict=True)
    ), notes


def test_kernels_that_were_left_behind_are_told(folder: Path) -> None:
    """As in a hub's snapshot, which has no subfolders."""
    edit(folder, built_on=H200)
    shutil.rmtree(folder / "kernels")
    (note,) = differences(folder, read_manifest(folder), H200)
    assert "its folder kernels is not there" in note
    fit_of(folder)
    with LLM(str(folder), **SMALL) as llm:
        assert llm.facts.max_num_seqs == 1024, "choices of another kind of device are left out"


def test_an_artifact_of_another_machine_runs_with_defaults(tmp_path: Path) -> None:
    folder = make_artifact(
        tmp_path / "made",
        built={"device": "NVIDIA H200", "capability": (9, 0)},
        kv_cache_dtype="fp8",
    )
    found = fit_of(folder)
    assert (
        not found.holds
        and not found.taken
        and found.config.model.kv_cache_dtype == "auto"
        and len(found.notes) == 1
    )
    same = fit_of(make_artifact(tmp_path / "other", built={"processor": "another"}, max_num_seqs=3))
    assert same.holds and same.taken and "built on another, opened on" in same.notes[0]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", BINARY])
def test_a_flipped_byte_is_named(folder: Path, name: str) -> None:
    # the header's first: it cannot be read either
    flip(folder / name, at=-2 if name != "model.safetensors" else 8)
    with pytest.raises(
        CheckpointError, match=rf"{name} is not as it was built .*: copy the artifact again"
    ):
        LLM(str(folder), **SMALL)


def test_a_byte_of_a_weight_is_named_and_nothing_stays(folder: Path) -> None:
    flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors is not as it was built"):
        LLM(str(folder), **SMALL)


def test_other_faults_of_an_artifact_are_one_line(folder: Path) -> None:
    for engine, why in [
        ({"max_num_seqs": -1}, "engine: max_num_seqs must be"),
        ({"dtype": "fp3"}, "engine: dtype must"),
    ]:
        edit(folder, engine=engine)
        with pytest.raises(CheckpointError, match=rf"{MANIFEST}: {why}"):
            fit_of(folder)
    edit(folder, engine={"warp_drive": True})
    assert fit_of(folder).notes == [
        "it sets warp_drive, which this penstock doesn't know: left out"
    ]
    (folder / "kernels" / "more.so").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"more.so is not in the artifact's manifest: remove it"
    ):
        LLM(str(folder), **SMALL)
    (folder / MANIFEST).unlink()
    (folder / ".build").mkdir()
    with pytest.raises(CheckpointError, match="unfinished build"):
        LLM(str(folder), **SMALL)


def test_binaries_are_read_while_the_engine_is_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels are compiled. A kernel that isn't there ends a sealed start with one line."""
    binaries = Binaries()
    monkeypatch.setattr(open_runner, "find_ops", lambda config: SimpleNamespace(binaries=binaries))
    config = Config.of(model=str(folder), sealed=True, **SMALL)
    llm = LLM(**config.told())
    assert binaries.folders == binaries.sealed == [folder / "kernels"]
    with pytest.raises(EngineError, match="the kernel _own is not among the binaries"):
        binaries.compiling("_own")
    llm.close()
    assert not binaries.folders and not binaries.sealed

    def compiles(config: Config, folder: Path) -> Any:
        binaries.compiling("_prefix")

    found = fit(config, folder)
    assert found is not None
    with pytest.raises(
        EngineError,
        match=r"_prefix .* penstock build --retune .*/made on this machine, or leave --sealed",
    ):
        fitted.open_fitted(found, compiles)
    assert not binaries.folders and not binaries.sealed


def test_the_doctor_tells_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(
        folder,
        penstock="0.0.9",
        built_on=msgspec.structs.replace(read_manifest(folder).built_on, processor="a 486"),
    )
    print_doctor(Config.of(model=str(folder), steps_ahead=1, **SMALL))
    said = capsys.readouterr().out
    assert (
        "its choices         max_num_seqs 48, prefix_groups off\n" in said
        and "built on a 486, opened on" in said
    )
    edit(folder, engine={})
    print_doctor(Config.of(model=str(folder)))
    assert "its choices         none: defaults hold\n" in capsys.readouterr().out
    assert "48 sequences at once" in said


def test_a_job_takes_them_from_the_command_line(folder: Path) -> None:
    """Through `Config.of` and back, as `open_llm` hands them on."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text('{"id": 1, "prompt": "1 + 1 ="}\n')
    from penstock.jobs.run import run_file

    seen: list[LLM] = []

    def open(config: Config) -> LLM:
        seen.append(LLM(**config.told()))
        return seen[0]

    run_file(source, out, Config.of(model=str(folder), **SMALL), open)
    assert seen[0].facts.max_num_seqs == 48 and json.loads(out.read_text())["outputs"]
