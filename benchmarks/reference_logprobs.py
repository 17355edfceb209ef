"""Computes the reference that `penstock bench answers` compares an engine with: greedy tokens and
top-20 logprobs of a checkpoint, by `transformers` in float32 on the CPU.

    python benchmarks/reference_logprobs.py FOLDER REFERENCE.json [--name NAME]

Prompts are random ids of fixed lengths, the same for every vocabulary size: 8 to some 500 tokens.
Take a small trained checkpoint, as the demo's folder: random weights answer so flatly that no wrong
engine shows, and `penstock bench answers` refuses their reference.
Knows transformers; nothing of Penstock's engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOP = 20
LEAST, MOST = 8, 500  # tokens of a prompt


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    """Returns the prompts: lengths rise evenly in logarithms, ids are drawn anew for each."""
    lengths = np.geomspace(LEAST, MOST, count).astype(int)
    return [
        np.random.default_rng([number, vocabulary]).integers(3, vocabulary, length).tolist()
        for number, length in enumerate(lengths)
    ]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], list[Any]]:
    """Returns the greedy continuation, and for each of its tokens the likeliest ids with their
    logprobs."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = []
    for logits in out.logits:
        values, found = torch.log_softmax(logits[0].double(), -1).topk(TOP)
        top.append([[int(i), round(float(v), 9)] for i, v in zip(found, values, strict=True)])
    return [each[0][0] for each in top], top


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", help="the model's, in records; left out: the folder's")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every prompt has all its tokens
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    prompts = prompts_of(given.prompts, model.config.get_text_config().vocab_size)
    answers = [greedy(model, prompt, given.tokens) for prompt in prompts]
    ids = sorted({token for _, top in answers for each in top for token, _ in each})
    told = {
        "model": given.name or given.folder.resolve().name,
        "prompts": prompts,
        "tokens": [tokens for tokens, _ in answers],
        "top": [top for _, top in answers],
        "texts": {str(token): tokenizer.decode([token]) for token in ids},
    }
    given.out.write_text(json.dumps(told))
    print(f"{given.out}: {len(prompts)} prompts x {given.tokens} tokens of {told['model']}")


if __name__ == "__main__":
    main()
