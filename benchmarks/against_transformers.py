"""Compares Penstock with transformers' `generate`, side by side.

Both run in one process with the same model, dtype, thread count and prompts. Cases, of which the
first two run unless another is named:

    demo   the demo model, 16 problems with 4 shots each (about 300 tokens) x 64 samples of 64
           tokens. transformers runs batches of 64 (a problem's samples: no padding, its best case)
           and one of 1,024 (all), and its better figure counts; the second is stopped once it can
           no longer be the better one.
    qwen   Qwen2.5-0.5B's shape with random weights, 32 prompts of 32 to 256 random tokens, 64 out.
           transformers runs all 32 at once, padded on the left.
    lfm2   LFM2-350M's shape with random weights, 16 prompts of 128 random tokens, 64 out: short
           convolutions beside attention. transformers runs all 16 at once.

Both draw at temperature 0.6 without filters and without end-of-sequence, so both generate exactly
the same number of tokens. Penstock's figure is a median over runs with fresh prompts (nothing is
cached from the run before). It counts the whole call: prefill, decode, and detokenising where there
is a tokenizer. "Products" is the rate that the matrix products alone would allow: the rows of a
step over the time of one forward's `F.linear`s at that many rows.

    python benchmarks/against_transformers.py [--case demo|qwen|lfm2|both]
                                              [--dtype bfloat16|float32] [--json]

Takes 3 minutes on 2 quiet cores, nearly all of it transformers'; progress goes to stderr. Knows no
other engine, and asserts no speed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import products
import torch
from random_model import SHAPES, write_model

from penstock import LLM, SamplingParams
from penstock.demo import model_folder, problems_file, shots_file
from penstock.jobs.problems import draw_shots, load_problems, make_prompt

TEMPERATURE = 0.6
NEW_TOKENS = 64
DEMO_PROBLEMS, DEMO_SHOTS, DEMO_SAMPLES = 16, 4, 64
QWEN_PROMPTS = 32
LFM2_PROMPTS, LFM2_LENGTH = 16, 128
DUMMY = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024}

# Qwen2.5-0.5B's config.json, as its makers publish it.
QWEN_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "torch_dtype": "bfloat16",
}

Prompts = list[list[int]]


@dataclass
class Case:
    """The work of both engines. `prompts[r]` are run r's; transformers gets run 0's."""

    name: str
    folder: Path
    prompts: list[Prompts]
    samples: int
    batches: list[tuple[int, int]]  # transformers: rows of a batch, batches that are run of it
    knobs: dict[str, Any] = field(default_factory=dict)  # Penstock's

    @property
    def rows(self) -> int:
        return len(self.prompts[0]) * self.samples


def demo_case(runs: int) -> Case:
    """Draws the packaged problems and shots anew for each run."""
    from penstock.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model_folder())
    problems = load_problems(str(problems_file()), "test")
    pool = load_problems(str(shots_file()), "train")
    prompts: list[Prompts] = []
    for run in range(runs):
        chosen = random.Random(run).sample(problems, DEMO_PROBLEMS)
        texts = [
            make_prompt(p.question, draw_shots(pool, p.question, DEMO_SHOTS, run, p.index))
            for p in chosen
        ]
        prompts.append([list(tokenizer.encode(text)) for text in texts])
    rows = DEMO_PROBLEMS * DEMO_SAMPLES
    return Case(
        "demo", model_folder(), prompts, DEMO_SAMPLES, batches=[(DEMO_SAMPLES, 3), (rows, 1)]
    )


def qwen_case(folder: Path, runs: int) -> Case:
    """Writes only a config into `folder`; both engines draw their weights."""
    (folder / "config.json").write_text(json.dumps(QWEN_CONFIG))
    prompts: list[Prompts] = []
    for run in range(runs):
        draw = random.Random(run)
        lengths = [32 + round(i * (256 - 32) / (QWEN_PROMPTS - 1)) for i in range(QWEN_PROMPTS)]
        draw.shuffle(lengths)
        prompts.append(
            [[draw.randrange(QWEN_CONFIG["vocab_size"]) for _ in range(n)] for n in lengths]
        )
    return Case("qwen", folder, prompts, 1, batches=[(QWEN_PROMPTS, 1)], knobs=DUMMY)


def lfm2_case(folder: Path, runs: int) -> Case:
    """Writes the shape's files without weights into `folder`; both engines draw their weights."""
    shape = SHAPES["lfm2-350m"]
    write_model(shape, folder)
    prompts: list[Prompts] = []
    for run in range(runs):
        draw = random.Random(run)
        prompts.append(
            [
                [draw.randrange(1000, shape.vocab) for _ in range(LFM2_LENGTH)]
                for _ in range(LFM2_PROMPTS)
            ]
        )
    return Case("lfm2", folder, prompts, 1, batches=[(LFM2_PROMPTS, 1)], knobs=DUMMY)


# --- the two engines


def penstock_rates(case: Case, dtype: str) -> list[float]:
    """Returns the output tokens a second of each run."""
    llm = LLM(str(case.folder), dtype=dtype, **case.knobs)
    try:
        llm.generate([[1, 2, 3]], _sampling(n=2, max_tokens=4))
        return [_penstock_rate(llm, prompts, case.samples) for prompts in case.prompts]
    finally:
        llm.close()


def _penstock_rate(llm: LLM, prompts: Prompts, samples: int) -> float:
    begin = time.perf_counter()
    outputs = llm.generate(prompts, _sampling(n=samples, max_tokens=NEW_TOKENS))
    seconds = time.perf_counter() - begin
    made = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    wanted = len(prompts) * samples * NEW_TOKENS
    if made != wanted:
        raise SystemExit(f"penstock made {made} tokens of {wanted}: its figure would mean nothing")
    return made / seconds


def _sampling(n: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        n=n, temperature=TEMPERATURE, max_tokens=max_tokens, ignore_eos=True, seed=0
    )


def transformers_rates(case: Case, dtype: torch.dtype) -> dict[int, float]:
    """Returns rows of a batch -> output tokens a second; for a stopped batch, an upper bound."""
    model = _transformers_model(case, dtype)
    _generate(model, [[1, 2, 3]] * 2, new_tokens=4, limit=None)
    each_sample = [prompt for prompt in case.prompts[0] for _ in range(case.samples)]
    rates: dict[int, float] = {}
    for rows, count in case.batches:
        tokens = count * rows * NEW_TOKENS
        limit = tokens / max(rates.values()) if rates else None
        begin = time.perf_counter()
        for number in range(count):
            _generate(model, each_sample[number * rows : (number + 1) * rows], NEW_TOKENS, limit)
        rates[rows] = tokens / (time.perf_counter() - begin)
    return rates


def _transformers_model(case: Case, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if case.knobs.get("load_format") != "dummy":
        return AutoModelForCausalLM.from_pretrained(case.folder, dtype=dtype).eval()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(case.folder), dtype=dtype
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-1e-3, 1e-3)
    return model


def _generate(model: Any, prompts: Prompts, new_tokens: int, limit: float | None) -> None:
    """Draws `new_tokens` for each prompt; ends after the first step past `limit` seconds."""
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        max_time=limit,
    )
    model.generation_config = how  # the folder's own would bring its end ids back
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=how)
    in_time = limit is None or time.perf_counter() - begin < limit
    if in_time and out.shape[1] != longest + new_tokens:
        raise SystemExit(
            f"transformers made {out.shape[1] - longest} of {new_tokens} tokens: no comparison"
        )


# --- the comparison


def compare(case: Case, dtype_name: str) -> dict[str, Any]:
    dtype = getattr(torch, dtype_name)
    ours = penstock_rates(case, dtype_name)
    tell(
        f"{case.name}: penstock {', '.join(f'{rate:,.0f}' for rate in ours)} tok/s; now"
        " transformers"
    )
    theirs = transformers_rates(case, dtype)
    tell(
        f"{case.name}: transformers {', '.join(f'{rate:,.0f}' for rate in theirs.values())} tok/s;"
        " now the products"
    )
    config = json.loads((case.folder / "config.json").read_text())
    layers, head = products.weights_of(config, dtype)
    allowed = case.rows / products.forward_seconds(layers, head, case.rows)
    rate, best = statistics.median(ours), max(theirs.values())
    return {
        "penstock_tok_s": rate,
        "penstock_runs_tok_s": ours,
        "transformers_tok_s": best,
        "transformers_by_batch_tok_s": theirs,
        "times": rate / best,
        "products_tok_s": allowed,
        "penstock_percent_of_products": 100 * rate / allowed,
        "transformers_percent_of_products": 100 * best / allowed,
        "rows": case.rows,
        "prompt_tokens": sum(map(len, case.prompts[0])) // len(case.prompts[0]),
        "dtype": dtype_name,
        "threads": torch.get_num_threads(),
    }


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def show(name: str, result: dict[str, Any]) -> None:
    batches = ", ".join(
        f"{rate:,.0f} at {rows}" for rows, rate in result["transformers_by_batch_tok_s"].items()
    )
    print(
        f"{name}: {result['rows']} rows, prompts of {result['prompt_tokens']} tokens on average,"
        f" {NEW_TOKENS} out"
    )
    for engine in ("penstock", "transformers"):
        print(
            f"  {engine:12} {result[f'{engine}_tok_s']:9,.0f} tok/s "
            f" {result[f'{engine}_percent_of_products']:5.1f} %"
        )
    print(f"  {'products':12} {result['products_tok_s']:9,.0f} tok/s  100.0 %  ({result['dtype']})")
    print(f"  {result['times']:.1f} times transformers ({batches})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=("demo", "qwen", "lfm2", "both"), default="both")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--runs", type=int, default=2, help="runs of Penstock, each with prompts of its own"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("demo", "qwen") if options.case == "both" else (options.case,):
            if name == "demo":
                case = demo_case(options.runs)
            else:
                draw_case = qwen_case if name == "qwen" else lfm2_case
                case = draw_case(Path(folder), options.runs)
            results[name] = compare(case, options.dtype)
            if not options.json:
                show(name, results[name])
    if options.json:
        json.dump(results, sys.stdout)
        print()


if __name__ == "__main__":
    main()
