"""read_modelopt: reads NVIDIA ModelOpt's quantization config and returns a StoredQuantization. No
torch.

  config.json            quantization_config: quant_algo, ignore, kv_cache_scheme, config_groups,
                         quantized_layers
  hf_quant_config.json   quantization: quant_algo, exclude_modules, kv_cache_quant_algo,
                         quantized_layers

Both files have the same content; older folders have only the second (modelopt's
`convert_hf_quant_config_format`)."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import shown
from penstock.kernels.fp4_groups import NV_GROUP
from penstock.quant.quant_keys import QuantKeys
from penstock.quant.stored_quantization import StoredForm, StoredQuantization, Targets

_NVFP4 = StoredForm("nvfp4", "group", NV_GROUP, packing="modelopt")
# quant_algo -> (how a matrix is stored, True if it wants four-bit activations too)
ALGORITHMS = {
    "NVFP4": (_NVFP4, True),
    "W4A16_NVFP4": (_NVFP4, False),
    "FP8": (StoredForm("fp8", "tensor"), False),
}
MIXED = "MIXED_PRECISION"
_INSTEAD = "take the model's unquantized checkpoint, or an fp8, NVFP4 or int4 one"
_PAST = ("producer", "version", "quant_method", "lora_rank", "smoothquant_alpha")


def read_modelopt(told: QuantKeys) -> StoredQuantization:
    inner = told.object("quantization", None)
    # a nested `quantization` object, as in hf_quant_config.json; config.json may have it too
    if inner is not None:
        told.skip(*_PAST)
        told.refuse_rest()
        told = QuantKeys(inner, f"{told.where} quantization")
    told.skip(*_PAST)
    algorithm = told.one_of(
        "quant_algo", told.text("quant_algo", "").upper(), (*ALGORITHMS, MIXED), _INSTEAD
    )
    _check_groups(told)
    layers = told.take("quantized_layers", {})
    if not isinstance(layers, dict) or (algorithm == MIXED) != bool(layers):
        raise told.fail(
            f"quantized_layers must name matrices, of quant_algo {MIXED} alone, and is"
            f" {shown(layers)}"
        )
    targets = _mixed(told, layers) if layers else (Targets(("Linear",), *ALGORITHMS[algorithm]),)
    ignored, kv = told.names("ignore", "exclude_modules"), _kv(told)
    told.refuse_rest()
    return StoredQuantization("modelopt", targets, ignored, by_part=True, kv=kv)


def _mixed(told: QuantKeys, layers: dict[str, Any]) -> tuple[Targets, ...]:
    """Reads quantized_layers: names and the algorithm of each. A name is a matrix, or a module of
    several matrices. Returns a Targets for each algorithm."""
    names: dict[str, list[str]] = {}
    for name, raw in layers.items():
        if not isinstance(raw, dict):
            raise told.fail(f"quantized_layers {shown(name)} must be an object, not {shown(raw)}")
        layer = QuantKeys(raw, f"{told.where} quantized_layers {shown(name)}")
        algorithm = layer.one_of(
            "quant_algo", layer.text("quant_algo", "").upper(), ALGORITHMS, _INSTEAD
        )
        _check_group(layer, algorithm)
        layer.refuse_rest()
        names.setdefault(algorithm, []).append(name)
    return tuple(Targets(frozenset(named), *ALGORITHMS[each]) for each, named in names.items())


def _check_groups(told: QuantKeys) -> None:
    """Raises an error unless config_groups, which repeats quant_algo in compressed-tensors' keys,
    agrees with it."""
    _check_group(told, "")
    groups = told.object("config_groups", {})
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise told.fail(
                f"config_groups {shown(name)} must say what its weights are, not {shown(group)}"
            )
        if weights.get("num_bits") == 4:
            _check_group(
                QuantKeys(weights, f"{told.where} config_groups {shown(name)} weights"), "NVFP4"
            )


def _check_group(told: QuantKeys, algorithm: str) -> None:
    """Checks that group_size is the algorithm's. Some writers store 0 or null for a matrix with one
    scale."""
    group = told.take("group_size", NV_GROUP)
    told.one_of(
        "group_size", group, (NV_GROUP,) if "NVFP4" in algorithm else (NV_GROUP, 0), _INSTEAD
    )


def _kv(told: QuantKeys) -> Any:
    """Returns the KV cache's scheme, in compressed-tensors' form; None: none is declared."""
    algorithm = told.take("kv_cache_quant_algo", None)
    if algorithm is not None:
        wide = "set it to null to have KV in the model's numbers"
        told.one_of("kv_cache_quant_algo", algorithm, ("FP8",), wide)
        return {"num_bits": 8, "type": "float"}
    return told.take("kv_cache_scheme", None)
