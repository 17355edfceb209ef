"""A LoRA adapter merged at load is the published formula's model, cut and quantized too; what isn't
served is named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_model import make_folder
from made_artifact import make_artifact
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.build.make_weights import make_weights
from penstock.build.options import BuildOptions
from penstock.build.source import check_unchanged, fetch
from penstock.errors import CheckpointError, UsageError
from penstock.kernels.choose import choose
from penstock.models.build_model import build_model
from penstock.models.decoder import Decoder
from penstock.models.read_config import read_model_config
from penstock.parallel.layout import ALONE, Layout
from penstock.weights.adapter import Adapter
from penstock.weights.load import load_model
from penstock.weights.place import find_weights, load_weights

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
AT = "base_model.model.model.layers"
ADAPTED = {
    f"{layer}.self_attn.{name}_proj": (64 if name in "qo" else 32, 64)
    for layer in (0, 1)
    for name in "qkvo"
}
ADAPTED |= {"0.mlp.gate_proj": (96, 64), "1.mlp.down_proj": (64, 96)}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 10,
    "use_rslora": False,
    "target_modules": ["q_proj"],
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "lora_dropout": 0.1,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "init_lora_weights": True,
    "task_type": "CAUSAL_LM",
    "loftq_config": {},
    "megatron_core": "megatron.core",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base"))


def make_adapter(folder: Path, ranks: dict[str, int] | None = None, **config: Any) -> Path:
    folder.mkdir()
    torch.manual_seed(3)
    tensors = {}
    for module, (out, into) in ADAPTED.items():
        rank = (ranks or {}).get(module, 4)
        tensors[f"{AT}.{module}.lora_A.weight"] = torch.randn(rank, into) / 8
        tensors[f"{AT}.{module}.lora_B.weight"] = torch.randn(out, rank) / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("lora") / "adapter")


def merge_by_hand(base: Path, adapter: Path, out: Path, scale: Callable[[int], float]) -> Path:
    """The formula over the files, in float64."""
    shutil.copytree(base, out)
    weights, pairs = (
        load_file(base / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for module in ADAPTED:
        a, b = (pairs[f"{AT}.{module}.lora_{half}.weight"].double() for half in "AB")
        name = f"model.layers.{module}.weight"
        weights[name] = (weights[name].double() + scale(a.shape[0]) * (b @ a)).float()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def load(folder: Path, **more: Any) -> Decoder:
    dtype = more.pop("dtype", torch.float32)
    return load_model(
        folder,
        load_format="auto",
        dtype=dtype,
        device=CPU,
        ops=choose(CPU, dtype, "reference"),
        seed=0,
        **more,
    )


def numbers(
    folder: Path,
    lora: Path | None = None,
    dtype: torch.dtype = torch.float32,
    layout: Layout = ALONE,
) -> dict[str, torch.Tensor]:
    """A rank's weights before a kernel arranges them."""
    model = build_model(read_model_config(folder), dtype, CPU, None, layout)
    load_weights(
        model, find_weights(model, folder), adapter=None if lora is None else Adapter.read(lora)
    )
    return {weight.parts[0].name: weight.value for weight in model.weights()}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("ranks", [{}, {"1.mlp.down_proj": 9}], ids=["one rank", "rank_pattern"])
def test_it_is_the_formulas_model(
    base: Path, tmp_path: Path, rslora: bool, ranks: dict[str, int]
) -> None:
    adapter = make_adapter(tmp_path / "adapter", ranks, use_rslora=rslora, rank_pattern=ranks)
    by_hand = merge_by_hand(
        base, adapter, tmp_path / "m", lambda r: 10 / (math.sqrt(r) if rslora else r)
    )
    prompts = [[5, 6, 7], list(range(40, 90))]
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=3, ignore_eos=True)
    outs = []
    for folder, knobs in ((base, {"lora": str(adapter)}), (by_hand, {}), (base, {})):
        with LLM(str(folder), dtype="float32", kv_cache_tokens=512, max_num_seqs=4, **knobs) as llm:
            outs.append([out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)])
    for merged, wanted, plain in zip(*outs, strict=True):
        assert merged.token_ids == wanted.token_ids != plain.token_ids
        assert merged.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3)


def test_ranks_hold_their_shares_and_scales_are_of_the_merged_numbers(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    merged = merge_by_hand(base, adapter, tmp_path / "m", lambda r: 10 / r)
    some: list[dict[str, Any]] = [{}, {"layout": Layout(rank=1, size=2)}, {"dtype": torch.bfloat16}]
    for more in some:
        found, wanted = numbers(base, adapter, **more), numbers(merged, **more)
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, atol=1e-5, rtol=1e-2 if "dtype" in more else 1e-5
            )
    with LLM(
        str(base),
        dtype="float32",
        kv_cache_tokens=256,
        max_num_seqs=2,
        lora=str(adapter),
        quantization="int8",
    ) as llm:
        (eight,) = llm.generate(
            [[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0, logprobs=0), use_tqdm=False
        )
    with LLM(
        str(merged), dtype="float32", kv_cache_tokens=256, max_num_seqs=2, quantization="int8"
    ) as llm:
        (wanted8,) = llm.generate(
            [[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0, logprobs=0), use_tqdm=False
        )
    assert eight.outputs[0].cumulative_logprob == pytest.approx(
        wanted8.outputs[0].cumulative_logprob, abs=1e-2
    )


@pytest.mark.parametrize("kind", ["none", "int8"])
def test_a_build_writes_what_a_load_makes(
    base: Path, adapter: Path, tmp_path: Path, kind: str
) -> None:
    out, mine = tmp_path / "out", tmp_path / "adapter"
    shutil.copytree(adapter, mine)
    options = BuildOptions(model=str(base), out=str(out), lora=str(mine), quantization=kind)  # type: ignore[arg-type]
    source = fetch(options)
    assert {name for name in source.sums if name.startswith("lora/")} == {
        "lora/adapter_config.json",
        "lora/adapter_model.safetensors",
    }
    make_weights(options, source, kind, lambda line: None)
    more = {} if kind == "none" else {"quantization": kind}
    if kind == "none":
        found, wanted = numbers(out), numbers(base, mine)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        assert not (out / "model.safetensors").samefile(base / "model.safetensors")
    with LLM(str(out), dtype="float32", kv_cache_tokens=256, max_num_seqs=2) as llm:
        (built,) = llm.generate(
            [[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False
        )
    with LLM(
        str(base), dtype="float32", kv_cache_tokens=256, max_num_seqs=2, lora=str(mine), **more
    ) as llm:
        (loaded,) = llm.generate(
            [[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False
        )
    assert built.outputs[0].token_ids == loaded.outputs[0].token_ids
    (mine / "adapter_config.json").write_text(json.dumps(CONFIG | {"lora_alpha": 11}))
    with pytest.raises(
        CheckpointError, match=r"adapter_config\.json was changed since this build began"
    ):
        check_unchanged(source)


@pytest.mark.parametrize(
    "config, said",
    [
        ({"use_dora": True}, r"use_dora \(True\) is not served: merge it by peft"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, r"bias \(lora_only\)"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"a_switch_of_tomorrow": 1}, "a_switch_of_tomorrow"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r must be a whole number above 0"),
        ({"lora_alpha": "x"}, "lora_alpha a number"),
        ({"lora_alpha": math.nan}, "lora_alpha a number that float32 holds"),
        ({"lora_alpha": -math.inf}, "lora_alpha a number that float32 holds"),
        ({"lora_alpha": 1e308}, "lora_alpha a number that float32 holds"),
        ({"lora_alpha": 10**400}, "lora_alpha a number that float32 holds"),
        ({"r": 5}, "are of rank 4 and 4, and adapter_config.json says 5"),
    ],
)
def test_switches_that_are_not_served_are_named(
    base: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        load(base, lora=str(make_adapter(tmp_path / "adapter", **config)))


def of_no_matrix(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{AT}.0.self_attn.q_proj.lora_magnitude_vector"] = torch.zeros(4)


def of_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 300)


def of_no_layer(tensors: dict[str, torch.Tensor]) -> None:
    for half, shape in (("A", (4, 64)), ("B", (64, 4))):
        tensors[f"{AT}.7.self_attn.q_proj.lora_{half}.weight"] = torch.zeros(shape)


def of_one_half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{AT}.0.mlp.gate_proj.lora_B.weight"]


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{AT}.0.mlp.gate_proj.lora_B.weight"] = torch.zeros(95, 4)


def of_rank_0(tensors: dict[str, torch.Tensor]) -> None:
    for half, shape in (("A", (0, 64)), ("B", (96, 0))):
        tensors[f"{AT}.0.mlp.gate_proj.lora_{half}.weight"] = torch.zeros(shape)


def of_vast_numbers(tensors: dict[str, torch.Tensor]) -> None:
    for half in "AB":
        tensors[f"{AT}.0.mlp.gate_proj.lora_{half}.weight"] *= 1e30


def of_no_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{AT}.0.mlp.gate_proj.lora_B.weight"][3, 1] = math.nan


@pytest.mark.parametrize(
    "spoil, said",
    [
        (of_no_matrix, "lora_magnitude_vector', which is no matrix of LoRA's"),
        (of_embedding, "lora_embedding_A', which is no matrix"),
        (of_no_layer, "layers.7.self_attn.q_proj.weight', and the model has no such matrix"),
        (of_one_half, "one of lora_A and lora_B"),
        (of_another_shape, r"as \[95, 64\], and the model's is \[96, 64\]"),
        (of_no_numbers, "no matrix of finite numbers"),
        (of_rank_0, "are of rank 0, which is none"),
        (
            of_vast_numbers,
            "makes numbers of 'model.layers.0.mlp.gate_proj.weight' that float32 does not hold",
        ),
    ],
)
def test_files_that_do_not_fit_are_named(
    base: Path, tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    adapter = make_adapter(tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    spoil(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        load(base, lora=str(adapter))


def test_rank_0_by_a_pattern_and_what_a_build_would_write(base: Path, tmp_path: Path) -> None:
    """Where ranks may differ, 0 would be divided by; a build would write what no number is."""
    adapter = make_adapter(
        tmp_path / "adapter", {"0.mlp.gate_proj": 0}, rank_pattern={"gate_proj": 0}
    )
    with pytest.raises(CheckpointError, match="are of rank 0"):
        Adapter.read(adapter)
    vast = Adapter.read(make_adapter(tmp_path / "vast"))
    name = "model.layers.0.mlp.gate_proj.weight"
    told = vast.merged(name, torch.zeros(96, 64, dtype=torch.float16))
    assert told.isfinite().all()
    a, b, _ = vast.pairs[name]
    vast.pairs[name] = (a, b, 1e6)  # float32 holds what comes of it
    assert vast.merged(name, torch.zeros(96, 64)).isfinite().all()
    with pytest.raises(CheckpointError, match="that float16 does not hold"):
        vast.merged(name, torch.zeros(96, 64, dtype=torch.float16))


def test_what_is_no_adapter_or_cannot_have_one_is_told(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="is no adapter: it lacks adapter_config"):
        load(base, lora=str(base))
    with pytest.raises(
        CheckpointError, match="there is no folder 'nowhere': give an adapter's folder"
    ):
        load(base, lora="nowhere")
    with pytest.raises(CheckpointError, match="give its base model, and this as lora"):
        LLM(str(adapter))
    pickled = shutil.copytree(adapter, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(
        CheckpointError, match=r"adapter_model.bin is pickle, .* save the adapter as safetensors"
    ):
        load(base, lora=str(pickled))
    with pytest.raises(UsageError, match="not into dummy ones"):
        LLM(str(base), lora=str(adapter), load_format="dummy")
    with pytest.raises(
        UsageError, match="is an artifact, whose weights are settled: build it with --lora"
    ):
        LLM(str(make_artifact(tmp_path / "artifact")), lora=str(adapter))
    with pytest.raises(UsageError, match="one adapter is merged into the weights"):
        LLM(str(base), enable_lora=True)
