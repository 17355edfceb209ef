"""choose_schemes: which scheme each matrix of a model has, by its name in the checkpoint. It knows
names, no layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from penstock.config import Quantization
from penstock.errors import UsageError
from penstock.quant.fp4 import Fp4FromFloats, Fp4Stored
from penstock.quant.fp8 import Fp8, Fp8Blocks, Fp8FromFloats
from penstock.quant.integers import IntFromFloats, IntStored
from penstock.quant.scheme import PLAIN, Scheme
from penstock.quant.stored_quantization import StoredForm, StoredQuantization
from penstock.quant.write_compressed import MadeKind

# a matrix's name in the checkpoint, without `.weight` -> how it lies there
SchemeOf = Callable[[str], Scheme]

ROUTERS = (".gate", ".gate.wg", ".router", ".shared_expert_gate")  # the last weighs one expert
# of a gated delta rule: a head's decay and rate
RATES = (
    ".in_proj_a",
    ".in_proj_b",
    ".in_proj_ba",
    ".linear_attn.a_proj",
    ".linear_attn.b_proj",
)
MADE: dict[MadeKind, Scheme] = {
    "fp8": Fp8FromFloats(),
    "int8": IntFromFloats(8),
    "int4": IntFromFloats(4),
    "nvfp4": Fp4FromFloats(),
}


def made_kind(quantization: MadeKind, name: str, *, fp8_head: bool = False) -> MadeKind | None:
    """Returns what a wide checkpoint's matrix becomes at load; None: it stays as it is. The router
    of experts and the rates of a recurrent state, which are small and decide much, stay; so does
    the head, whose errors nothing evens out, but beside integers, where it is of eight bits: a
    third of what a small model reads for a row, which costs little (on 24 of the demo's problems KL
    to float32 is 3.6e-4 with such a head and 3.4e-4 without; bfloat16 1.6e-4, fp8 3.8e-3, int4
    7.4e-2). fp8_head: beside fp8 it is made fp8 too."""
    if name.endswith(ROUTERS + RATES):
        return None
    if name == "lm_head":
        if quantization in ("fp8", "nvfp4"):
            return "fp8" if fp8_head and quantization == "fp8" else None
        return "int8"
    return quantization


def all_plain(name: str) -> Scheme:
    """Every matrix unquantized."""
    return PLAIN


def choose_schemes(
    quantization: Quantization, stored: StoredQuantization | None = None, *, fp8_head: bool = False
) -> SchemeOf:
    """Returns the scheme of each matrix. stored: what config.json says of its checkpoint, None: it
    is unquantized. fp8_head: as `made_kind` takes it.

    UsageError where `quantization` asks for another than a quantized checkpoint has.
    """
    if stored is not None:
        _check_named(quantization, stored)
        return _stored(stored)
    if quantization == "auto":
        return all_plain
    if quantization not in MADE:
        raise UsageError(
            f"quantization {quantization!r} is for a checkpoint that has it, and this one is wide:"
            f" leave it out, or have it made by {', '.join(MADE)}",
            param="quantization",
        )
    return lambda name: (
        MADE[made] if (made := made_kind(quantization, name, fp8_head=fp8_head)) else PLAIN
    )


def _check_named(quantization: Quantization, stored: StoredQuantization) -> None:
    """vLLM's scripts name what the checkpoint has, by its method; we take its numbers' name too."""
    # vLLM's name for NVFP4 of that writer
    theirs = ("modelopt_fp4",) if stored.method == "modelopt" else ()
    if quantization not in ("auto", stored.method, *stored.kinds, *theirs):
        raise UsageError(
            f"quantization {quantization!r} is not what this checkpoint has: its config.json says"
            f" {stored.method}: leave it out, or take the model's unquantized checkpoint",
            param="quantization",
        )


def _stored(stored: StoredQuantization) -> SchemeOf:
    scheme_of_form = cache(_scheme)  # matrices of one form have the same scheme, and may be fused
    return lambda name: scheme_of_form(stored.form_of(name))


def _scheme(form: StoredForm | None) -> Scheme:
    if form is None:
        return PLAIN
    if form.kind in ("nvfp4", "mxfp4"):
        return Fp4Stored(form)
    if form.kind != "fp8":
        return IntStored(form)
    return Fp8Blocks(form.scale) if form.scales == "block" else Fp8(form.scales, form.scale)
