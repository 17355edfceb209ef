"""`penstock demo`: the main job on the model and the problems in the package. It needs no network."""

from __future__ import annotations

from pathlib import Path

from penstock.config import Config
from penstock.demo import problems_file, shots_file
from penstock.jobs.monkeys import Options, run_monkeys
from penstock.request import SamplingParams

SEED = 42


def run_demo(config: Config, out: Path, *, n: int, limit: int) -> None:
    """Says what it does, does it, says where the report is. Errors as `run_monkeys`."""
    sampling = SamplingParams(n=n, temperature=0.6, max_tokens=256, stop=["Question:"])
    options = Options(
        problems=str(problems_file()), shots=str(shots_file()), out=out, sampling=sampling, limit=limit, seed=SEED
    )
    print("Penstock demo: a small model, trained on word problems, answers each of them many times.")
    print(f"{limit} problems, {n} samples each, 4 worked examples before each; everything goes to {out}/")
    print("The same on any model and file: penstock monkeys MODEL --problems FILE.jsonl --out DIR\n", flush=True)
    run_monkeys(config, options)
    print(f"\nOpen {(out / 'report.html').resolve()} in a browser.")
