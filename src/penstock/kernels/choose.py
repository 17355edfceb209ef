"""choose: selects the implementation of each operation of a model. The result is one Ops object for
the layers.

A column is a package of implementations (`reference` in plain torch, `triton`). Its functions have
the operations' names. An operation has a list of candidates; the first that supports the device and
dtype is chosen. Knows columns by name, and imports one when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch

from penstock.errors import UsageError
from penstock.kernels.ops import OneRowOps, Ops, RowOps
from penstock.kernels.tunables import Tuned, with_values


@dataclass(slots=True, frozen=True)
class Candidate:
    """An implementation of one operation: its column, the devices and dtypes it supports, and the
    reason to choose it."""

    column: str  # package under penstock.kernels, `reference` or `triton`
    module: str  # folder and file in the column, such as `linear.linear_fp8`
    reason: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    least_gpu: tuple[int, int] = (0, 0)  # least compute capability of a GPU; (0, 0): any

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        if device.type not in self.devices or dtype not in self.dtypes:
            return False
        asks = device.type == "cuda" and self.least_gpu > (0, 0) and torch.cuda.is_available()
        return not asks or torch.cuda.get_device_capability(device) >= self.least_gpu

    def load(self, op: str) -> Any:
        return getattr(_module(self.column, self.module), op)


def _reference(module: str, reason: str = "plain torch: the only column") -> tuple[Candidate, ...]:
    return (Candidate("reference", module, reason),)


def _triton(module: str, reason: str) -> tuple[Candidate, ...]:
    """Returns the candidates of an operation: Triton on CUDA, plain torch on other devices."""
    fast = Candidate("triton", module, reason, devices=("cuda",))
    return (fast, Candidate("reference", module, "plain torch: Triton runs on CUDA alone"))


WIDENED = "plain torch: the weight is widened for each product"
INTEGERS = (
    "plain torch; on a CPU with VNNI eight bits a row are multiplied as integers, all else is"
    " widened"
)
PACKED = "plain torch; on a CPU with oneDNN weights are packed at load: 1.2 to 4.6 times F.linear"


def _linear() -> tuple[Candidate, ...]:
    """Returns the candidates of `linear` and `prepare_linear`. They are the same, since a weight
    must be prepared by the column that multiplies by it."""
    reason = "the library's products, and for 1 to 16 rows one that streams the weight once"
    streamed = Candidate(
        "triton", "linear.linear", reason, ("cuda",), (torch.bfloat16, torch.float16)
    )
    return (streamed, *_reference("linear.linear", PACKED))


def _linear_gated() -> tuple[Candidate, ...]:
    """Returns the candidates of `linear_gated`. The fused kernel uses TMA (bulk copies), which
    needs compute capability 9.0."""
    inside = "for many rows the gate inside the product, before its answer is written"
    fused = Candidate(
        "triton", "linear.linear_gated", inside, ("cuda",), (torch.bfloat16, torch.float16), (9, 0)
    )
    return (fused, *_reference("linear.linear", "none: the gate follows the product"))


def _fp8() -> tuple[Candidate, ...]:
    """Returns the candidates of the product with float8 weights, for dtypes that hold e4m3 numbers
    exactly.

    GPUs below compute capability 9.0 use plain torch, which widens the weight. They lack e4m3, or
    (8.9: L4, L40S) have 99 KB of shared memory per program, where the kernels' tiles need up to 164
    KB (scripts/compile_kernels.py)."""
    reason = "the library's float8 products, for 1 to 256 rows ones that stream the weight once"
    streamed = Candidate(
        "triton", "linear.linear_fp8", reason, ("cuda",), (torch.bfloat16, torch.float16), (9, 0)
    )
    return (streamed, *_reference("linear.fp8", WIDENED))


def _groups(module: str, reason: str) -> tuple[Candidate, ...]:
    """Returns the candidates of products with one scale per group of inputs: those that prepare the
    weight and those that multiply."""
    streams = (
        "for few rows a kernel that streams the weight once, for many the library behind a widening"
    )
    streamed = Candidate(
        "triton", "linear.linear_groups", streams, ("cuda",), (torch.bfloat16, torch.float16)
    )
    return (streamed, *_reference(module, reason))


def _fp4() -> tuple[Candidate, ...]:
    """Returns the candidates of products with weights in four-bit floats."""
    streams = (
        "one row in integers, few by a kernel that streams the weight once, many by the library"
        " behind a widening"
    )
    streamed = Candidate(
        "triton", "linear.linear_fp4", streams, ("cuda",), (torch.bfloat16, torch.float16)
    )
    return (streamed, *_reference("linear.linear_fp4", WIDENED))


def _experts() -> tuple[Candidate, ...]:
    """Returns the candidates of mixtures of experts."""
    reason = "rows sorted by expert on the device, and products of each expert's rows alone"
    grouped = Candidate("triton", "experts.moe", reason, ("cuda",), (torch.bfloat16, torch.float16))
    return (grouped, *_reference("experts.moe", "plain torch: expert by expert"))


# candidates of each operation, best first; the last one supports all devices and dtypes
CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "prepare_linear": _linear(),
    "linear": _linear(),
    "linear_gated": _linear_gated(),
    "prepare_linear_fp8": _fp8(),
    "linear_fp8": _fp8(),
    "prepare_linear_fp8_groups": _groups("linear.fp8_groups", WIDENED),
    "linear_fp8_groups": _groups("linear.fp8_groups", WIDENED),
    "prepare_linear_int": _groups("linear.linear_int", INTEGERS),
    "linear_int": _groups("linear.linear_int", INTEGERS),
    "prepare_linear_fp4": _fp4(),
    "linear_fp4": _fp4(),
    "quantize_rows": _triton("linear.fp8", "one launch"),
    "rms_norm": _triton("elementwise.norm", "one launch"),
    "add_rms_norm": _triton("elementwise.norm", "sum and norm in one launch"),
    "add_rms_norms": _triton("elementwise.norm", "sum and norms in one launch"),
    "add_normed": _triton("elementwise.norm", "norms, sum and scale in one launch"),
    "rotary_and_store": _triton(
        "attention.rotary_and_store", "norms, rotation and store in one launch"
    ),
    "silu_mul": _triton("elementwise.activation", "one launch"),
    "gelu_mul": _triton("elementwise.activation", "one launch"),
    "sigmoid_mul": _triton("elementwise.activation", "one launch"),
    "relu2": _triton("elementwise.activation", "one launch"),
    "add_opened": _triton("elementwise.activation", "product, sigmoid and sum in one launch"),
    "softcap": _reference("elementwise.activation"),
    "prepare_experts": _experts(),
    "experts": _experts(),
    "concurrent": (
        Candidate("triton", "concurrent", "in graphs, on a stream beside", devices=("cuda",)),
        *_reference("concurrent", "one launch after another"),
    ),
    "plan": _triton("attention.attention", "takes buffers once a step"),
    "attention": _triton(
        "attention.attention", "reads block tables on the device; a prefix once a group"
    ),
    "latent_store": (
        Candidate(
            "triton",
            "attention.latent_store",
            "norm, rotation and store in one launch",
            devices=("cuda",),
        ),
        *_reference("attention.latent", "plain torch: Triton runs on CUDA alone"),
    ),
    "latent_attention": _triton("attention.latent", "a vector is read once for scores and answers"),
    "short_conv": _triton(
        "recurrent.short_conv", "gates and taps in one launch of rows, two of chunks"
    ),
    "delta_rule": _triton("recurrent.delta_rule", "one launch of rows, six of chunks"),
    "mamba2": _triton("recurrent.mamba2", "one launch of rows, four of chunks"),
    "gated_norm": _triton("recurrent.mamba2", "one launch"),
    "embed": _triton("elementwise.embedding", "one launch"),
    "copy_blocks": _triton("attention.blocks", "all layers in one launch"),
    "sample": _triton("sampling.sample", "one pass over the logits; filters without a sort"),
    "token_logprobs": _triton("sampling.logprobs", "one read of each row"),
    "apply_bias": _reference("sampling.penalties"),
    "bar_ids": _reference("sampling.penalties"),
    "apply_penalties": _reference("sampling.penalties"),
}


def choose(
    device: torch.device, dtype: torch.dtype, kernels: str = "auto", tuned: Tuned | None = None
) -> Ops:
    """Returns the Ops for a device and dtype. kernels: `auto`, or the name of the one column to
    use.

    tuned: values of tunables (kernels/tunables.py). Raises ValueError if an operation has no
    candidate in the column for this dtype."""
    picked: dict[str, Any] = {}
    why: dict[str, tuple[str, str]] = {}
    for op in (
        f.name for f in fields(Ops) if f.name not in ("dtype", "one_row", "binaries", "why")
    ):
        candidate = _pick(op, device, dtype, kernels)
        picked[op] = with_values(op, candidate.column, candidate.load(op), tuned or {})
        why[op] = (candidate.column, "asked for" if kernels != "auto" else candidate.reason)
    compiled = any(column == "triton" for column, _ in why.values())
    binaries = _module("triton", "disk_cache").install() if compiled else None
    return Ops(dtype=dtype, **picked, one_row=_one_row(why), binaries=binaries, why=why)


def _one_row(why: dict[str, tuple[str, str]]) -> OneRowOps | None:
    """Returns the fused operations for steps of a single row, or None. They need products and
    attention to be Triton's. why: operation -> (column, reason)."""
    if {why["linear"][0], why["attention"][0]} != {"triton"}:
        return None
    products, attention = (
        _module("triton", "linear.one_row"),
        _module("triton", "attention.one_row_attention"),
    )
    return OneRowOps(products.norm_qkv, attention.rotate_and_attend_one, products.norm_gate)


def _module(column: str, module: str) -> Any:
    """Imports a module of a column. Raises UsageError if a package that it needs is missing or
    fails to load."""
    try:
        return import_module(f"penstock.kernels.{column}.{module}")
    except ImportError as error:
        name = error.name or column
        if name.startswith("penstock"):
            raise
        lacks = f"which isn't installed: pip install {name}"
        if not isinstance(error, ModuleNotFoundError):
            lacks = (
                f"which cannot be loaded ({(str(error).splitlines() or ['no reason given'])[0]}):"
                " mend it"
            )
        raise UsageError(
            f"the GPU's kernels need {name}, {lacks}, or run slower without it by --kernels"
            " reference, or on the CPU by --device cpu",
            param="kernels",
        ) from error


def _pick(op: str, device: torch.device, dtype: torch.dtype, kernels: str) -> Candidate:
    for candidate in CANDIDATES[op]:
        if kernels in ("auto", candidate.column) and candidate.serves(device, dtype):
            return candidate
    raise ValueError(f"no kernel for {op} on {device.type} in {dtype} with kernels={kernels!r}")


# RowOps' operations -> their modules, which every column has
_ROW_OPS = {
    "join": "sampling.row_state",
    "grow": "sampling.row_state",
    "take_drafts": "sampling.row_state",
    "prepare": "sampling.row_state",
    "advance": "sampling.advance",
    "draft_ngrams": "sampling.ngrams",
    "adjust": "sampling.penalties",
    "sample_rows": "sampling.sample",
    "logprobs_rows": "sampling.logprobs",
}


def widens_fp8(ops: Ops) -> bool:
    """Returns True if float8 weights are widened for each product, which is slower
    than bfloat16."""
    return ops.why["linear_fp8"][0] == "reference"


def widens_fp4(ops: Ops) -> bool:
    """Returns True if weights in four-bit floats are widened for each product."""
    return ops.why["linear_fp4"][0] == "reference"


def choose_rows(ops: Ops) -> RowOps:
    """Returns the operations on per-row arrays (RowOps). They are of the same column as attention,
    which reads these arrays too."""
    column = ops.why["attention"][0]

    def load(module: str, name: str) -> Any:
        return getattr(_module(column, module), name)

    return RowOps(
        **{name: load(module, name) for name, module in _ROW_OPS.items()},
        sample_scratch=load("sampling.sample", "SampleScratch").allocate,
        block_copier=load("attention.blocks", "BlockCopier"),
        compiled=column == "triton",
    )
