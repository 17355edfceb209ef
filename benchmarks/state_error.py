"""Measures a recurrent state's drift from fp64 over many tokens of one row, by its stored dtype.

    PYTHONPATH=src python benchmarks/state_error.py [--tokens 100000]

Runs the reference kernels token by token beside the same formulas in fp64. Decays are drawn as
models are initialised: A in 1 to 16, steps of 0.001 to 0.1. "state": the largest error of a number
of the state after the last token, over the state's largest number. "answers": the same for the last
1,000 answers.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import delta_cases
import mamba2_cases
from state_steps import step

from penstock.kernels.delta_rule import DeltaHeads
from penstock.kernels.mamba2 import Mamba2Heads
from penstock.kernels.reference.recurrent.delta_rule import delta_rule
from penstock.kernels.reference.recurrent.mamba2 import mamba2

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAST = 1000
DELTA, MAMBA = DeltaHeads(1, 2, 64, 64), Mamba2Heads(2, 64, 1, 64)
LAYERS = {"delta_rule": (delta_rule, DELTA, delta_cases), "mamba2": (mamba2, MAMBA, mamba2_cases)}


def begin(decay: Tensor, step_bias: Tensor) -> None:
    """Fills both tensors as models are initialised."""
    draw = torch.Generator().manual_seed(3)
    decay.uniform_(-16, -1, generator=draw)
    size = torch.empty(step_bias.shape).uniform_(-6.9, -2.3, generator=draw).exp()
    step_bias.copy_(size + torch.log(-torch.expm1(-size)))


def off(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).abs().max() / right.abs().max())


def look(name: str, tokens: int) -> None:
    rule, heads, cases = LAYERS[name]
    weights = cases.made(heads)
    begin(weights.decay if name == "delta_rule" else weights.a, weights.step_bias)
    given = cases.drawn(tokens, heads)
    answers, state = cases.in_fp64(*given, heads, weights)
    for dtype in DTYPES:
        window, matrix = cases.empty(heads, 1)
        matrix = matrix.to(dtype)
        call, last = partial(rule, heads=heads, weights=weights, window=window, matrix=matrix), []
        for at in range(tokens):
            answer = call(*(part[at : at + 1] for part in given), inputs=step([(0, at, True)], []))
            if at >= tokens - LAST:
                last.append(answer)
        print(
            f"{name:11} {str(dtype)[6:]:9} state {off(matrix[0].mT, state):.2g}  "
            f"answers {off(torch.cat(last), answers[-LAST:]):.2g}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for name in LAYERS:
            look(name, options.tokens)


if __name__ == "__main__":
    main()
