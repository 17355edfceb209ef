"""choose_schemes: which scheme each matrix of a model has, by its name in the checkpoint. It knows names, no layers."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import Quantization
from penstock.quant.fp8 import Fp8FromFloats
from penstock.quant.scheme import PLAIN, Scheme

SchemeOf = Callable[[str], Scheme]  # a matrix's name in the checkpoint, without `.weight` -> how it lies there

# What stays as it is when a wide checkpoint is quantized at load: the head, whose errors nothing evens out, and the
# router of experts, which is small and decides much.
KEPT = ("lm_head", ".gate")


def all_plain(name: str) -> Scheme:
    """Every matrix unquantized."""
    return PLAIN


def choose_schemes(quantization: Quantization) -> SchemeOf:
    """Returns the scheme of each matrix of an unquantized checkpoint."""
    if quantization == "auto":
        return all_plain
    made = Fp8FromFloats()
    return lambda name: PLAIN if name.endswith(KEPT) else made
