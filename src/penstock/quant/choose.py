"""choose_schemes: chooses the quantization scheme of each matrix by the matrix's name in the
checkpoint. Knows names; no layers."""

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

# function: name of a matrix in the checkpoint, without `.weight` -> its scheme
SchemeOf = Callable[[str], Scheme]

# Endings of the names of experts' routers. A shared_expert_gate scores the shared expert.
ROUTERS = (".gate", ".gate.wg", ".router", ".shared_expert_gate")
# endings of the names of matrices that compute each head's decay and rate in a gated delta rule
# layer
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
    """Returns how a matrix of an unquantized checkpoint is quantized at load; None: it stays
    unquantized.

    The experts' routers and the matrices that compute a recurrent layer's decays stay unquantized:
    they are small, and errors in them matter much. The output head (lm_head) stays unquantized too,
    as no later layer evens out its errors. With int8 and int4, however, the head becomes int8: a
    decode step of a small model then reads a third fewer bytes. This costs little: on 24 problems
    of the demo the KL divergence from float32 is 3.6e-4 with an int8 head and 3.4e-4 with a
    bfloat16 head. (A bfloat16 model has 1.6e-4, fp8 3.8e-3, int4 7.4e-2.) fp8_head: with fp8,
    quantize the head to fp8 too."""
    if name.endswith(ROUTERS + RATES):
        return None
    if name == "lm_head":
        if quantization in ("fp8", "nvfp4"):
            return "fp8" if fp8_head and quantization == "fp8" else None
        return "int8"
    return quantization


def all_plain(name: str) -> Scheme:
    """Returns the unquantized scheme, whatever the matrix's name."""
    return PLAIN


def choose_schemes(
    quantization: Quantization, stored: StoredQuantization | None = None, *, fp8_head: bool = False
) -> SchemeOf:
    """Returns a function from a matrix's name to its scheme. quantization: the engine's argument.
    stored: the quantization that the checkpoint's config.json declares; None: unquantized.
    fp8_head: see `made_kind`. Raises UsageError if `quantization` names another method than the
    checkpoint's."""
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
    """Raises UsageError unless `quantization` is "auto" or names the checkpoint's quantization: by
    its method ("awq"), as vLLM's scripts do, or by the kind of its weights ("int4")."""
    # vLLM's name for ModelOpt's NVFP4
    theirs = ("modelopt_fp4",) if stored.method == "modelopt" else ()
    if quantization not in ("auto", stored.method, *stored.kinds, *theirs):
        raise UsageError(
            f"quantization {quantization!r} is not what this checkpoint has: its config.json says"
            f" {stored.method}: leave it out, or take the model's unquantized checkpoint",
            param="quantization",
        )


def _stored(stored: StoredQuantization) -> SchemeOf:
    """Returns a function from a matrix's name to its scheme, for a quantized checkpoint."""
    # one scheme object for equal StoredForms, so that their matrices can be fused into one product
    scheme_of_form = cache(_scheme)
    return lambda name: scheme_of_form(stored.form_of(name))


def _scheme(form: StoredForm | None) -> Scheme:
    """Returns the scheme that reads matrices stored as `form`; None: unquantized."""
    if form is None:
        return PLAIN
    if form.kind in ("nvfp4", "mxfp4"):
        return Fp4Stored(form)
    if form.kind != "fp8":
        return IntStored(form)
    return Fp8Blocks(form.scale) if form.scales == "block" else Fp8(form.scales, form.scale)
