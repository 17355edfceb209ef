"""choose: picks a column for each operation -> one Ops object that is handed to the layers.

A column is a package of functions with the operations' names; an operation takes the first of its candidates that can
serve the device and dtype. It knows columns by name only and imports one when it is picked.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch

from penstock.kernels.ops import Ops


@dataclass(slots=True, frozen=True)
class Candidate:
    """A column's form of one operation, where it can run, and why one would take it."""

    column: str  # package under penstock.kernels
    module: str
    reason: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type in self.devices and dtype in self.dtypes

    def load(self, op: str) -> Any:
        return getattr(import_module(f"penstock.kernels.{self.column}.{self.module}"), op)


def _reference(module: str, reason: str = "plain torch: the only column yet") -> tuple[Candidate, ...]:
    return (Candidate("reference", module, reason),)


PACKED = "plain torch; on a CPU with oneDNN weights are packed at load: 1.2 to 4.6 times F.linear"

# Each operation's candidates, the best first. The last one serves everything.
CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "prepare_linear": _reference("linear", PACKED),
    "linear": _reference("linear", PACKED),
    "rms_norm": _reference("norm"),
    "add_rms_norm": _reference("norm"),
    "rotary_and_store": _reference("rotary"),
    "silu_mul": _reference("activation"),
    "attention": _reference("attention"),
    "embed": _reference("embedding"),
    "copy_blocks": _reference("blocks"),
    "sample": _reference("sample"),
    "token_logprobs": _reference("logprobs"),
    "apply_bias": _reference("penalties"),
    "bar_ids": _reference("penalties"),
    "apply_penalties": _reference("penalties"),
}


def choose(device: torch.device, dtype: torch.dtype, kernels: str = "auto") -> Ops:
    """Fills an Ops for a device and dtype. `kernels`: `auto`, or the name of the one column to take everywhere.

    Raises ValueError for a column or dtype that no candidate serves.
    """
    picked: dict[str, Any] = {}
    why: dict[str, tuple[str, str]] = {}
    for op in (f.name for f in fields(Ops) if f.name != "why"):
        candidate = _pick(op, device, dtype, kernels)
        picked[op] = candidate.load(op)
        why[op] = (candidate.column, "asked for" if kernels != "auto" else candidate.reason)
    return Ops(**picked, why=why)


def _pick(op: str, device: torch.device, dtype: torch.dtype, kernels: str) -> Candidate:
    for candidate in CANDIDATES[op]:
        if kernels in ("auto", candidate.column) and candidate.serves(device, dtype):
            return candidate
    raise ValueError(f"no kernel for {op} on {device.type} in {dtype} with kernels={kernels!r}")
