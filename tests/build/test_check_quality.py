"""The check's figures: KL over the likeliest tokens against the exact one, ties, and which matrix
costs most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from family_cases import CASES, make_folder

from penstock.build import check_quality
from penstock.build.check_quality import _compare, _kept, find_costly, score_built, score_source
from penstock.build.options import BuildOptions
from penstock.build.work_sample import WorkSample
from penstock.demo import model_folder
from penstock.errors import UsageError
from penstock.weights.write_quantized import write_quantized

pytestmark = pytest.mark.torch


class Told:
    """In place of a model: gives these logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def told(logits: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Their positions from the last to the first, five at once."""
    return zip(reversed(torch.arange(len(logits)).split(5)), reversed(logits.split(5)), strict=True)


def compared(
    theirs: torch.Tensor, mine: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, ...]:
    monkeypatch.setattr(check_quality, "_logits", lambda model, *_: told(model.logits))
    return _compare(Told(mine), None, [], _kept(theirs))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vocabulary", "sharpness"), [(100, 1.0), (256, 3.0), (2000, 3.0), (2000, 0.5)]
)
def test_kl_is_at_most_the_exact_one_and_near_it(
    vocabulary: int, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    theirs = sharpness * torch.randn(13, vocabulary, generator=draw)
    mine = theirs + 0.3 * torch.randn(13, vocabulary, generator=draw)
    p, q = theirs.double().log_softmax(-1), mine.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1)
    kl, same = compared(theirs, mine, monkeypatch)
    assert (kl <= exact + 1e-5).all()
    if vocabulary <= check_quality.KEPT:
        assert torch.allclose(kl.double(), exact, atol=1e-5)
    elif sharpness > 1:
        assert (kl >= 0.8 * exact).all()
    assert torch.equal(same, theirs.argmax(-1) == mine.argmax(-1))


def test_the_same_logits_agree_where_tokens_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    kl, same = compared(logits, logits.flip(1), monkeypatch)
    assert same.tolist() == [True, True] and kl[1] == 0 < kl[0]


def test_a_spoilt_matrix_is_found(tmp_path: Path) -> None:
    """int4's numbers with one matrix turned round: past the bound,
    and that matrix is named first."""
    out = tmp_path / "out"
    write_quantized(model_folder(), out, "int8")
    from safetensors.torch import load_file, save_file

    tensors = load_file(out / "model.safetensors")
    name = "model.layers.5.mlp.down_proj"
    tensors[f"{name}.weight_scale"] = -tensors[f"{name}.weight_scale"]
    save_file(tensors, out / "model.safetensors")
    options = msgspec.to_builtins(BuildOptions(model="demo", out=str(out), knobs={"device": "cpu"}))
    work = WorkSample(
        told="rows",
        prompts=[list(range(40, 70))] * 2,
        sampling=[{}] * 2,
        outputs=[20] * 2,
        concurrency=2,
    )
    score_source(options, str(model_folder()), [msgspec.to_builtins(work)])
    found = score_built(options, {}, {})
    assert found["kl_mean"] > 0.02 and found["agreement"] < 0.99 and found["tokens"] == 100
    costs = find_costly(options, str(model_folder()))
    assert next(iter(costs)) == name and costs[name] > 10 * sorted(costs.values())[-2]


def test_a_spoilt_head_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_quantized(model_folder(), out, "fp8", fp8_head=True)
    from safetensors.torch import load_file, save_file

    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight_scale"] = -tensors["lm_head.weight_scale"]
    save_file(tensors, out / "model.safetensors")
    asked = BuildOptions(
        model="demo",
        out=str(out),
        quantization="fp8",
        quantize_lm_head=True,
        knobs={"device": "cpu"},
    )
    work = WorkSample(
        told="rows", prompts=[list(range(40, 70))], sampling=[{}], outputs=[20], concurrency=1
    )
    options = msgspec.to_builtins(asked)
    score_source(options, str(model_folder()), [msgspec.to_builtins(work)])
    assert score_built(options, {}, {})["kl_mean"] > 0.02
    costs = find_costly(options, str(model_folder()))
    assert next(iter(costs)) == "lm_head" and costs["lm_head"] > 10 * sorted(costs.values())[-2]


def test_eight_bits_of_kv_are_in_the_built_model_alone(tmp_path: Path) -> None:
    options = msgspec.to_builtins(
        BuildOptions(model="demo", out=str(tmp_path), kv_cache_dtype="fp8", knobs={"device": "cpu"})
    )
    for path in model_folder().iterdir():
        (tmp_path / path.name).symlink_to(path)
    work = WorkSample(
        told="rows", prompts=[list(range(40, 70))], sampling=[{}], outputs=[20], concurrency=1
    )
    score_source(options, str(model_folder()), [msgspec.to_builtins(work)])
    assert score_built(options, {"kv_cache_dtype": "auto"}, {})["kl_mean"] == 0
    built = score_built(options, {"kv_cache_dtype": "fp8"}, {})
    assert built["kl_mean"] > 0 and set(built["kv_scales"]) == {
        f"model.layers.{n}.self_attn" for n in range(8)
    }


def test_recurrent_states_are_rounded_at_each_token_of_the_built_model(tmp_path: Path) -> None:
    folder = make_folder(
        CASES["qwen3_5 4/2 of 64, a quarter turns, 2/4 delta heads of 64"], tmp_path
    )
    knobs = {"device": "cpu", "dtype": "float32", "mamba_ssm_cache_dtype": "bfloat16"}
    options = msgspec.to_builtins(BuildOptions(model=str(folder), out=str(tmp_path), knobs=knobs))
    prompts = [list(range(40, 70)), list(range(100, 105))]
    work = WorkSample(
        told="rows", prompts=prompts, sampling=[{}] * 2, outputs=[20] * 2, concurrency=2
    )
    score_source(options, str(folder), [msgspec.to_builtins(work)])
    assert score_built(options, {"mamba_ssm_cache_dtype": "auto"}, {})["kl_mean"] < 1e-9
    narrow = score_built(options, {}, {})
    assert narrow["tokens"] == 75 and 1e-6 < narrow["kl_mean"] < 0.01


def test_texts_go_through_in_stretches_as_whole(tmp_path: Path) -> None:
    folder = make_folder(
        CASES["qwen3_5 4/2 of 64, a quarter turns, 2/4 delta heads of 64"], tmp_path
    )
    asked = BuildOptions(
        model=str(folder), out=str(tmp_path), knobs={"device": "cpu", "dtype": "float32"}
    )
    texts, found = [list(range(40, 70)), list(range(100, 105))], []
    with torch.inference_mode():
        model, ops = check_quality.open_model(asked.config(str(folder)), folder, 50)
        for stretch in (1000, 7, 1):
            hidden, places = torch.zeros(35, 128), []
            for run in check_quality.batches(model, texts, stretch):
                places.append(run.of)
                hidden[run.of] = model.forward(run.ids, run.step, run.kv, ops)[run.places]
            assert len(places) == -(-30 // stretch) and torch.cat(
                places
            ).sort().values.tolist() == list(range(35))
            found.append(hidden)
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-4, atol=1e-4)


def test_states_of_an_artifact_stay_as_they_were_checked() -> None:
    with pytest.raises(UsageError, match="mamba_ssm_cache_dtype is settled in an artifact"):
        BuildOptions(model="x", out="x", retune=True, knobs={"mamba_ssm_cache_dtype": "bfloat16"})
