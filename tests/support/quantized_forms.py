"""Quantized matrices as checkpoints store them, written by hand from each format's published
description, and what they are worth: plain loops over numbers and words, none of the product's own
packing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, from its lowest four bits up
# tensors by suffix; what the matrix is worth [out, in] float32
Stored = tuple[dict[str, Tensor], Tensor]


def words(numbers: Tensor, bits: int) -> Tensor:
    """numbers [rows, n] of so many bits -> [rows, n * bits / 32] int32, the first in the lowest
    bits."""
    each = 32 // bits
    short = -numbers.shape[1] % each
    padded = torch.nn.functional.pad(numbers.long(), (0, short))
    packed = torch.zeros(padded.shape[0], padded.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        packed |= padded[:, place::each] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def drawn(
    out: int, into: int, groups: int, bits: int, seed: int, scales: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned numbers [out, into], scales and unsigned zeros [out, groups]."""
    rng = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (out, into), generator=rng)
    zeros = torch.randint(1, 2**bits, (out, groups), generator=rng)
    scale = (torch.rand(out, groups, generator=rng) * 0.02 + 0.001).to(scales)
    return numbers, scale, zeros


def worth(numbers: Tensor, scale: Tensor, zeros: Tensor | int) -> Tensor:
    """(number - zero) * scale, group by group."""
    groups = scale.shape[1]
    split = numbers.float().reshape(numbers.shape[0], groups, -1)
    nothing = zeros.float()[..., None] if isinstance(zeros, Tensor) else float(zeros)
    return ((split - nothing) * scale.float()[..., None]).reshape(numbers.shape)


def awq(out: int, into: int, group: int, seed: int, zeros: bool = True) -> Stored:
    numbers, scale, nothing = drawn(out, into, into // group, 4, seed, torch.float16)

    def packed(columns: Tensor) -> Tensor:  # [rows, out]
        shuffled = columns.reshape(columns.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].reshape(
            columns.shape
        )
        return words(shuffled, 4)

    stored = {"qweight": packed(numbers.T), "scales": scale.T.contiguous()}
    if not zeros:
        return stored, worth(numbers, scale, 8)
    return stored | {"qzeros": packed(nothing.T)}, worth(numbers, scale, nothing)


def gptq(
    out: int, into: int, group: int, seed: int, bits: int = 4, sym: bool = False, v2: bool = False
) -> Stored:
    numbers, scale, nothing = drawn(out, into, into // group, bits, seed, torch.float16)
    if sym:
        nothing = torch.full_like(nothing, 2 ** (bits - 1))
    stored = {
        "qweight": words(numbers, bits).T.contiguous(),
        "qzeros": words((nothing if v2 else nothing - 1).T, bits),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(into) // group).to(torch.int32),
    }
    return stored, worth(numbers, scale, nothing)


def packed(
    out: int, into: int, group: int, seed: int, bits: int = 4, symmetric: bool = True
) -> Stored:
    numbers, scale, nothing = drawn(out, into, into // group, bits, seed, torch.bfloat16)
    stored = {
        "weight_packed": words(numbers, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([out, into]),
    }
    if symmetric:
        return stored, worth(numbers, scale, 2 ** (bits - 1))
    return stored | {"weight_zero_point": words(nothing.T, bits).T.contiguous()}, worth(
        numbers, scale, nothing
    )


def plain_int8(out: int, into: int, group: int, seed: int, symmetric: bool = True) -> Stored:
    numbers, scale, nothing = drawn(out, into, into // group, 8, seed, torch.bfloat16)
    stored = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scale}
    if symmetric:
        return stored, worth(numbers, scale, 128)
    return stored | {"weight_zero_point": (nothing - 128).to(torch.int8)}, worth(
        numbers, scale, nothing
    )


def fp8_blocks(out: int, into: int, seed: int, suffix: str) -> Stored:
    rng = torch.Generator().manual_seed(seed)
    numbers = torch.randn(out, into, generator=rng).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-out // 128), -(-into // 128), generator=rng) * 1e-3 + 1e-4
    whole = torch.empty(out, into)
    for row in range(0, out, 128):
        for column in range(0, into, 128):
            block = numbers[row : row + 128, column : column + 128].float()
            whole[row : row + 128, column : column + 128] = block * scale[row // 128, column // 128]
    return {"weight": numbers, suffix: scale}, whole


def fp8_rows(out: int, into: int, seed: int, by: str) -> Stored:
    matrix = torch.randn(out, into, generator=torch.Generator().manual_seed(seed))
    most = matrix.abs().amax(1, keepdim=True) if by == "channel" else matrix.abs().max().view(1)
    scale = (most / 448.0).to(torch.bfloat16)
    numbers = (matrix / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {
        "weight": numbers,
        "weight_scale": scale,
        "input_scale": torch.ones(1),
    }, numbers.float() * scale.float()


def fp8_one(out: int, into: int, seed: int, scale: str, activations: str) -> Stored:
    """One scale of no dimension, and one of activations, which isn't used."""
    stored, whole = fp8_rows(out, into, seed, "tensor")
    return {
        "weight": stored["weight"],
        scale: stored["weight_scale"].float()[0],
        activations: torch.tensor(9.0),
    }, whole


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def four_bit_floats(out: int, into: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bytes of two numbers, the first in the lower half [out, into / 2], and what they say [out,
    into]."""
    octets = torch.randint(
        0, 256, (out, into // 2), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    said = [
        [E2M1[half] for octet in row for half in (octet % 16, octet // 16)]
        for row in octets.tolist()
    ]
    return octets, torch.tensor(said)


def nvfp4(out: int, into: int, seed: int, modelopt: bool = False) -> Stored:
    """A whole's scale that divides, or ModelOpt's, which multiplies; and one of activations, which
    isn't used."""
    octets, numbers = four_bit_floats(out, into, seed)
    draw = torch.Generator().manual_seed(seed + 1000)
    scale = (torch.rand(out, into // 16, generator=draw) * 447 + 1).to(torch.float8_e4m3fn)
    whole = torch.rand(1, generator=draw) * 5e3 + 1e4
    if modelopt:
        whole, unused = 1 / whole[0], torch.tensor(0.03)
        scales = scale.float() * whole
        stored = {
            "weight": octets,
            "weight_scale": scale,
            "weight_scale_2": whole,
            "input_scale": unused,
        }
    else:
        scales = scale.float() / whole
        stored = {"weight_packed": octets, "weight_scale": scale, "weight_global_scale": whole}
        stored["input_global_scale"] = torch.tensor([300.0])
    return stored, (numbers.unflatten(1, (-1, 16)) * scales[..., None]).flatten(1)


def mxfp4(out: int, into: int, seed: int) -> Stored:
    octets, numbers = four_bit_floats(out, into, seed)
    draw = torch.Generator().manual_seed(seed + 1000)
    powers = torch.randint(110, 126, (out, into // 32), generator=draw, dtype=torch.uint8)
    scales = torch.tensor([[2.0 ** (power - 127) for power in row] for row in powers.tolist()])
    worth = (numbers.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1)
    return {"weight_packed": octets, "weight_scale": powers}, worth


def compressed(weights: dict[str, object], form: str, **more: object) -> dict[str, object]:
    """compressed-tensors' quantization_config with one group of all matrices but the head."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        **more,
    }


def ints(bits: int, group: int | None, symmetric: bool = True) -> dict[str, object]:
    """compressed-tensors' words for integer weights."""
    strategy = "channel" if group is None else "group"
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "group_size": group or -1,
        "symmetric": symmetric,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "block_structure": None,
    }


def floats(strategy: str) -> dict[str, object]:
    """compressed-tensors' words for float8 weights."""
    block = [128, 128] if strategy == "block" else None
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": block,
    }


def fours(group: int, **more: object) -> dict[str, object]:
    """compressed-tensors' words for weights in four-bit floats: NVFP4's for groups of 16, else
    MXFP4's."""
    strategy, dtype = (
        ("tensor_group", "torch.float8_e4m3fn") if group == 16 else ("group", "torch.uint8")
    )
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": group,
        "block_structure": None,
        "scale_dtype": dtype,
        "zp_dtype": None,
        **more,
    }


NARROW_ROWS = {"input_activations": fours(16, dynamic="local", observer="static_minmax")}
# What ModelOpt writes: config.json's form, and the one of hf_quant_config.json, which config.json
# may hold too.
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt"},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": False,
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
            },
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
}
HF_QUANT = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "*.mlp.gate"],
    },
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True, "damp_percent": 0.01}
HF_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "fmt": "e4m3",
}
HF_ONE = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "weight_block_size": None,
    "dequantize": False,
}
AUTO = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
TOKENS = {
    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
}

# name -> quantization_config, and out, into, seed -> what lies on disk of a matrix
FORMS: dict[str, tuple[dict[str, object], Callable[[int, int, int], Stored]]] = {
    "fp8 channel": (
        compressed(floats("channel"), "float-quantized"),
        lambda n, k, s: fp8_rows(n, k, s, "channel"),
    ),
    "fp8 tensor": (
        compressed(floats("tensor"), "float-quantized"),
        lambda n, k, s: fp8_rows(n, k, s, "tensor"),
    ),
    "fp8 naive": (
        compressed(floats("channel"), "naive-quantized"),
        lambda n, k, s: fp8_rows(n, k, s, "channel"),
    ),
    "fp8 block": (
        compressed(floats("block"), "float-quantized"),
        lambda n, k, s: fp8_blocks(n, k, s, "weight_scale"),
    ),
    "hf fp8": (HF_FP8, lambda n, k, s: fp8_blocks(n, k, s, "weight_scale_inv")),
    "hf fp8 one scale": (
        HF_ONE,
        lambda n, k, s: fp8_one(n, k, s, "weight_scale_inv", "activation_scale"),
    ),
    "autofp8": (AUTO, lambda n, k, s: fp8_one(n, k, s, "weight_scale", "input_scale")),
    "awq 32": ({**AWQ, "group_size": 32}, lambda n, k, s: awq(n, k, 32, s)),
    "awq 64 sym": (
        {**AWQ, "q_group_size": 64, "zero_point": False},
        lambda n, k, s: awq(n, k, 64, s, False),
    ),
    "gptq 64 sym": ({**GPTQ, "group_size": 64}, lambda n, k, s: gptq(n, k, 64, s, sym=True)),
    "gptq 32": ({**GPTQ, "group_size": 32, "sym": False}, lambda n, k, s: gptq(n, k, 32, s)),
    "gptq v2": (
        {**GPTQ, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda n, k, s: gptq(n, k, 32, s, v2=True),
    ),
    "gptq 8 rows": (
        {**GPTQ, "bits": 8, "group_size": -1},
        lambda n, k, s: gptq(n, k, k, s, bits=8, sym=True),
    ),
    "gptq 8 zeros": (
        {**GPTQ, "bits": 8, "group_size": 32, "sym": False},
        lambda n, k, s: gptq(n, k, 32, s, bits=8),
    ),
    "packed 4": (compressed(ints(4, 32), "pack-quantized"), lambda n, k, s: packed(n, k, 32, s)),
    "packed 4 zeros": (
        compressed(ints(4, 64, False), "pack-quantized"),
        lambda n, k, s: packed(n, k, 64, s, symmetric=False),
    ),
    "packed 4 rows": (
        compressed(ints(4, None), "pack-quantized"),
        lambda n, k, s: packed(n, k, k, s),
    ),
    "packed 8": (
        compressed(ints(8, 32), "pack-quantized"),
        lambda n, k, s: packed(n, k, 32, s, bits=8),
    ),
    "packed 8 zeros": (
        compressed(ints(8, None, False), "pack-quantized"),
        lambda n, k, s: packed(n, k, k, s, bits=8, symmetric=False),
    ),
    "nvfp4": (compressed(fours(16), "nvfp4-pack-quantized"), nvfp4),
    "nvfp4 rows": (
        compressed(
            fours(16),
            "nvfp4-pack-quantized",
            config_groups={"group_0": {"targets": ["Linear"], "weights": fours(16), **NARROW_ROWS}},
        ),
        nvfp4,
    ),
    "mxfp4": (compressed(fours(32), "mxfp4-pack-quantized"), mxfp4),
    "modelopt": (MODELOPT, lambda n, k, s: nvfp4(n, k, s, True)),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        lambda n, k, s: fp8_one(n, k, s, "weight_scale", "input_scale"),
    ),
    "modelopt nested": (
        {**HF_QUANT, "quant_method": "modelopt"},
        lambda n, k, s: nvfp4(n, k, s, True),
    ),
    "int8": (compressed(ints(8, None), "int-quantized"), lambda n, k, s: plain_int8(n, k, k, s)),
    "int8 zeros": (
        compressed(ints(8, None, False), "int-quantized"),
        lambda n, k, s: plain_int8(n, k, k, s, symmetric=False),
    ),
}
