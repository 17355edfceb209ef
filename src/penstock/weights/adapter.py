"""Adapter: a LoRA adapter, merged into matrices at load. It is read in peft's format.

  W + scale * B A      scale: alpha / r, with rslora alpha / sqrt(r) arXiv:2106.09685, rslora:
                       arXiv:2312.03732

Merged in float32, before any rounding or quantizing. An adapter with a peft option that would give
other numbers is refused, with an error that names the option. Knows names and matrices; no layers.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.json_keys import read_json, shown
from penstock.weights.checkpoint import Entry, read_header, read_tensors

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
LARGEST = torch.finfo(torch.float32).max
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_MERGED = (
    "merge it by peft (merge_and_unload, then save_pretrained), and give that folder as the model"
)
# Keys of adapter_config.json that are read here or don't affect the numbers. Any other key must be
# null, false or empty.
_KNOWN = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "init_lora_weights",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "base_model_name_or_path",
        "revision",
        "auto_mapping",
        "inference_mode",
        "lora_dropout",
        "task_type",
        "peft_version",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "eva_config",
    }
)
# Values of init_lora_weights that are accepted. Other initialisations change the base model's
# matrices too.
_SOUND_STARTS = (
    None,
    True,
    False,
    "gaussian",
    "eva",
    "orthogonal",
)


@dataclass(slots=True)
class Adapter:
    """A LoRA adapter. pairs: checkpoint tensor's name -> (A [r, in], B [out, r], scale), in
    float32."""

    folder: Path
    pairs: dict[str, tuple[Tensor, Tensor, float]]

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Reads an adapter folder. Raises CheckpointError if it is no LoRA, is incomplete, or needs
        something that isn't served."""
        told = _read_config(folder / ADAPTER_CONFIG)
        if not (folder / ADAPTER_FILE).is_file():
            pickled = (
                "; adapter_model.bin is pickle, which can run code, and isn't read"
                * (folder / "adapter_model.bin").exists()
            )
            raise CheckpointError(
                f"{folder} lacks {ADAPTER_FILE}{pickled}: save the adapter as safetensors"
            )
        halves: dict[str, dict[str, Tensor]] = {}
        for entry, tensor in read_tensors(read_header(folder / ADAPTER_FILE)):
            found = _NAME.fullmatch(entry.name)
            if found is None:
                raise CheckpointError(
                    f"{folder / ADAPTER_FILE} holds {shown(entry.name)}, which is no matrix of"
                    f" LoRA's: {_MERGED}"
                )
            if (
                tensor.dim() != 2
                or not tensor.is_floating_point()
                or not tensor.float().isfinite().all()
            ):
                raise CheckpointError(
                    f"{folder / ADAPTER_FILE}: {shown(entry.name)} is no matrix of finite numbers"
                )
            halves.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor.float().clone()
        if not halves:
            raise CheckpointError(f"{folder / ADAPTER_FILE} adapts nothing")
        return cls(folder, {name: _pair(folder, name, half, told) for name, half in halves.items()})

    def check(
        self, entries: Mapping[str, Entry], matrices: Container[str], quantized: str | None
    ) -> None:
        """Raises CheckpointError if the adapter doesn't fit this checkpoint. entries: the
        checkpoint's tensors by name. matrices: names of tensors that fill the model's weights.
        quantized: the checkpoint's quantization method; None: it is unquantized."""
        if quantized is not None:
            raise CheckpointError(
                f"the adapter {self.folder} cannot be merged into numbers that are quantized"
                f" already ({quantized}): take the model's unquantized checkpoint"
            )
        for name, (a, b, _) in self.pairs.items():
            entry = entries.get(name)
            if entry is None or name not in matrices:
                raise CheckpointError(
                    f"the adapter {self.folder} adapts {shown(name)}, and the model has no such"
                    " matrix of its own: it is of another model, or of a head that is tied to the"
                    " embedding"
                )
            if entry.shape != (b.shape[0], a.shape[1]):
                raise CheckpointError(
                    f"the adapter {self.folder} adapts {shown(name)} as {[b.shape[0], a.shape[1]]},"
                    f" and the model's is {list(entry.shape)}: it is of another model"
                )

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a checkpoint's tensor plus scale * B A of the adapter, in float32. A tensor that
        the adapter doesn't change is returned as it is. Raises CheckpointError if the tensor's own
        dtype can't hold the sum."""
        pair = self.pairs.get(name)
        if pair is None:
            return tensor
        a, b, scale = pair
        made = torch.addmm(tensor.float(), b.to(tensor.device), a.to(tensor.device), alpha=scale)
        if not made.numel() or bool(
            made.abs().amax() <= torch.finfo(tensor.dtype).max
        ):  # comparing with NaN gives False
            return made
        raise CheckpointError(
            f"the adapter {self.folder} makes numbers of {shown(name)} that"
            f" {str(tensor.dtype).removeprefix('torch.')} does not hold (its lora_alpha over r"
            f" comes to {scale:g}): save the adapter again"
        )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} is no adapter: it lacks {ADAPTER_CONFIG}")
    told = read_json(path)
    if told.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path}: peft_type is {told.get('peft_type')!r}, and LORA alone is merged: {_MERGED}"
        )
    nothing: tuple[Any, ...] = (None, False, "none", {}, [])
    asking = {
        key: value for key, value in told.items() if key not in _KNOWN and value not in nothing
    }
    if told.get("init_lora_weights") not in _SOUND_STARTS:
        asking["init_lora_weights"] = told["init_lora_weights"]
    if asking:
        key = min(asking)
        raise CheckpointError(f"{path}: {key} ({str(asking[key])[:80]}) is not served: {_MERGED}")
    rank, alpha = told.get("r"), told.get("lora_alpha")
    number = (
        isinstance(alpha, int | float) and not isinstance(alpha, bool) and abs(alpha) <= LARGEST
    )
    if type(rank) is not int or rank < 1 or not number:
        raise CheckpointError(
            f"{path}: r must be a whole number above 0, and lora_alpha a number that float32 holds:"
            " save it again"
        )
    return told


def _pair(
    folder: Path, name: str, half: dict[str, Tensor], told: dict[str, Any]
) -> tuple[Tensor, Tensor, float]:
    if half.keys() != {"A", "B"}:
        raise CheckpointError(
            f"{folder / ADAPTER_FILE} has one of lora_A and lora_B of {shown(name)}, and not the"
            " other"
        )
    a, b = half["A"], half["B"]
    rank = a.shape[0]
    if not rank:
        raise CheckpointError(
            f"{folder / ADAPTER_FILE}: lora_A and lora_B of {shown(name)} are of rank 0, which is"
            " none: save it again"
        )
    if b.shape[1] != rank or (rank != told["r"] and not told.get("rank_pattern")):
        raise CheckpointError(
            f"{folder / ADAPTER_FILE}: lora_A and lora_B of {shown(name)} are of rank {rank} and"
            f" {b.shape[1]}, and {ADAPTER_CONFIG} says {told['r']}"
        )
    return a, b, float(told["lora_alpha"]) / (rank**0.5 if told.get("use_rslora") else rank)
