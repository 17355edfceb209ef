"""Weights that change under an LLM: what a fresh start with them gives, in every scheme; and what
is refused."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import engine_model
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.errors import CheckpointError, EngineError, FaultError, PenstockError, UsageError
from penstock.execute import reload
from penstock.execute.reload import arrays_of
from penstock.execute.sleep import to_host
from penstock.weights.share import share_weights

pytestmark = pytest.mark.torch

ASK = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, logprobs=0, ignore_eos=True)
PROMPTS = [list(range(40, 75)), list(range(10, 60)), list(range(40, 90))]
KNOBS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 8,
    "kv_cache_tokens": 2048,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with other numbers."""
    first = engine_model.make_folder(tmp_path_factory.mktemp("first"))
    second = tmp_path_factory.mktemp("models") / "step-200"
    shutil.copytree(first, second)
    path, generator = second / "model.safetensors", torch.Generator().manual_seed(9)
    tensors = {
        name: tensor
        + 0.2 * tensor.std().nan_to_num(1.0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return first, second


def told(llm: LLM) -> list[Any]:
    """Tokens and logprobs of every sample."""
    outs = llm.generate(PROMPTS, ASK, use_tqdm=False)
    return [
        (o.token_ids, [next(iter(p.values())).logprob for p in o.logprobs])
        for out in outs
        for o in out.outputs
    ]


def arrays(llm: LLM) -> dict[str, torch.Tensor]:
    state = llm.engine.runner._state  # type: ignore[attr-defined]
    found = dict(arrays_of(state.model.parts))
    return {name: array.to_dense() if array.is_mkldnn else array for name, array in found.items()}


@pytest.mark.parametrize(
    "knobs", [{}, {"quantization": "fp8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}], ids=str
)
def test_other_weights_are_those_of_a_fresh_start(
    folders: tuple[Path, Path], knobs: dict[str, Any]
) -> None:
    with LLM(str(folders[1]), **KNOBS | knobs) as fresh:
        wanted, held = told(fresh), arrays(fresh)
        with LLM(str(folders[0]), **KNOBS | knobs) as llm:
            before = told(llm)
            assert before != wanted and llm.weights_version == "default"
            llm.update_weights(folders[1])
            assert told(llm) == wanted and llm.weights_version == "step-200"
            now = arrays(llm)
            assert held.keys() == now.keys() and all(
                torch.equal(held[name], now[name]) for name in held
            )
            with share_weights(load_file(folders[0] / "model.safetensors")) as shared:
                llm.update_weights(shared=shared, weights_version="0")
            assert told(llm) == before and llm.weights_version == "0"


def test_nothing_of_the_old_weights_is_found(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[0]), **KNOBS) as llm:
        first = llm.generate([PROMPTS[1]], ASK, use_tqdm=False)[0]
        again = llm.generate([PROMPTS[1]], ASK, use_tqdm=False)[0]
        assert first.num_cached_tokens == 0 < (again.num_cached_tokens or 0)
        llm.update_weights(folders[1])
        assert llm.generate([PROMPTS[1]], ASK, use_tqdm=False)[0].num_cached_tokens == 0
        assert (
            llm.generate([PROMPTS[1]], ASK, use_tqdm=False)[0].num_cached_tokens
            == again.num_cached_tokens
        )
        assert llm.reset_prefix_cache() is True
        assert llm.generate([PROMPTS[1]], ASK, use_tqdm=False)[0].num_cached_tokens == 0
        llm.engine.scheduler.check()


def _poisoned(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def _of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"intermediate_size": 128, "rms_norm_eps": 1e-3})
    )


def _half_written(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _without_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_poisoned, r"'model.layers.1.mlp.down_proj.weight' holds what is no finite number"),
        (_of_another_shape, "is of another model: its intermediate_size, rms_norm_eps differ"),
        (_half_written, "model.safetensors"),
        (_without_a_tensor, "model.norm.weight"),
    ],
)
def test_what_is_refused_changes_nothing(
    folders: tuple[Path, Path], tmp_path: Path, spoil: Any, error: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folders[1], bad)
    spoil(bad)
    with LLM(str(folders[0]), **KNOBS) as llm:
        before, held = told(llm), arrays(llm)
        with pytest.raises(CheckpointError, match=error):
            llm.update_weights(bad)
        now = arrays(llm)
        assert llm.weights_version == "default" and all(
            torch.equal(held[name], now[name]) for name in held
        )
        llm.reset_prefix_cache()
        assert told(llm) == before


def test_a_folder_that_is_not_there_and_an_llm_at_work(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    from penstock.llm import Prompt

    with LLM(str(folders[0]), **KNOBS) as llm:
        with pytest.raises(PenstockError, match=r"config\.json"):
            llm.update_weights(tmp_path)
        with pytest.raises(CheckpointError, match="no folder"):
            llm.update_weights("w" * 256)
        stream = llm.stream([Prompt(key=1, prompt=PROMPTS[0], params=ASK)])
        next(stream)
        with pytest.raises(UsageError, match="at work"):
            llm.update_weights(folders[1])
        stream.close()
        llm.update_weights(folders[1])


def test_what_nobody_thought_of_while_weights_load_ends_no_engine(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(folders[0]), **KNOBS) as llm:
        before = told(llm)
        with monkeypatch.context() as patch:
            patch.setattr(reload, "read_model_config", lambda folder: 1 / 0)
            with pytest.raises(
                FaultError, match=r"the engine failed at these weights \(ZeroDivisionError"
            ):
                llm.update_weights(folders[1])
        llm.reset_prefix_cache()
        assert told(llm) == before


@pytest.mark.parametrize(
    ("level", "knobs"),
    [(1, {}), (2, {"kv_cache_dtype": "fp8"}), (2, {"quantization": "int4"})],
    ids=str,
)
def test_memory_comes_back_and_answers_stay(
    folders: tuple[Path, Path], knobs: dict[str, Any], level: int
) -> None:
    with LLM(str(folders[0]), **KNOBS | knobs) as llm:
        before = told(llm)
        runner: Any = llm.engine.runner
        held = list(arrays_of(runner._state.model.parts))
        model = runner._state.model
        stays = {
            id(each)
            for each in (*model.kinds.values(), *(form.scales for form in model.paged_forms))
        }
        weights = [weakref.ref(array) for _, array in held if id(array) not in stays]
        kv = [weakref.ref(layer.storage) for (layer,) in runner._state.kv.layers]
        del held, model
        llm.sleep(level)
        assert llm.is_sleeping() and llm.engine.scheduler.stats()["kv_usage"] == 0
        assert not any(each() is not None for each in kv)
        assert [each() is None for each in weights] == [level == 2] * len(weights)
        with pytest.raises(UsageError, match=r"this LLM sleeps \(weights, kv_cache\): wake_up\(\)"):
            llm.generate(PROMPTS, ASK)
        llm.wake_up(["weights"])
        llm.wake_up()
        assert llm.is_sleeping() == (level == 2)
        if level == 2:
            with pytest.raises(UsageError, match=r"sleeps \(weights\): .*update_weights"):
                llm.generate(PROMPTS, ASK)
            with pytest.raises(CheckpointError):
                llm.update_weights(folders[0].parent)
            llm.update_weights(folders[0])
        assert not llm.is_sleeping() and told(llm) == before
        llm.engine.scheduler.check()


def test_weights_that_are_given_in_a_sleep(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[1]), **KNOBS) as fresh:
        wanted = told(fresh)
    with LLM(str(folders[0]), **KNOBS) as llm:
        told(llm)
        llm.sleep()
        llm.sleep(2)
        llm.update_weights(folders[1])
        assert llm.engine.asleep == ("kv_cache",)
        llm.wake_up(tags=["kv_cache"])
        assert told(llm) == wanted and llm.weights_version == "step-200"
        for bad in (0, 3):
            with pytest.raises(UsageError, match="level must be 1"):
                llm.sleep(bad)
        llm.sleep()
        llm.close()
        with pytest.raises(EngineError, match="closed"):
            llm.wake_up()


def test_views_of_one_storage_find_it_again() -> None:
    whole = torch.arange(12, dtype=torch.float32)
    views = [whole.view(3, 4), whole[4:8], torch.ones(3)]
    hosts = to_host([whole, *views])
    assert len(hosts) == 2 and all(each.untyped_storage().nbytes() == 0 for each in views)
    for storage, host in hosts:
        storage.resize_(host.nbytes)
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(host)
    assert views[1].tolist() == [4, 5, 6, 7] and views[0][2, 3] == 11 and views[2].sum() == 3


def test_each_rank_takes_its_part_once_all_have_theirs(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folders[1], bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, -1] = torch.inf
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(folders[1]), **KNOBS) as fresh:
        wanted = [tokens for tokens, _ in told(fresh)]
    with LLM(str(folders[0]), tensor_parallel_size=2, **KNOBS) as llm:
        before = told(llm)
        runner: Any = llm.engine.runner
        beside = runner.beside
        # rank 0's part is sound, and yet it is not taken
        runner.beside = lambda _: beside(folders[1])
        with pytest.raises(
            CheckpointError, match=r"rank 1: .*down_proj.weight' holds what is no finite number"
        ):
            llm.update_weights(bad)
        runner.beside = beside
        with pytest.raises(CheckpointError, match=r"^(?!rank).*no config.json"):
            llm.update_weights(tmp_path)
        llm.reset_prefix_cache()
        assert told(llm) == before and llm.weights_version == "default"
        llm.update_weights(folders[1])
        assert [tokens for tokens, _ in told(llm)] == wanted and llm.weights_version == "step-200"
        with share_weights(load_file(folders[0] / "model.safetensors")) as shared:
            llm.update_weights(shared=shared, weights_version="again")
        assert told(llm) == before and llm.weights_version == "again"
        with pytest.raises(UsageError, match="where one GPU holds the model"):
            llm.sleep()
        assert not llm.is_sleeping()
        runner.others[0].process.kill()
        with pytest.raises(EngineError, match="rank 1"):
            llm.update_weights(folders[0])


def test_weights_of_another_process_are_held_against_the_model(folders: tuple[Path, Path]) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    spoilt = tensors | {"model.norm.weight": tensors["model.norm.weight"] * torch.nan}
    wide = tensors | {"model.norm.weight": torch.ones(7)}
    less = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    with LLM(str(folders[0]), **KNOBS) as llm:
        before = told(llm)
        for bad, error in (
            (spoilt, "'model.norm.weight' holds what is no finite number"),
            (wide, r"'model.norm.weight' has shape \[7\]"),
            (less, "lack tensor 'model.layers.1"),
            (tensors | {"lm_tail": torch.ones(2)}, "holds tensor 'lm_tail'"),
        ):
            with share_weights(bad) as shared, pytest.raises(CheckpointError, match=error):
                llm.update_weights(shared=shared, weights_version="bad")
        with pytest.raises(CheckpointError, match="has the process that gave it ended"):
            llm.update_weights(shared=shared, weights_version="late")
        with pytest.raises(UsageError, match="weights_version must name"):
            llm.update_weights(shared=shared)
        with pytest.raises(UsageError, match="give one"):
            llm.update_weights(folders[1], shared=shared)
        llm.reset_prefix_cache()
        assert told(llm) == before and llm.weights_version == "default"
