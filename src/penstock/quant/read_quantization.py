"""read_quantization: reads the parsed `quantization_config` of a config.json and returns a
StoredQuantization. An unknown key or value is an error that names it and suggests an alternative.
Needs no torch and reads no files.

Hugging Face's fp8 (blocks of 128 x 128, or one scale a matrix), AWQ (gemm) and GPTQ (without
act-order) are read here; read_compressed.py and read_modelopt.py read compressed-tensors and
ModelOpt."""

from __future__ import annotations

from typing import Any, cast

from penstock.errors import CheckpointError
from penstock.json_keys import shown
from penstock.quant.quant_keys import INSTEAD, REFUSED, QuantKeys
from penstock.quant.read_compressed import BLOCK, GROUPS, read_compressed
from penstock.quant.read_modelopt import read_modelopt
from penstock.quant.stored_quantization import Kind, Scales, StoredForm, StoredQuantization, Targets

# quantization method -> description of its supported checkpoints, as docs/quantization.md shows it
READ = {
    "compressed-tensors": (
        "`float-quantized` and `naive-quantized` with 8-bit floats (scales by channel, tensor or"
        " block of 128 x 128); `pack-quantized` with 4 and 8 bits (groups of 32, 64, 128, or a row;"
        " with and without zero points); `int-quantized` with 8 bits; `nvfp4-pack-quantized` and"
        " `mxfp4-pack-quantized`; groups of matrices in different forms"
    ),
    "modelopt": (
        "NVIDIA's, of config.json or `hf_quant_config.json`: `NVFP4`, `W4A16_NVFP4`, `FP8`, and"
        " `MIXED_PRECISION` of these (`quantized_layers`); also as `modelopt_fp4`"
    ),
    "mxfp4": "gpt-oss's experts, in four-bit floats with a scale for 32",
    "fp8": (
        "Hugging Face's, in blocks of 128 x 128 or with one scale a matrix (`weight_scale_inv`);"
        " AutoFP8's, with one scale a matrix (`weight_scale`)"
    ),
    "awq": "version `gemm`, groups of 32, 64, 128, or a row",
    "gptq": (
        "4 and 8 bits, `gptq` and `gptq_v2`, groups of 32, 64, 128, or a row, `sym` or not,"
        " `desc_act` false"
    ),
}

# Keys about calibration and kernels that writers of AWQ and GPTQ add. They don't change the stored
# numbers and are skipped.
WRITERS = (
    "damp_percent",
    "damp_auto_increment",
    "true_sequential",
    "static_groups",
    "model_name_or_path",
    "model_file_base_name",
    "dataset",
    "tokenizer",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "backend",
    "use_cuda_fp16",
    "model_seqlen",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "batch_size",
    "pad_token_id",
    "max_input_length",
    "cache_block_outputs",
    "meta",
    "quantizer",
    "hyb_act",
    "mse",
    "act_group_aware",
    "offload_to_disk",
    "offload_to_disk_path",
)


def read_quantization(raw: Any, where: str) -> StoredQuantization:
    """Returns the quantization that a parsed `quantization_config` declares. where: file name with
    which error messages begin."""
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: quantization_config must be an object, not {shown(raw)}")
    told = QuantKeys(raw, f"{where}: quantization_config")
    method = told.text("quant_method", "")
    readers = {
        "compressed-tensors": read_compressed,
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
        "modelopt": read_modelopt,
        "modelopt_fp4": read_modelopt,
    }
    if method not in readers:
        if not method and ("load_in_4bit" in raw or "load_in_8bit" in raw):
            method = "bitsandbytes"
        raise told.fail(f"quant_method {shown(method)} is not read: {REFUSED.get(method, INSTEAD)}")
    found = readers[method](told)
    told.refuse_rest()
    return found


# --- HF's fp8, AWQ, GPTQ


def _fp8(told: QuantKeys) -> StoredQuantization:
    """Reads Hugging Face's and AutoFP8's float8 config."""
    told.one_of(
        "fmt",
        told.text("fmt", "e4m3"),
        ("e4m3", "float8_e4m3fn"),
        "numbers with 5 bits of exponent are not: " + INSTEAD,
    )
    # With "static" the checkpoint has activation scales. They are not used: each row of activations
    # gets its own scale, which is finer.
    told.one_of(
        "activation_scheme", told.text("activation_scheme", "dynamic"), ("dynamic", "static")
    )
    told.one_of("expert_dtype", told.text("expert_dtype", "fp8"), ("fp8",))
    inverse = "weight_block_size" in told.rest
    size = told.take("weight_block_size", None)
    if size is None:
        # transformers always writes this key (null: one scale a matrix), and stores scales as
        # `weight_scale_inv`. AutoFP8 never writes it.
        form = StoredForm("fp8", "tensor", scale="weight_scale_inv" if inverse else "weight_scale")
    elif size == [BLOCK, BLOCK]:
        form = StoredForm("fp8", "block", BLOCK, scale="weight_scale_inv")
    else:
        raise told.fail(
            f"weight_block_size {shown(size)} is not read, only [128, 128] or null: {INSTEAD}"
        )
    told.skip("scale_fmt")  # describes activations only
    ignored = told.names("modules_to_not_convert", "ignored_layers")
    # DeepSeek leaves routers and its mtp layer's join unquantized without listing them
    ignored = (*ignored, "lm_head", "gate", "eh_proj")
    return StoredQuantization("fp8", (Targets(("Linear",), form),), ignored, by_part=True)


def _mxfp4(told: QuantKeys) -> StoredQuantization:
    """Reads gpt-oss's config. The result has no targets: only experts are quantized, and
    models/gpt_oss.py reads these itself."""
    told.skip("modules_to_not_convert")
    return StoredQuantization("mxfp4", ())


def _awq(told: QuantKeys) -> StoredQuantization:
    """Reads AWQ's config."""
    told.one_of(
        "version",
        told.text("version", "gemm").lower(),
        ("gemm",),
        "take a checkpoint of version gemm",
    )
    bits, group = (
        told.take("bits", told.take("w_bit", None)),
        told.take("group_size", told.take("q_group_size", None)),
    )
    told.skip(
        "w_bit",
        "q_group_size",
        "do_fuse",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "kernel",
        "sym",
        *WRITERS,
    )
    told.one_of("bits", bits, (4,))
    told.one_of(
        "format",
        told.text("format", "gemm").lower(),
        ("gemm",),
        "take a checkpoint of version gemm",
    )
    form = StoredForm(
        "int4", *_grouped(told, group), zeros=told.flag("zero_point", True), packing="awq"
    )
    ignored = told.names("modules_to_not_convert")
    return StoredQuantization(
        "awq", (Targets(("Linear",), form),), _with_head(told, ignored), by_part=True
    )


def _gptq(told: QuantKeys) -> StoredQuantization:
    """Reads GPTQ's config."""
    bits = told.one_of("bits", told.count("bits"), (4, 8))
    if told.flag("desc_act", False):
        raise told.fail(
            "desc_act true (act-order) is not read: take a checkpoint with desc_act false, or an"
            " AWQ one"
        )
    form_name = told.text("checkpoint_format", told.text("format", "gptq"))
    if form_name == "marlin" or told.flag("is_marlin_format", False):
        raise told.fail(f"marlin's format is not read: {REFUSED['marlin']}")
    told.one_of("checkpoint_format", form_name, ("gptq", "gptq_v2"))
    told.skip(*WRITERS)
    told.one_of("pack_dtype", told.text("pack_dtype", "int32"), ("int32",))
    # GPTQ writers leave routers unquantized without listing them
    ignored = (
        "gate",
        *_dynamic(told),
    )
    zeros, kind = not told.flag("sym", True), cast(Kind, f"int{bits}")
    form = StoredForm(
        kind, *_grouped(told, told.take("group_size", -1)), zeros=zeros, packing=form_name
    )
    only = tuple(f".{name}" for name in _flat(told, told.take("modules_in_block_to_quantize", [])))
    return StoredQuantization(
        "gptq", (Targets(("Linear",), form),), _with_head(told, ignored), by_part=True, only=only
    )


def _dynamic(told: QuantKeys) -> tuple[str, ...]:
    """Returns the patterns of GPTQModel's `dynamic` rules that leave modules unquantized (keys
    `-:pattern`). Raises CheckpointError for rules that change how a module is quantized."""
    rules = told.object("dynamic", {})
    for rule in rules:
        if not rule.startswith("-:"):
            raise told.fail(
                f"dynamic has {shown(rule)}: matrices with settings of their own are not read:"
                f" {INSTEAD}"
            )
    told.rest["dynamic_patterns"] = [f"re:.*{rule[2:]}" for rule in rules]
    return told.names("dynamic_patterns")


def _flat(told: QuantKeys, names: Any) -> list[str]:
    """Flattens modules_in_block_to_quantize: a list of names, or of lists of names."""
    if not isinstance(names, list):
        raise told.fail(f"modules_in_block_to_quantize must be a list, not {shown(names)}")
    flat = [name for each in names for name in (each if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) for name in flat):
        raise told.fail(f"modules_in_block_to_quantize must hold names, not {shown(names)}")
    return flat


def _with_head(told: QuantKeys, ignored: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the ignored names, with lm_head added unless the config says lm_head: true (AWQ,
    GPTQ)."""
    return ignored if told.flag("lm_head", False) else (*ignored, "lm_head")


def _grouped(told: QuantKeys, group: Any) -> tuple[Scales, int | None]:
    """Returns how scales are shared, and the inputs of a scale group (None: the whole row)."""
    if group == -1:
        return "channel", None
    told.one_of("group_size", group, GROUPS)
    return "group", group
