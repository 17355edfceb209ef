"""Measures a demo checkpoint on held-out problems: pass@k, and the share of right answers by kind.

Samples with the plain torch model of `small_llama.py`, so that training can be judged where it
runs; `penstock monkeys` runs the same problems on the engine. Knows the checkpoint folder and the
shipped problems; no engine.

`python scripts/demo/measure.py` measures the shipped model.
"""

import argparse
import json
import re
import time
from math import comb
from pathlib import Path
from random import Random
from typing import Any

import torch
from documents import END_OF_TEXT, END_OF_TURN, PAD, id_of, prompt_text
from problems import shipped
from small_llama import SmallLlama, load
from tokenizers import Tokenizer
from torch import Tensor

from penstock.demo import model_folder, problems_file, shots_file

ANSWER = re.compile(r"####\s*(-?[\d,]+)")


def pass_at_k(n: int, right: int, k: int) -> float:
    """Returns the unbiased estimate of pass@k from `right` of `n` samples (Chen et al., 2021)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def number_of(text: str) -> str | None:
    """Returns the number after the first `####` before the next question, without commas; None if
    there is none."""
    found = ANSWER.search(text.split("Question:")[0])
    return found.group(1).replace(",", "") if found else None


@torch.inference_mode()
def sample(
    model: SmallLlama,
    prompts: list[list[int]],
    n: int,
    temperature: float,
    most: int,
    stops: list[int],
    pad: int,
    seed: int,
) -> Tensor:
    """Returns `n` samples of each prompt: ids `[prompts * n, at most `most`]`, padded behind the
    first of `stops`."""
    device = model.model.norm.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    # padding before each prompt
    lead = torch.tensor([longest - len(p) for p in prompts], device=device)
    column = torch.arange(longest + most, device=device)
    positions = (column[None, :longest] - lead[:, None]).clamp(min=0)
    # padding sees itself: no row without a key
    own = torch.eye(longest, dtype=torch.bool, device=device)
    seen = (
        (column[:longest, None] >= column[:longest]) & (column[:longest] >= lead[:, None, None])
    ) | own
    short = model.new_cache(len(prompts), longest)
    logits = model(ids, positions, short, 0, seen[:, None], last_only=True)[:, 0].repeat_interleave(
        n, 0
    )
    cache = model.new_cache(len(prompts) * n, longest + most)
    for (k, v), (prompt_k, prompt_v) in zip(cache, short, strict=True):
        k[:, :, :longest], v[:, :, :longest] = (
            prompt_k.repeat_interleave(n, 0),
            prompt_v.repeat_interleave(n, 0),
        )
    del short
    lead = lead.repeat_interleave(n)
    open_keys = (column >= lead[:, None])[:, None, None]
    stop_ids = torch.tensor(stops, device=device)
    done = torch.zeros(len(lead), dtype=torch.bool, device=device)
    tokens: list[Tensor] = []
    for at in range(longest, longest + most):
        odds = torch.softmax(logits.float() / temperature, dim=-1)
        token = torch.multinomial(odds, 1, generator=generator)[:, 0].masked_fill(done, pad)
        tokens.append(token)
        done |= torch.isin(token, stop_ids)
        if len(tokens) % 8 == 0 and bool(done.all()):
            break
        logits = model(
            token[:, None],
            (at - lead)[:, None],
            cache,
            at,
            open_keys[..., : at + 1],
            last_only=True,
        )[:, 0]
    return torch.stack(tokens, dim=1)


def prompts_of(limit: int, few_shot: int, seed: int) -> tuple[list[str], list[str]]:
    """Returns the prompts of the first `limit` held-out problems, each behind `few_shot` examples,
    and their true numbers."""
    rows = [json.loads(line) for line in problems_file().read_text(encoding="utf-8").splitlines()][
        :limit
    ]
    shots = [json.loads(line) for line in shots_file().read_text(encoding="utf-8").splitlines()]
    rng = Random(seed)
    prompts = [prompt_text(rng.sample(shots, few_shot), row["question"]) for row in rows]
    return prompts, [row["answer"].split("#### ")[1] for row in rows]


def measure(
    folder: Path, device: str, limit: int, few_shot: int, n: int, temperature: float, most: int
) -> dict[str, Any]:
    """Samples `limit` problems `n` times. Returns pass@k, the share of right answers by kind,
    tokens and seconds."""
    model = load(folder, device, torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stops = [id_of(tokenizer, token) for token in (END_OF_TEXT, END_OF_TURN, "Question")]
    pad = id_of(tokenizer, PAD)
    prompts, truth = prompts_of(limit, few_shot, seed=1)
    limit = len(prompts)  # there may be fewer
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    at_once = max(1, (16_384 if device != "cpu" else 512) // n)
    begun, right, tokens, texts = time.time(), [0] * limit, 0, []
    for first in range(0, limit, at_once):
        ids = sample(
            model, encoded[first : first + at_once], n, temperature, most, stops, pad, seed=first
        ).tolist()
        tokens += sum(token != pad for row in ids for token in row)
        for row, text in enumerate(tokenizer.decode_batch(ids)):
            problem = first + row // n
            right[problem] += number_of(text) == truth[problem]
            if row % n == 0:
                texts.append(text)
    kinds: dict[str, list[int]] = {}
    for made, count in zip(shipped("test"), right, strict=False):
        kinds.setdefault(made.kind, []).append(count)
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k <= n]
    return {
        "problems": limit,
        "few_shot": few_shot,
        "n": n,
        "temperature": temperature,
        "pass_at_k": {k: round(sum(pass_at_k(n, c, k) for c in right) / limit, 4) for k in ks},
        "kinds": {
            kind: round(sum(counts) / len(counts) / n, 3) for kind, counts in sorted(kinds.items())
        },
        "tokens": tokens,
        "seconds": round(time.time() - begun, 1),
        "samples": texts[:3],
    }


def main() -> None:
    """Prints the measurement as JSON."""
    parser = argparse.ArgumentParser(description="measure a demo checkpoint on held-out problems")
    parser.add_argument("--folder", type=Path, default=model_folder())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--few-shot", type=int, default=4)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--max-tokens", type=int, default=160)
    o = parser.parse_args()
    if o.temperature <= 0 or o.limit < 1 or o.n < 1:
        parser.error("--temperature must be above 0, --limit and --n at least 1")
    print(
        json.dumps(
            measure(o.folder, o.device, o.limit, o.few_shot, o.n, o.temperature, o.max_tokens),
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
