"""Quantizes matrices to compressed-tensors' formats, for writing checkpoints. Also makes the
`quantization_config` of config.json.

  fp8     float-quantized: `weight` e4m3, `weight_scale` [out, 1]; activations get dynamic scales
  int8    pack-quantized: `weight_packed` int32 [out, in / 4], `weight_scale` [out, 1],
          `weight_shape`
  int4    pack-quantized: `weight_packed` int32 [out, in / 8], `weight_scale` [out, in / group],
          `weight_shape`
  nvfp4   nvfp4-pack-quantized: `weight_packed` uint8 [out, in / 2], `weight_scale` e4m3 [out, in /
          16], `weight_global_scale` [1]

The result equals what `--quantization` makes at load, except for int4 that is rounded with
calibration inputs, and for nvfp4 matrices that share a global scale. vLLM and transformers read
these formats too. Knows matrices; no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.kernels.fp4_groups import NV_GROUP
from penstock.kernels.fp8_rows import E4M3
from penstock.quant.fp4 import to_nvfp4
from penstock.quant.fp8 import to_fp8
from penstock.quant.integers import to_int
from penstock.quant.rounding import round_to_products

MadeKind = Literal["fp8", "int8", "int4", "nvfp4"]
_BITS: dict[MadeKind, int] = {"fp8": 8, "int8": 8, "int4": 4, "nvfp4": 4}
_FORMATS: dict[MadeKind, str] = {"fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}


def store(
    matrix: Tensor,
    kind: MadeKind,
    group: int,
    dtype: torch.dtype | None = None,
    moments: Tensor | None = None,
    most: Tensor | None = None,
) -> dict[str, Tensor]:
    """Quantizes a matrix. Returns the tensors that a checkpoint stores for it, by the suffix of
    their names.

    matrix: [out, in] in a float dtype. group: inputs that share an int4 scale. dtype: dtype of int4
    and int8 scales; None: the matrix's. moments: mean of x x^T over calibration inputs x, [in, in],
    for rounding int4 (`rounding.py`); None: round to nearest. most: for nvfp4, the largest
    magnitude of all matrices that share the global scale; None: the matrix's own."""
    if kind == "fp8":
        numbers, scale = to_fp8(matrix)
        return {"weight": numbers, "weight_scale": scale}
    if kind == "nvfp4":
        numbers, scale, divisor = to_nvfp4(matrix, most)
        packed = numbers[:, ::2] | numbers[:, 1::2] << 4
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
    bits, dtype = _BITS[kind], dtype or matrix.dtype
    if moments is not None and kind == "int4":
        numbers, scale = round_to_products(matrix, moments, bits, group, dtype)
    else:
        numbers, scale = to_int(matrix, bits, group if kind == "int4" else matrix.shape[1], dtype)
    shape = torch.tensor(matrix.shape, dtype=torch.int64)
    return {
        "weight_packed": pack_int32(numbers, bits),
        "weight_scale": scale,
        "weight_shape": shape,
    }


def pack_int32(numbers: Tensor, bits: int) -> Tensor:
    """Packs signed integers [out, in] int8 of `bits` bits into int32 words [out, in * bits / 32].
    Half of the range is added to each number to make it unsigned. The first number is in a word's
    lowest bits; the last word is padded with 0."""
    each = 32 // bits
    short = -numbers.shape[1] % each
    above = torch.nn.functional.pad(numbers.to(torch.int64) + 2 ** (bits - 1), (0, short))
    places = torch.arange(each, dtype=torch.int64, device=numbers.device) * bits
    packed = (above.view(numbers.shape[0], -1, each) << places).sum(2)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def told_in_config(
    kind: MadeKind, group: int, ignored: Sequence[str], others: Mapping[str, MadeKind]
) -> dict[str, Any]:
    """Returns config.json's `quantization_config`. group: inputs that share an int4 scale. ignored:
    names of unquantized matrices. others: name of a matrix -> its kind, if it differs from `kind`.
    """
    each = [([name], other) for name, other in others.items()] + [(["Linear"], kind)]
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS.get(kind, "pack-quantized"),
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {
            f"group_{n}": _group(targets, kind, group) for n, (targets, kind) in enumerate(each)
        },
    }


def _group(targets: list[str], kind: MadeKind, group: int) -> dict[str, Any]:
    """Returns an entry of config_groups. targets: names of matrices or classes."""
    weights: dict[str, Any] = {
        "num_bits": _BITS[kind],
        "type": "float" if kind in _FORMATS else "int",
    }
    strategies = {"int4": "group", "nvfp4": "tensor_group"}
    weights |= {"symmetric": True, "dynamic": False, "strategy": strategies.get(kind, "channel")}
    weights |= {"group_size": group} if kind == "int4" else {}
    weights |= {"group_size": NV_GROUP, "scale_dtype": str(E4M3)} if kind == "nvfp4" else {}
    rows = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": rows if kind == "fp8" else None,
    }
