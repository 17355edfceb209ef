"""Checkpoints in four-bit floats, beside what test_quantized.py asks of every form: a whole model
is the plain one of its dequantised weights; ModelOpt's two files, names and scales of K and V; what
is said of activations; what is wrong is one line by name; a written folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from quantized_forms import FORMS, HF_QUANT, MODELOPT
from quantized_model import CONFIG, HIDDEN, fused, linears, load, rows, times, wide_tensors, write
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.demo import model_folder
from penstock.errors import CheckpointError
from penstock.kernels.fp4_matrix import widen_fp4
from penstock.models.read_config import model_config_of, read_model_config
from penstock.parallel.layout import Layout
from penstock.weights.kv_scales import asks_for_eight_bits, read_kv_scales
from penstock.weights.write_quantized import write_quantized

pytestmark = pytest.mark.torch

FOUR_BITS = ["nvfp4", "mxfp4", "modelopt", "modelopt nested"]
AT = "model.layers.0.mlp.up_proj"


def worth_of(linear: Any) -> Tensor:
    matrix = linear.product.matrix
    return widen_fp4(matrix.numbers, matrix.scale, matrix.whole)


def config_of(folder: Path, quantization: Any, **more: Any) -> None:
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": quantization} | more)
    )


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_the_plain_one_of_its_dequantised_weights(
    tmp_path: Path, name: str, tied: bool
) -> None:
    """Bit for bit in its weights, whose formula is exact in float32. An untied head is in the form
    too, tied it is the embedding."""
    worth = write(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    wide = wide_tensors() | {f"model.layers.0.{at}.weight": matrix for at, matrix in worth.items()}
    if not tied:
        stored, wide["lm_head.weight"] = FORMS[name][1](40, HIDDEN, 77)
        tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in stored.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        told = json.loads((tmp_path / "config.json").read_text())
        quantization = told["quantization_config"]
        quantization = quantization | (
            {"quantization": quantization["quantization"] | {"exclude_modules": []}}
            if "quantization" in quantization
            else {"ignore": []}
        )
        config_of(tmp_path, quantization, tie_word_embeddings=False)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(wide, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    model, right = load(tmp_path), load(plain)
    for part, linear in linears(model).items():
        assert torch.equal(worth_of(linear), fused(worth, part)), part
    assert tied or torch.equal(worth_of(model.head), wide["lm_head.weight"])
    x = rows(HIDDEN)
    torch.testing.assert_close(model.logits(x), right.logits(x), rtol=1e-5, atol=1e-5)


def test_a_head_that_is_ignored_stays_wide(tmp_path: Path) -> None:
    write(tmp_path, "nvfp4")
    path, head = tmp_path / "model.safetensors", torch.randn(40, HIDDEN)
    save_file(load_file(path) | {"lm_head.weight": head}, path)
    config_of(tmp_path, FORMS["nvfp4"][0], tie_word_embeddings=False)
    x = rows(HIDDEN)
    torch.testing.assert_close(load(tmp_path).logits(x), x @ head.T)


@pytest.mark.parametrize("form", ["nvfp4", "modelopt"])
def test_one_tensor_of_several_matrices_is_cut_as_they_are(tmp_path: Path, form: str) -> None:
    """Phi-3's: q, k and v, and gate and up, have one scale of the whole between them."""
    shapes = {
        "self_attn.qkv_proj": (256, 128),
        "self_attn.o_proj": (128, 128),
        "mlp.gate_up_proj": (384, 128),
        "mlp.down_proj": (128, 192),
    }
    tensors, worth = wide_tensors(), {}
    for seed, (at, (out, into)) in enumerate(shapes.items()):
        stored, worth[at] = FORMS[form][1](out, into, seed)
        tensors |= {f"model.layers.0.{at}.{suffix}": tensor for suffix, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    shape = {"model_type": "phi3", "original_max_position_embeddings": 64, "pad_token_id": 0}
    config_of(tmp_path, FORMS[form][0], **shape)
    shares = [linears(load(tmp_path, layout=Layout(rank, 2))) for rank in range(2)]
    q, k, v = worth["self_attn.qkv_proj"].split([128, 64, 64])
    for rank, share in enumerate(shares):
        half = torch.cat([each.chunk(2)[rank] for each in (q, k, v)])
        assert torch.equal(worth_of(share["qkv"]), half)
        gate_up = worth["mlp.gate_up_proj"].chunk(2)
        assert torch.equal(
            worth_of(share["gate_up"]), torch.cat([each.chunk(2)[rank] for each in gate_up])
        )
        assert torch.equal(worth_of(share["down"]), worth["mlp.down_proj"].chunk(2, 1)[rank])


NAN = torch.tensor([float("nan")])


def with_a_nan(scale: Tensor) -> Tensor:
    return torch.cat((scale.float()[:-1], NAN.expand(1, 8))).to(scale.dtype)


WRONG: list[tuple[str, str, Any, str]] = [
    ("nvfp4", "weight_scale", None, f"lack tensor '{AT}.weight_scale'"),
    ("nvfp4", "weight_global_scale", None, f"lack tensor '{AT}.weight_global_scale'"),
    ("nvfp4", "weight_packed", None, f"lack tensor '{AT}.weight_packed'"),
    ("modelopt", "weight_scale_2", None, f"lack tensor '{AT}.weight_scale_2'"),
    (
        "nvfp4",
        "weight_scale",
        lambda t: t[:, ::2].contiguous(),
        r"shape \[192, 4\], config.json asks for \[192, 8\]",
    ),
    (
        "mxfp4",
        "weight_scale",
        lambda t: t.repeat(1, 2),
        r"has shape \[192, 8\], config.json asks for \[192, 4\]",
    ),
    ("nvfp4", "weight_packed", lambda t: t[:, :32].contiguous(), r"has shape \[192, 32\]"),
    (
        "nvfp4",
        "weight_global_scale",
        lambda t: t.expand(192).contiguous(),
        r"shape \[192\], config.json asks",
    ),
    ("nvfp4", "weight_scale", lambda t: t.float(), "is F32, and this checkpoint's scheme has"),
    ("nvfp4", "weight_packed", lambda t: t.float(), "is F32, and this checkpoint's scheme has"),
    (
        "mxfp4",
        "weight_scale",
        lambda t: t.to(torch.float8_e4m3fn),
        "is F8_E4M3, and this checkpoint's scheme has",
    ),
    ("nvfp4", "weight_scale", with_a_nan, "no finite number"),
    ("modelopt", "weight_scale", with_a_nan, "no finite number"),
    (
        "mxfp4",
        "weight_scale",
        lambda t: t.index_fill(0, torch.tensor([7]), 255),
        "no finite number",
    ),
    (
        "nvfp4",
        "weight_global_scale",
        lambda t: t * 0,
        "is 0, and must be a positive number, the scale of a whole",
    ),
    ("nvfp4", "weight_global_scale", lambda t: t * NAN, "is nan, and must be a positive number"),
    ("nvfp4", "weight_global_scale", lambda t: -t, "and must be a positive number"),
    ("modelopt", "weight_scale_2", lambda t: t * 0, "is 0, and must be a positive number"),
    (
        "modelopt",
        "weight_scale_2",
        lambda t: t * float("inf"),
        "is inf, and must be a positive number",
    ),
]


@pytest.mark.parametrize(("form", "suffix", "change", "said"), WRONG)
def test_what_is_wrong_is_one_line_by_name(
    tmp_path: Path, form: str, suffix: str, change: Any, said: str
) -> None:
    write(tmp_path, form)
    path, name = tmp_path / "model.safetensors", f"{AT}.{suffix}"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    save_file(tensors if change is None else tensors | {name: change(tensor)}, path)
    with pytest.raises(CheckpointError, match=said) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_rows_that_no_span_divides_are_named(tmp_path: Path) -> None:
    config_of(tmp_path, FORMS["nvfp4"][0], intermediate_size=208)
    with pytest.raises(
        CheckpointError, match="has 208 inputs, and four-bit floats are read where 32 divides"
    ):
        load(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("name", "count"), [("nvfp4", 0), ("nvfp4 rows", 1), ("modelopt", 1), ("mxfp4", 0)]
)
def test_activations_of_four_bits_are_told_of_once(
    tmp_path: Path, name: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, name)
    capsys.readouterr()
    load(tmp_path)
    said = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "activations stay in float32" in line
    ]
    assert len(said) == count
    assert all(
        "scales (input_global_scale, input_scale), where it has them, are not used" in line
        for line in said
    )


def test_modelopt_s_own_file_is_read_where_config_json_says_nothing(tmp_path: Path) -> None:
    worth = write(tmp_path, "modelopt")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(HF_QUANT))
    config = read_model_config(tmp_path)
    assert config.quantization is not None and config.quantization.narrow_rows
    assert (
        asks_for_eight_bits(config.quantization)
        and config.quantization.form_of("a.mlp.gate") is None
    )
    assert torch.equal(worth_of(linears(load(tmp_path))["down"]), worth["mlp.down_proj"])
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}})
    )
    with pytest.raises(
        CheckpointError, match=r"hf_quant_config\.json: .*'W4A8_AWQ' is not read, only 'NVFP4'"
    ):
        read_model_config(tmp_path)
    config_of(tmp_path, FORMS["mxfp4"][0])  # what config.json says holds
    assert read_model_config(tmp_path).quantization.method == "compressed-tensors"  # type: ignore[union-attr]


def test_scales_of_k_and_v_are_found_by_modelopt_s_names(tmp_path: Path) -> None:
    write(tmp_path, "modelopt")
    at, path = "model.layers.0.self_attn", tmp_path / "model.safetensors"
    scales = {f"{at}.k_proj.k_scale": torch.tensor(0.5), f"{at}.v_proj.v_scale": torch.tensor(0.25)}
    save_file(load_file(path) | scales, path)
    assert read_model_config(tmp_path).quantization.kv == MODELOPT["kv_cache_scheme"]  # type: ignore[union-attr]
    (found,) = read_kv_scales(tmp_path, [at], [2])
    assert found is not None and found.tolist() == [[0.5, 0.5], [0.25, 0.25]]
    load(tmp_path)  # they are no weights


def test_names_of_a_checkpoint_are_told_of_by_ours() -> None:
    """Nemotron's `backbone` is our `model`; a multimodal's text has other names too, also in
    patterns and layers."""
    told: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "backbone.layers.1.mixer.experts": {"quant_algo": "NVFP4", "group_size": 16},
            "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        },
        "exclude_modules": ["backbone.layers.1.mixer.experts.0*"],
    }
    raw = {
        "model_type": "nemotron_h",
        "vocab_size": 64,
        "hidden_size": 64,
        "hybrid_override_pattern": "ME*",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "quantization_config": told,
    }
    stored = model_config_of(raw, "config.json").quantization
    assert stored is not None
    at = "model.layers.1.mixer.experts"
    kinds = [
        form and form.kind
        for form in map(
            stored.form_of,
            (
                f"{at}.3.up_proj",
                f"{at}.0.up_proj",
                "model.layers.0.mixer.in_proj",
                "model.layers.0.mixer.out_proj",
            ),
        )
    ]
    assert kinds == ["nvfp4", None, "fp8", None]


def test_a_written_folder_is_read_by_both_and_fused_matrices_share_the_whole_s_scale(
    tmp_path: Path,
) -> None:
    write_quantized(model_folder(), tmp_path, "nvfp4", keep_wide=["*layers.0.mlp.down_proj"])
    told = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = QuantizationConfig.model_validate(told).config_groups.values()
    # tied: transformers has a matrix there, and there is none in the file
    assert "lm_head" in told["ignore"]
    assert group.weights.num_bits == 4 and group.weights.scale_dtype == torch.float8_e4m3fn
    stored, wide = (
        load_file(tmp_path / "model.safetensors"),
        load_file(model_folder() / "model.safetensors"),
    )
    model = load(tmp_path)
    for layer, block in enumerate(model.blocks):
        at = f"model.layers.{layer}"
        for names, linear in (
            ([f"{at}.self_attn.{n}_proj" for n in "qkv"], block.mixer.qkv),
            ([f"{at}.mlp.{n}_proj" for n in ("gate", "up")], block.mlp.gate_up),
        ):
            wholes = {float(stored[f"{name}.weight_global_scale"]) for name in names}
            most = max(float(wide[f"{name}.weight"].abs().max()) for name in names)
            assert len(wholes) == 1 and abs(wholes.pop() * most / 2688 - 1) < 0.01
            right = torch.cat([wide[f"{name}.weight"] for name in names]).float()
            assert 0 < (worth_of(linear) - right).abs().max() < 0.2 * right.abs().max()
        assert f"{at}.mlp.down_proj.weight{'' if layer == 0 else '_packed'}" in stored
    assert torch.equal(stored["model.embed_tokens.weight"], wide["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError, match="is quantized already"):
        write_quantized(tmp_path, tmp_path / "twice", "nvfp4")


@pytest.mark.parametrize("asked", ["nvfp4", "modelopt", "modelopt_fp4"])
def test_it_may_be_asked_for_by_the_names_that_others_have_for_it(
    tmp_path: Path, asked: str
) -> None:
    write(tmp_path, "modelopt")
    model = load(tmp_path, quantization=asked)
    x = rows(HIDDEN)
    assert times(linears(model)["o"], x).shape == (5, HIDDEN)
