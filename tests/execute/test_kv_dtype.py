"""What K and V are stored as: scales from the sample, keys kept wide by the check, memory, and what
is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_model import make_folder
from execute_drive import TINY_LATENT, tiny_model

from penstock.config import Config
from penstock.errors import CheckpointError, UsageError
from penstock.execute import kv_dtype as kv_fit
from penstock.execute.kv_cache import KvCache, kv_words, token_bytes
from penstock.execute.kv_dtype import (
    HEADROOM,
    KEY_ERROR,
    check_eight_bits,
    fit_kv,
    kept_form,
    look_at_kv,
    scales_for,
    told_scales,
)
from penstock.execute.open_runner import find_kv_dtype, open_runner, settle_kv
from penstock.kernels.choose import choose
from penstock.kernels.state_forms import LatentForm
from penstock.models.decoder import Decoder
from penstock.parallel.layout import Layout
from penstock.quant.read_quantization import read_quantization
from penstock.quant.stored_quantization import StoredQuantization
from penstock.weights.kv_scales import asks_for_eight_bits, read_kv_scales
from penstock.weights.load import load_model

pytestmark = pytest.mark.torch

CPU, F32, E4M3 = torch.device("cpu"), torch.float32, torch.float8_e4m3fn
OPS = choose(CPU, F32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def loaded(folder: Path) -> Decoder:
    return load_model(folder, load_format="auto", dtype=F32, device=CPU, ops=OPS, seed=0)


def with_key_biases(folder: Path, size: float) -> Decoder:
    """A Qwen2 of two layers, the first with key biases of `size` on a few dimensions, as Qwen2.5
    has in its first."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    model = transformers.Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed" in name else 1.4 / weight.shape[1] ** 0.5)
            elif "norm" not in name:
                weight.normal_(0.0, 0.3)
        bias = model.model.layers[0].self_attn.k_proj.bias
        bias[[14, 30]] += -0.7 * size
        bias[[15, 31]] += size
    model.save_pretrained(folder)
    return loaded(folder)


def test_sinks_take_part_while_it_is_looked_at(tmp_path: Path) -> None:
    """In gpt-oss's softmax: without them a layer answers another, and so do all behind it."""
    config = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 48,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, load_format="dummy", dtype=F32, device=CPU, ops=OPS, seed=0)
    seen = list[torch.Tensor | None]()

    def attention(*args: Any) -> torch.Tensor:
        seen.append(args[5])
        return OPS.attention(*args)

    look_at_kv(model, replace(OPS, attention=attention))
    wanted = [block.mixer.sink_scores for block in model.blocks for _ in range(2)]
    assert len(seen) == 4 and all(
        a is not None and a is b for a, b in zip(seen, wanted, strict=True)
    )


def test_scales_leave_room_and_are_powers_of_two() -> None:
    largest = torch.tensor([448.0, 449.0, 224.0, 1.0, 0.0, 1e-37, 3e38])
    scales = scales_for(largest)
    assert torch.equal(scales[:5], torch.tensor([2.0, 4.0, 1.0, 2.0**-7, 1.0]))
    assert (
        torch.equal(scales.log2(), scales.log2().round())
        and scales.isfinite().all()
        and (scales > 0).all()
    )
    assert (largest / scales <= 448 / HEADROOM).all()


def test_the_sample_is_what_scales_are_of(folder: Path) -> None:
    model = loaded(folder)
    sample = torch.randint(300, (3, 40), generator=torch.Generator().manual_seed(5))
    seen = look_at_kv(model, OPS, sample)
    cache = KvCache(model.keepers, 11, CPU)
    from penstock.execute import kv_dtype as kv_fit

    inputs = kv_fit.whole_prompts(3, 40, torch.arange(1, 10).view(3, 3))
    with torch.inference_mode():
        model.forward(sample.flatten(), inputs, cache.layers)
    for (layer,), found in zip(cache.layers, seen, strict=True):
        assert torch.equal(found.largest[0], layer.keys.abs().amax((0, 2, 3)))
        assert torch.equal(found.largest[1], layer.values.abs().amax((0, 2, 3)))
        assert 0 < found.key_error < KEY_ERROR
    fit_kv(model, "fp8", OPS, sample=sample)
    for form, found in zip(model.paged_forms, seen, strict=True):
        assert (form.keys, form.values) == (E4M3, E4M3)
        assert form.scales is not None and torch.equal(form.scales, scales_for(found.largest))


def test_scales_that_an_artifact_keeps_are_taken_and_nothing_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(folder)
    fit_kv(model, "fp8", OPS)
    plain = loaded(folder).paged_forms[0]
    model.blocks[0].mixer.form = kept_form(plain, ([], [2.0**-3] * plain.kv_heads), CPU)
    told = {block.mixer.name: told_scales(block.mixer.form) for block in model.blocks}
    config = Config.of(device="cpu", kv_cache_dtype="fp8")
    config.kv_scales = json.loads(json.dumps(told))
    monkeypatch.setattr(kv_fit, "look_at_kv", None)
    opened = loaded(folder)
    settle_kv(config, folder, opened, OPS)
    assert [told_scales(form) for form in opened.paged_forms] == list(told.values())
    assert opened.paged_forms[0].keys == F32 and opened.paged_forms[1].keys == E4M3
    own = kept_form(opened.paged_forms[1], ([1.0, 2.0], [4.0, 8.0]), CPU, Layout(1, 2))
    assert own.scales is not None and own.scales.tolist() == [[2.0], [8.0]]


def test_the_same_at_each_start(folder: Path) -> None:
    first, second = loaded(folder), loaded(folder)
    fit_kv(first, "fp8", OPS)
    fit_kv(second, "fp8", OPS)
    for a, b in zip(first.paged_forms, second.paged_forms, strict=True):
        assert a.scales is not None and b.scales is not None and torch.equal(a.scales, b.scales)


def test_planted_key_biases_keep_that_layers_keys_wide(tmp_path: Path) -> None:
    model = with_key_biases(tmp_path, 100.0)
    errors = [layer.key_error for layer in look_at_kv(model, OPS)]
    assert errors[0] > 2 * KEY_ERROR and errors[1] < KEY_ERROR / 2
    fit_kv(model, "fp8", OPS)
    wide, narrow = model.paged_forms
    assert (wide.keys, wide.values, wide.eight) == (F32, E4M3, 1) and narrow.eight == 2
    assert wide.scales is not None and (wide.scales[0] == 1).all()
    assert kv_words(model.paged_forms) == "float8_e4m3fn, keys of layers 0 in float32"


def test_without_them_all_keys_go_to_eight_bits(tmp_path: Path) -> None:
    model = with_key_biases(tmp_path, 0.0)
    fit_kv(model, "fp8", OPS)
    assert [form.eight for form in model.paged_forms] == [2, 2] and kv_words(
        model.paged_forms
    ) == "float8_e4m3fn"


def test_numbers_that_are_none_are_told_of(folder: Path) -> None:
    model = loaded(folder)
    for weight in model.blocks[1].weights():
        if weight.parts[0].name.endswith("layers.1.input_layernorm.weight"):
            weight.value[3] = torch.nan
    with pytest.raises(CheckpointError, match="layer 1 are no finite numbers"):
        fit_kv(model, "fp8", OPS)


def open_with(folder: Path, **knobs: Any) -> tuple[dict[str, Any], list[int]]:
    runner = open_runner(Config.of(device="cpu", max_num_seqs=8, **knobs), folder)
    try:
        assert runner._state is not None
        return runner.describe(), [form.eight for form in runner._state.model.paged_forms]
    finally:
        runner.close()


def test_what_the_runner_says(folder: Path) -> None:
    told, eight = open_with(folder, kv_cache_dtype="fp8", kv_cache_tokens=512, dtype="bfloat16")
    assert told["kv_cache_dtype"] == "float8_e4m3fn" and eight == [2, 2]
    told, eight = open_with(folder, kv_cache_tokens=512, dtype="float16")
    assert told["kv_cache_dtype"] == "float16" and eight == [0, 0]
    told, eight = open_with(folder, kv_cache_dtype="bfloat16", kv_cache_tokens=512, dtype="float32")
    assert told["kv_cache_dtype"] == "bfloat16" and eight == [0, 0]


def test_twice_the_tokens_in_the_same_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.execute.limits.free_memory", lambda device: 1 << 18)
    wide, _ = open_with(folder, dtype="bfloat16", max_model_len=64, max_num_batched_tokens=64)
    narrow, _ = open_with(
        folder, dtype="bfloat16", max_model_len=64, max_num_batched_tokens=64, kv_cache_dtype="fp8"
    )
    model = loaded(folder)
    half = token_bytes(model.paged_forms) - 4
    fit_kv(model, "fp8", OPS)
    assert (token_bytes(model.paged_forms) - 4) * 4 == half
    assert 1.9 * wide["kv_tokens"] < narrow["kv_tokens"] < 8 * 64


LATENT = TINY_LATENT | {
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}


def test_latent_vectors_have_one_scale_and_a_layer_that_they_move_stays_plain() -> None:
    """Planted: a number of each vector that dwarfs the others and that nothing is made of: the
    others round to 0."""
    model = tiny_model(**LATENT)
    odd = model.blocks[0].mixer
    odd.norm.weight.value[3] = 2.0**20
    odd.by_head[..., 3] = 0
    seen = look_at_kv(model, model.ops)
    assert seen[0].key_error > KEY_ERROR > 0.05 > seen[1].key_error > 0
    fit_kv(model, "fp8", model.ops)
    plain, eight = model.paged_forms
    assert isinstance(plain, LatentForm) and isinstance(eight, LatentForm)
    assert (
        plain.scale is None
        and eight.scale is not None
        and torch.equal(eight.scale, scales_for(seen[1].largest))
    )
    assert (
        kv_words([eight]) == "float8_e4m3fn, what turns in float32"
        and kv_words([plain]) == "float32"
    )
    assert kv_words([plain, eight]) == "float8_e4m3fn, what turns and layers 0 in float32"
    for form in (plain, eight):
        told = json.loads(json.dumps(told_scales(form)))
        assert told_scales(kept_form(form.plain(F32), told, CPU)) == told_scales(form)


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    compiled = replace(OPS, why={**OPS.why, "attention": ("triton", "")})
    with pytest.raises(UsageError, match=r"8\.9 or more .* has 8\.0: leave it auto"):
        check_eight_bits(torch.device("cuda", 0), compiled)
    check_eight_bits(torch.device("cuda", 0), OPS)
    check_eight_bits(CPU, compiled)


def test_spellings_and_values() -> None:
    from penstock.vllm_arguments.sift import engine_knobs

    assert engine_knobs("m", {"kv_cache_dtype": "fp8_e4m3"})[0]["kv_cache_dtype"] == "fp8"
    with pytest.raises(UsageError, match="one of auto, bfloat16, fp8, not 'fp8_e5m2'"):
        Config.of(**engine_knobs("m", {"kv_cache_dtype": "fp8_e5m2"})[0])


def store_scales(folder: Path, **tensors: torch.Tensor) -> Path:
    """Adds `model.layers.N.self_attn.k_scale` and the like, told as `k0`, to the folder's
    safetensors."""
    from safetensors.torch import load_file, save_file

    (shard,) = folder.glob("*.safetensors")
    named = {
        f"model.layers.{name[1:]}.self_attn.{name[0]}_scale": tensor
        for name, tensor in tensors.items()
    }
    save_file(load_file(shard) | named, shard, metadata={"format": "pt"})
    return folder


def test_the_checkpoints_scales_are_taken_and_what_it_lacks_is_measured(tmp_path: Path) -> None:
    one, two = torch.tensor([0.05]), torch.tensor([0.03, 0.07])
    folder = store_scales(make_folder(tmp_path), k0=one, v0=two.bfloat16())
    runner = open_runner(
        Config.of(model=str(folder), device="cpu", kv_cache_dtype="fp8", kv_cache_tokens=512),
        folder,
    )
    assert runner._state is not None
    first, second = runner._state.model.paged_forms
    runner.close()
    want = torch.stack([one.expand(2), two.bfloat16().float()])
    assert first.scales is not None and torch.equal(first.scales, want) and first.eight == 2
    assert second.scales is not None and torch.equal(
        second.scales.log2(), second.scales.log2().round()
    )
    # no scheme: they are not read
    told, eight = open_with(folder, kv_cache_tokens=512, dtype="float32")
    assert told["kv_cache_dtype"] == "float32" and eight == [0, 0]


def test_each_rank_has_the_scales_of_its_heads(tmp_path: Path) -> None:
    folder = store_scales(
        make_folder(tmp_path), k0=torch.tensor([1.0, 2.0]), v0=torch.tensor([3.0])
    )
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    for rank, key in ((0, 1.0), (1, 2.0)):
        first, second = read_kv_scales(folder, names, [1, 1], Layout(rank, 2))
        assert second is None and first is not None and first.tolist() == [[key], [3.0]]
    first, _ = read_kv_scales(folder, names, [1, 1], Layout(3, 4))
    assert first is not None and first.tolist() == [[2.0], [3.0]]


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        ([0.0], "positive"),
        ([torch.nan, 1.0], "positive"),
        ([1.0, 1.0, 1.0], "3 scales, .* 2 KV heads"),
    ],
)
def test_broken_scales_are_told_of(tmp_path: Path, scale: list[float], says: str) -> None:
    folder = store_scales(make_folder(tmp_path), k0=torch.tensor(scale), v0=torch.tensor([3.0]))
    with pytest.raises(CheckpointError, match=says):
        read_kv_scales(folder, ["model.layers.0.self_attn"], [2])


def asking(scheme: Any) -> StoredQuantization:
    """What is read of a checkpoint whose matrices are in float8, and whose config.json says this of
    its cache."""
    group = {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "targets": ["Linear"],
    }
    told = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"0": group},
    }
    return read_quantization(told | {"kv_cache_scheme": scheme}, "config.json")


def test_what_a_checkpoint_says_of_its_cache() -> None:
    whole = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    assert asks_for_eight_bits(asking(whole)) and asks_for_eight_bits(asking({"num_bits": 8}))
    assert not asks_for_eight_bits(asking(None)) and not asks_for_eight_bits(None)
    for wrong in (
        whole | {"num_bits": 4},
        whole | {"type": "int"},
        whole | {"dynamic": True},
        "fp8",
    ):
        with pytest.raises(CheckpointError, match=r"kv_cache_scheme .* is not served"):
            asks_for_eight_bits(asking(wrong))


def test_auto_is_what_the_checkpoint_says_where_the_device_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = asking({"num_bits": 8})
    assert (
        find_kv_dtype("auto", None, CPU, OPS) == "auto"
        and find_kv_dtype("auto", stored, CPU, OPS) == "fp8"
    )
    assert (
        find_kv_dtype("bfloat16", stored, CPU, OPS) == "bfloat16"
        and find_kv_dtype("fp8", None, CPU, OPS) == "fp8"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    old, compiled = (
        torch.device("cuda", 0),
        replace(OPS, why={**OPS.why, "attention": ("triton", "")}),
    )
    assert find_kv_dtype("auto", stored, old, compiled) == "auto"
    with pytest.raises(UsageError, match="leave it auto"):
        find_kv_dtype("fp8", stored, old, compiled)
