"""quantization_config: what is read of each method, and what is refused by name, with what to take
instead."""

from __future__ import annotations

from typing import Any

import pytest
from quantized_forms import (
    AWQ,
    FORMS,
    GPTQ,
    HF_FP8,
    MODELOPT,
    NARROW_ROWS,
    TOKENS,
    compressed,
    floats,
    fours,
    ints,
)

from penstock.errors import CheckpointError
from penstock.quant.read_quantization import read_quantization
from penstock.quant.stored_quantization import StoredForm, StoredQuantization

pytestmark = pytest.mark.torch  # the forms by hand

AT = "model.layers.3.mlp.down_proj"


def read(config: Any) -> StoredQuantization:
    return read_quantization(config, "config.json")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_and_leaves_the_head(name: str) -> None:
    found = read(FORMS[name][0])
    assert found.form_of(AT) is not None and found.form_of("lm_head") is None


def test_what_is_read() -> None:
    assert read(compressed(floats("channel"), "float-quantized")).form_of(AT) == StoredForm(
        "fp8", "channel"
    )
    assert read(HF_FP8).form_of(AT) == StoredForm("fp8", "block", 128, scale="weight_scale_inv")
    # as transformers writes it, and AutoFP8
    one_scale = {
        "quant_method": "fp8",
        "activation_scheme": "static",
    }
    assert read({**one_scale, "weight_block_size": None}).form_of(AT) == StoredForm(
        "fp8", "tensor", scale="weight_scale_inv"
    )
    assert read(one_scale).form_of(AT) == StoredForm("fp8", "tensor")
    assert read({**AWQ, "group_size": 128}).form_of(AT) == StoredForm(
        "int4", "group", 128, True, "awq"
    )
    assert read({**GPTQ, "group_size": -1}).form_of(AT) == StoredForm(
        "int4", "channel", None, False, "gptq"
    )
    form = StoredForm("int4", "group", 64, True, "packed")
    assert read(compressed(ints(4, 64, False), "pack-quantized")).form_of(AT) == form


NVFP4 = StoredForm("nvfp4", "group", 16, packing="modelopt")
LAYERS = {
    "model.layers.3.mlp": {"quant_algo": "NVFP4", "group_size": 16},
    "a.attn": {"quant_algo": "FP8"},
    "b.proj": {"quant_algo": "W4A16_NVFP4"},
}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}


def test_four_bit_floats_of_each_writer() -> None:
    assert (
        read(MODELOPT).form_of(AT) == NVFP4
        and read(MODELOPT | {"quant_method": "modelopt_fp4"}).form_of(AT) == NVFP4
    )
    for group, kind in ((16, "nvfp4"), (32, "mxfp4")):
        found = read(compressed(fours(group), f"{kind}-pack-quantized")).form_of(AT)
        assert found == StoredForm(kind, "group", group, packing="packed")  # type: ignore[arg-type]
    mixed = read(MIXED)
    assert (
        mixed.form_of(AT) == NVFP4
        and mixed.form_of("b.proj") == NVFP4
        and mixed.form_of("a.other") is None
    )
    assert mixed.form_of("a.attn.q_proj") == StoredForm("fp8", "tensor") and mixed.kinds == {
        "nvfp4",
        "fp8",
    }
    assert mixed.form_of("model.layers.30.mlp.up_proj") is None
    narrow = {"group_0": {"targets": ["Linear"], "weights": fours(16), **NARROW_ROWS}}
    for config, wanted in (
        (compressed(fours(16), "nvfp4-pack-quantized"), False),
        (compressed(fours(16), "nvfp4-pack-quantized", config_groups=narrow), True),
        (MODELOPT, True),
        (MODELOPT | {"quant_algo": "w4a16_nvfp4"}, False),
        (MIXED, True),
    ):
        assert read(config).narrow_rows is wanted


@pytest.mark.parametrize(
    "config, plain, quantized",
    [
        (MODELOPT | {"ignore": ["*.self_attn*"]}, "model.layers.0.self_attn.q_proj", AT),
        (
            MODELOPT | {"ignore": ["model.layers.2.mlp*"]},
            "model.layers.2.mlp.up_proj",
            "model.layers.20.mlp.up_proj",
        ),
        (
            MODELOPT | {"ignore": ["model.layers.2"]},
            "model.layers.2.mlp.up_proj",
            "model.layers.20.mlp.up_proj",
        ),
        (
            MODELOPT | {"ignore": ["*.mlp.gate"]},
            "model.layers.2.mlp.gate",
            "model.layers.2.mlp.gate_proj",
        ),
        (
            MODELOPT | {"ignore": ["*.a*", "*b*c*d", "*layers.0.self*"]},
            "model.layers.0.self_attn.q_proj",
            AT,
        ),
        (
            MODELOPT | {"ignore": ["*layers.3*shared_expert"]},
            "a.layers.3.mlp.shared_expert.up_proj",
            AT,
        ),
        (
            {**HF_FP8, "modules_to_not_convert": ["mlp.gate", "model.layers.2"]},
            "a.mlp.gate",
            "a.mlp.gate_proj",
        ),
        (
            {**HF_FP8, "modules_to_not_convert": ["layers.2"]},
            "layers.2.mlp.up_proj",
            "layers.20.mlp.up_proj",
        ),
        (
            {**HF_FP8, "ignored_layers": ["model.layers.0.mlp.up_proj"]},
            "model.layers.0.mlp.up_proj",
            AT,
        ),
        (
            {**AWQ, "group_size": 64, "modules_to_not_convert": ["self_attn"]},
            "model.layers.0.self_attn.q_proj",
            AT,
        ),
        (
            {**GPTQ, "group_size": 64, "dynamic": {r"-:.*self_attn.*": {}}},
            "model.layers.0.self_attn.q_proj",
            AT,
        ),
        (
            {**GPTQ, "group_size": 64, "modules_in_block_to_quantize": [["mlp.down_proj"]]},
            "a.mlp.up_proj",
            AT,
        ),
        (
            compressed(ints(4, 64), "pack-quantized", ignore=["re:.*self_attn.*"]),
            "model.layers.0.self_attn.q_proj",
            AT,
        ),
        (
            compressed(ints(4, 64), "pack-quantized", ignore=[AT]),
            AT,
            "model.layers.4.mlp.down_proj",
        ),
    ],
)
def test_ignored_matrices_stay_as_they_were(
    config: dict[str, Any], plain: str, quantized: str
) -> None:
    found = read(config)
    assert found.form_of(plain) is None and found.form_of(quantized) is not None


def test_what_transformers_5_writes_is_read() -> None:
    """transformers 5.24: FineGrainedFP8Config().to_dict(), AwqConfig(bits=4).to_dict()."""
    fp8 = {
        "quant_method": "fp8",
        "modules_to_not_convert": None,
        "modules_to_convert": None,
        "dequantize": False,
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "float",
        "expert_dtype": "fp8",
    }
    awq = {
        "zero_point": True,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "bits": 4,
        "tokenizer": None,
        "dataset": None,
        "group_size": 128,
        "damp_percent": 0.1,
        "desc_act": False,
        "act_group_aware": True,
        "sym": True,
        "true_sequential": True,
        "format": "gemm",
        "meta": None,
        "backend": "auto",
        "model_seqlen": None,
        "block_name_to_quantize": None,
        "batch_size": 1,
        "pad_token_id": None,
        "max_input_length": None,
        "cache_block_outputs": True,
        "version": "gemm",
    }
    assert read(fp8).form_of(AT) == read(HF_FP8).form_of(AT)
    assert read(awq).form_of(AT) == read({**AWQ, "group_size": 128}).form_of(AT)


def test_targets_are_class_names_whole_names_or_patterns() -> None:
    config = compressed(ints(4, 64), "pack-quantized", ignore=[])
    group = config["config_groups"]["group_0"]  # type: ignore[index]
    group["targets"] = ["re:.*down_proj", "model.layers.0.mlp.up_proj"]
    found = read(config)
    assert found.form_of(AT) and found.form_of("model.layers.0.mlp.up_proj")
    assert found.form_of("model.layers.1.mlp.up_proj") is None


def test_groups_of_several_forms() -> None:
    config = compressed(ints(4, 64), "pack-quantized", ignore=[])
    groups: Any = config["config_groups"]
    groups["group_0"]["targets"] = ["re:.*mlp.*"]
    groups["group_1"] = {
        "targets": ["re:.*attn.*"],
        "weights": floats("channel"),
        "format": "float-quantized",
        **TOKENS,
    }
    found = read(
        {**config, "format": "mixed-precision"}
        | {"config_groups": {**groups, "group_0": groups["group_0"] | {"format": "pack-quantized"}}}
    )
    assert [found.form_of(name).kind for name in ("a.mlp.b", "a.attn.b")] == ["int4", "fp8"]  # type: ignore[union-attr]
    assert found.kinds == {"int4", "fp8"}


UNREAD = ("gguf", "hqq", "aqlm", "quip", "exl2", "torchao")
REFUSALS: list[tuple[Any, str]] = [
    ("fp8", "must be an object"),
    ({}, "quant_method '' is not read"),
    ({"quant_method": 3}, "quant_method must be a string"),
    ({"load_in_4bit": True}, "'bitsandbytes' is not read: its own library makes them"),
    *[
        ({"quant_method": method}, f"quant_method '{method}' is not read: take")
        for method in UNREAD
    ],
    (
        {"quant_method": "marlin"},
        "its numbers are laid out for one kernel: take the GPTQ checkpoint",
    ),
    ({"quant_method": "mxfp4", "group_size": 16}, "key 'group_size' (16) is not known, and may"),
    ({**GPTQ, "group_size": 64, "desc_act": True}, "act-order"),
    ({**GPTQ, "group_size": 64, "checkpoint_format": "marlin"}, "marlin's format is not read"),
    (
        {**GPTQ, "group_size": 64, "checkpoint_format": "bitblas"},
        "checkpoint_format 'bitblas' is not read",
    ),
    ({**GPTQ, "group_size": 64, "bits": 3}, "bits 3 is not read, only 4, 8"),
    ({**GPTQ, "group_size": 1024}, "group_size 1024 is not read, only 32, 64, 128"),
    (
        {**GPTQ, "group_size": 64, "dynamic": {r"+:.*": {"bits": 8}}},
        "matrices with settings of their own",
    ),
    ({**GPTQ, "group_size": 64, "dynamic": {"-:(": {}}}, "is no pattern"),
    (
        {**GPTQ, "group_size": 64, "rotation": "hadamard"},
        "key 'rotation' ('hadamard') is not known, and may",
    ),
    ({**AWQ, "group_size": 64, "version": "gemv"}, "version 'gemv' is not read, only 'gemm'"),
    ({**AWQ, "group_size": 64, "bits": 8}, "bits 8 is not read"),
    ({**AWQ, "group_size": "all"}, "group_size 'all' is not read"),
    ({**HF_FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not read"),
    (
        {**HF_FP8, "weight_block_size": [64, 64]},
        "weight_block_size [64, 64] is not read, only [128, 128]",
    ),
    ({**HF_FP8, "expert_dtype": "fp4"}, "expert_dtype 'fp4' is not read, only 'fp8'"),
    ({**HF_FP8, "activation_scheme": "other"}, "activation_scheme 'other' is not read"),
    ({**HF_FP8, "modules_to_not_convert": "lm_head"}, "must be a list of names"),
    (
        compressed(fours(32), "mxfp6-pack-quantized"),
        "'mxfp6-pack-quantized' is not read: floats of six bits",
    ),
    (
        compressed(fours(32), "nvfp4-pack-quantized"),
        "strategy 'group' is not read, only 'tensor_group'",
    ),
    (
        compressed(fours(16, group_size=32), "nvfp4-pack-quantized"),
        "group_size 32 is not read, only 16",
    ),
    (
        compressed(fours(16), "mxfp4-pack-quantized"),
        "strategy 'tensor_group' is not read, only 'group'",
    ),
    (
        compressed(fours(32, group_size=16), "mxfp4-pack-quantized"),
        "group_size 16 is not read, only 32",
    ),
    (
        compressed(fours(16, scale_dtype="torch.bfloat16"), "nvfp4-pack-quantized"),
        "scale_dtype 'bfloat16' is not read",
    ),
    (
        compressed(fours(16, symmetric=False), "nvfp4-pack-quantized"),
        "holds symmetric floats of 4 bits",
    ),
    (compressed(ints(4, 32), "mxfp4-pack-quantized"), "holds symmetric floats of 4 bits"),
    (compressed(fours(16), "float-quantized"), "num_bits 4 is not read, only 8"),
    (
        {"quant_method": "modelopt"},
        "quant_algo '' is not read, only 'NVFP4', 'W4A16_NVFP4', 'FP8', 'MIXED_PRECISION'",
    ),
    ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not read, only"),
    ({**MODELOPT, "quant_algo": "MXFP8"}, "quant_algo 'MXFP8' is not read, only"),
    ({**MODELOPT, "group_size": 32}, "group_size 32 is not read, only 16"),
    (
        {**MODELOPT, "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}}},
        "group_size 32 is not read",
    ),
    ({**MODELOPT, "pre_quant_scale": True}, "key 'pre_quant_scale' (True) is not known, and may"),
    (
        {**MODELOPT, "quantized_layers": LAYERS},
        "quantized_layers must name matrices, of quant_algo MIXED_PRECISION",
    ),
    ({**MIXED, "quantized_layers": {}}, "quantized_layers must name matrices"),
    (
        {**MIXED, "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
        "'a': quant_algo 'W4A8_AWQ' is not read",
    ),
    (
        {**MIXED, "quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 32}}},
        "'a': group_size 32 is not read",
    ),
    (
        {
            "quant_method": "modelopt",
            "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"},
        },
        (
            "kv_cache_quant_algo 'NVFP4' is not read, only 'FP8': set it to null to have KV in the"
            " model's numbers"
        ),
    ),
    (compressed(floats("channel"), "marlin-24"), "sparse matrices"),
    (compressed(floats("channel"), "dense"), "format 'dense' is not read"),
    (compressed(ints(4, 64), "int-quantized"), "num_bits 4 is not read, only 8"),
    (compressed(ints(4, 16), "pack-quantized"), "group_size 16 is not read"),
    (compressed({**ints(4, 64), "actorder": "group"}, "pack-quantized"), "act-order"),
    (compressed({**ints(4, 64), "num_bits": 3}, "pack-quantized"), "num_bits 3 is not read"),
    (compressed({**ints(4, 64), "secret": 1}, "pack-quantized"), "key 'secret' (1) is not known"),
    (compressed({**floats("channel"), "num_bits": 4}, "float-quantized"), "num_bits 4 is not read"),
    (
        compressed({**floats("block"), "block_structure": [32, 32]}, "float-quantized"),
        "block_structure [32, 32]",
    ),
    (
        compressed(floats("channel"), "float-quantized", transform_config={"a": 1}),
        "key 'transform_config'",
    ),
    (
        compressed(floats("channel"), "float-quantized", config_groups={}),
        "config_groups has no group",
    ),
    (
        compressed(floats("channel"), "float-quantized", sparsity_config={"format": "sparse-24"}),
        "sparse-24",
    ),
]


@pytest.mark.parametrize("config, said", REFUSALS, ids=[said for _, said in REFUSALS])
def test_what_is_not_read_is_named(config: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(config)
    assert said in str(error.value) and str(error.value).startswith(
        "config.json: quantization_config"
    )


def test_activations_of_four_bits_are_refused() -> None:
    config = compressed(ints(4, 64), "pack-quantized")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4}  # type: ignore[index]
    with pytest.raises(CheckpointError, match="input_activations"):
        read(config)


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    0.5,
    "",
    "re:(",
    "x" * 5000,
    [],
    ["re:["],
    [3],
    [[[]]],
    {},
    {"a": {}},
    {"": 1},
]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested objects and lists."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(place for key, each in inner for place in places(each, (*at, key)))]


def changed(value: Any, at: tuple[Any, ...], odd: Any) -> Any:
    if not at:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], odd)  # type: ignore[index]
    return copy


@pytest.mark.parametrize("name", FORMS)
def test_odd_values_are_read_or_refused_in_one_line(name: str) -> None:
    config, refused = FORMS[name][0], 0
    for place in places(config):
        for odd in ODD:
            try:
                read(changed(config, place, odd)).form_of(AT)
            except CheckpointError as error:
                refused += 1
                assert len(str(error)) < 1000 and "\n" not in str(error)
    assert refused > 30
