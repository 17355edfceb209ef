"""read_compressed: reads compressed-tensors' (llm-compressor's) `quantization_config` and returns a
StoredQuantization. No torch."""

from __future__ import annotations

from typing import Any, cast

from penstock.errors import CheckpointError
from penstock.json_keys import shown
from penstock.kernels.fp4_groups import MX_GROUP, NV_GROUP
from penstock.quant.quant_keys import INSTEAD, REFUSED, QuantKeys
from penstock.quant.stored_quantization import Kind, Scales, StoredForm, StoredQuantization, Targets

BLOCK = 128
GROUPS = (32, 64, 128)
# four-bit floats: format -> kind, strategy of scales, inputs that share a scale, dtype of scales
FP4: dict[str, tuple[Kind, str, int, str]] = {
    "nvfp4-pack-quantized": ("nvfp4", "tensor_group", NV_GROUP, "float8_e4m3fn"),
    "mxfp4-pack-quantized": ("mxfp4", "group", MX_GROUP, "uint8"),
}


def read_compressed(told: QuantKeys) -> StoredQuantization:
    """Returns the quantization that compressed-tensors' `quantization_config` declares."""
    told.skip("quantization_status", "global_compression_ratio", "version")
    form_name = told.text("format", "")
    sparse = told.take("sparsity_config", {})
    if isinstance(sparse, dict) and sparse.get("format", "dense") != "dense":
        raise told.fail(
            f"sparsity_config {shown(sparse.get('format'))} is not read: take a dense checkpoint"
        )
    groups = told.take("config_groups", {})
    if not isinstance(groups, dict) or not groups:
        raise told.fail(
            "config_groups has no group that says how matrices are stored: take the complete"
            " config.json"
        )
    targets = tuple(
        _group(group, f"{told.where}: config_groups {shown(name)}", form_name)
        for name, group in groups.items()
    )
    return StoredQuantization(
        "compressed-tensors", targets, told.names("ignore"), kv=told.take("kv_cache_scheme", None)
    )


def _group(raw: Any, where: str, form_name: str) -> Targets:
    """Reads one entry of config_groups: how weights are stored, and for which matrices. where: its
    place in the file, for errors. form_name: the checkpoint's or the entry's format."""
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: must be an object, not {shown(raw)}")
    told = QuantKeys(raw, where)
    own = told.text("format", "") or form_name
    weights = told.take("weights", None)
    if not isinstance(weights, dict):
        raise told.fail(f"weights must be an object, not {shown(weights)}: {INSTEAD}")
    form = _form(QuantKeys(weights, f"{where} weights"), own)
    narrow = _narrow_rows(told, told.take("input_activations", None), form)
    if told.take("output_activations", None) is not None:
        raise told.fail(f"output_activations are not rounded here: {INSTEAD}")
    named = told.names("targets")
    told.refuse_rest()
    return Targets(named, form, narrow)


def _narrow_rows(told: QuantKeys, raw: Any, form: StoredForm) -> bool:
    """Returns True if the checkpoint wants four-bit activations. raw: its `input_activations`.

    Eight-bit activations are accepted, but the checkpoint's static scales for them are not used:
    the engine gives each row of activations its own scale if the product takes float8 rows, and
    otherwise doesn't quantize activations. Both are more precise than a static scale. Four-bit
    float activations are accepted only beside four-bit float weights; the engine doesn't quantize
    activations to four bits."""
    if raw is None:
        return False
    bits = raw.get("num_bits", 8) if isinstance(raw, dict) else None
    if bits == 4 and form.kind in ("nvfp4", "mxfp4") and raw.get("type") == "float":
        return True
    if bits != 8:
        raise told.fail(
            f"input_activations {shown(raw)} are not served, only such of 8 bits: {INSTEAD}"
        )
    return False


def _form(told: QuantKeys, form_name: str) -> StoredForm:
    """Reads an entry's `weights`: how a matrix is stored."""
    if form_name in REFUSED:
        raise told.fail(f"format {form_name!r} is not read: {REFUSED[form_name]}")
    known = ("float-quantized", "naive-quantized", "pack-quantized", "int-quantized", *FP4)
    told.one_of("format", form_name, known)
    bits, numbers = told.count("num_bits", 8), told.text("type", "int")
    strategy = told.text(
        "strategy", "group" if told.rest.get("group_size") not in (None, -1) else "tensor"
    )
    symmetric, group, block = (
        told.flag("symmetric", True),
        told.take("group_size", None),
        told.take("block_structure", None),
    )
    if told.take("actorder", None) not in (None, False, "weight", "static"):
        raise told.fail("actorder 'group' (act-order) is not read: take a checkpoint without it")
    if told.flag("dynamic", False):
        raise told.fail(f"weights are dynamic, and so not stored: {INSTEAD}")
    told.skip("observer", "observer_kwargs", "zp_dtype")
    scale_dtype = told.text("scale_dtype", "").removeprefix("torch.")
    told.refuse_rest()
    if form_name in FP4:
        return _fp4_form(told, form_name, (numbers, bits, symmetric), strategy, group, scale_dtype)
    if numbers == "float":
        told.one_of("num_bits", bits, (8,))
        told.one_of("format", form_name, ("float-quantized", "naive-quantized"))
        return _float_form(told, strategy, symmetric, block)
    told.one_of("type", numbers, ("int",))
    return _int_form(told, form_name, bits, strategy, symmetric, group)


def _fp4_form(
    told: QuantKeys,
    form_name: str,
    number: tuple[str, int, bool],
    strategy: str,
    group: Any,
    scale_dtype: str,
) -> StoredForm:
    """Returns how NVFP4 or MXFP4 matrices are stored; checks that the keys say so."""
    kind, goes, neighbours, dtype = FP4[form_name]
    if number != ("float", 4, True):
        raise told.fail(
            f"{form_name} holds symmetric floats of 4 bits, and these are told to be others:"
            f" {INSTEAD}"
        )
    # Four-bit floats with group scales but without a global scale are supported only if the scales
    # are powers of two (MXFP4).
    told.one_of("strategy", strategy, (goes,))
    told.one_of("group_size", group, (neighbours,))
    told.one_of("scale_dtype", scale_dtype, ("", dtype))
    return StoredForm(kind, "group", neighbours, packing="packed")


def _float_form(told: QuantKeys, strategy: str, symmetric: bool, block: Any) -> StoredForm:
    """Returns how float8 matrices are stored. strategy: of scales. block: block_structure."""
    told.one_of("strategy", strategy, ("channel", "tensor", "block"))
    if not symmetric:
        raise told.fail(f"float8 with zero points is not read: {INSTEAD}")
    if strategy == "block" and block != [BLOCK, BLOCK]:
        raise told.fail(f"block_structure {shown(block)} is not read, only [128, 128]: {INSTEAD}")
    return StoredForm("fp8", cast(Scales, strategy), BLOCK if strategy == "block" else None)


def _int_form(
    told: QuantKeys, form_name: str, bits: int, strategy: str, symmetric: bool, group: Any
) -> StoredForm:
    """Returns how integer matrices are stored. strategy: of scales. group: group_size."""
    packed = form_name == "pack-quantized"
    told.one_of("num_bits", bits, (4, 8) if packed else (8,))
    told.one_of("format", form_name, ("pack-quantized", "int-quantized", "naive-quantized"))
    told.one_of(
        "strategy", strategy, ("group", "channel") if packed else ("group", "channel", "tensor")
    )
    if strategy == "group":
        told.one_of("group_size", group, GROUPS)
    kind: Kind = "int4" if bits == 4 else "int8"
    size = group if strategy == "group" else None
    return StoredForm(
        kind, cast(Scales, strategy), size, not symmetric, "packed" if packed else "plain"
    )
