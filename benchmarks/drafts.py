"""Measures what drafts gain, and what they cost where nothing can be guessed.

    python benchmarks/drafts.py --shape llama-3-8b --knob quantization=fp8
    python benchmarks/drafts.py --shape qwen3.5-9b --method mtp --drafts 3 --chance 0.7 --rows 1
    python benchmarks/drafts.py --shape tiny --knob device=cpu --rows 1 4    # to try the script

One engine runs each work with its gate and without, by turns (A B A B ...); the medians and their
ratio are printed. Kinds of work:

    planted   greedy rows whose drafts are right with a given probability a token. The model's last
              norm is zero, so that all logits are equal and token 0 is always drawn: what is right
              is known. The proposer runs in full, then its drafts are replaced.
    random    rows at temperature 1, whose text can't be guessed: the gate must cost nothing

Knows an engine's parts by their names; asserts no speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from knobs import read_knob
from random_model import SHAPES, write_model

from penstock import LLM, SamplingParams
from penstock.execute.proposer import Drawn, Proposer
from penstock.kernels.row_state import RowState
from penstock.schedule.step import Drafter
from penstock.speculative import METHODS

RIGHT, WRONG = 0, 1  # token ids


class Planted:
    """A Proposer that runs another one, then replaces its drafts: each is right with a chance."""

    def __init__(self, inner: Proposer, rows: RowState, chance: float) -> None:
        self.inner, self.rows, self.chance = inner, rows, chance
        self.follows = inner.follows

    def warm(self, sizes: list[int]) -> None:
        self.inner.warm(sizes)

    def launch(self, drawn: Drawn) -> None:
        self.inner.launch(drawn)
        drafts = self.rows.drafts
        wrong = torch.rand(drafts.shape, device=drafts.device) >= self.chance
        drafts.copy_(wrong)  # RIGHT is 0, WRONG is 1


class Bench:
    """One engine whose drafter is switched on and off. pairs: runs of each kind."""

    def __init__(self, llm: LLM, pairs: int, prompt: int, tokens: int) -> None:
        self.llm, self.pairs, self.prompt, self.tokens = llm, pairs, prompt, tokens
        self.engine = llm._engine
        self.drafting = self.engine.scheduler.drafting
        self.gate: Drafter | None = self.drafting.drafter
        state = self.engine.runner._state
        assert state is not None and state.draw.proposer is not None
        self.rows, self.draw, self.proposer = state.rows, state.draw, state.draw.proposer
        self.random = np.random.default_rng(0)

    def plant(self, chance: float | None) -> None:
        """Replaces drafts from now on; None: takes them as the proposer makes them."""
        self.draw.proposer = self.proposer
        if chance is not None:
            self.draw.proposer = Planted(self.proposer, self.rows, chance)
            with torch.inference_mode():
                self.engine.runner._model.norm.weight.value.zero_()

    def measure(self, rows: int, temperature: float) -> dict[str, Any]:
        """Returns the tokens per second with drafts and without, and the drafts' counts."""
        rates: dict[bool, list[float]] = {True: [], False: []}
        before = self.drafting.counts["tokens"], int(self.drafting.right.sum())
        steps = {True: 0, False: 0}
        for turn in range(2 + 2 * self.pairs):  # the first of each warms up
            drafts = turn % 2 == 0
            self.drafting.drafter = self.gate if drafts else None
            counted = self.engine.scheduler.counts["steps"]
            rate = self._rate(rows, temperature)
            if turn > 1:
                rates[drafts].append(rate)
                steps[drafts] += self.engine.scheduler.counts["steps"] - counted
        self.drafting.drafter = self.gate
        on, off = (statistics.median(rates[drafts]) for drafts in (True, False))
        return {
            "rows": rows,
            "on": on,
            "off": off,
            "ratio": on / off,
            "drafted": self.drafting.counts["tokens"] - before[0],
            "right": int(self.drafting.right.sum()) - before[1],
            "steps": [steps[True] // self.pairs, steps[False] // self.pairs],
        }

    def _rate(self, rows: int, temperature: float) -> float:
        prompts = self.random.integers(2, self.engine.runner.vocab_size, (rows, self.prompt))
        asked = SamplingParams(
            temperature=temperature,
            max_tokens=self.tokens,
            ignore_eos=True,
            detokenize=False,
        )
        begun = time.perf_counter()
        outs = self.llm.generate(prompts.tolist(), asked, use_tqdm=False)
        took = time.perf_counter() - begun
        return sum(len(out.outputs[0].token_ids) for out in outs) / took


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row of results for each work."""
    config = {"method": options.method, "num_speculative_tokens": options.drafts}
    with tempfile.TemporaryDirectory() as folder:
        write_model(SHAPES[options.shape], Path(folder))
        knobs = {"load_format": "dummy", "skip_tokenizer_init": True} | dict(options.knob)
        with LLM(folder, speculative_config=config, **knobs) as llm:
            bench = Bench(llm, options.pairs, options.prompt, options.tokens)
            # random text first: planted works change the weights
            works = [("random", None, rows) for rows in options.random_rows]
            works += [
                ("planted", chance, rows) for chance in options.chance for rows in options.rows
            ]
            found = []
            for kind, chance, rows in works:
                bench.plant(chance)
                row = {"kind": kind, "chance": chance} | bench.measure(rows, float(chance is None))
                found.append(row)
                print(told(row), file=sys.stderr, flush=True)
    return found


def told(row: dict[str, Any]) -> str:
    """Returns a result as a line of the table."""
    chance = "" if row["chance"] is None else f" {row['chance']:g}"
    return (
        f"{row['kind'] + chance:<14}{row['rows']:>6} rows {row['on']:>10,.0f} tok/s with drafts"
        f" {row['off']:>10,.0f} without: {row['ratio']:.3f};"
        f" {row['right']:,} of {row['drafted']:,} drafts right, steps {row['steps']}"
    )


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--method", choices=METHODS, default="ngram")
    parser.add_argument("--drafts", type=int, default=4, help="most drafts of a row")
    parser.add_argument("--chance", type=float, nargs="*", default=[0.8, 0.6])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--random-rows", type=int, nargs="*", default=[1, 16, 256, 1024])
    parser.add_argument("--prompt", type=int, default=128, help="random ids of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a row")
    parser.add_argument("--pairs", type=int, default=3, help="runs with drafts, and without")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--knob", action="append", default=[], type=read_knob, metavar="NAME=VALUE", help="again"
    )
    options = parser.parse_args(words)
    found = run(options)
    print(json.dumps(found) if options.json else "\n".join(map(told, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
