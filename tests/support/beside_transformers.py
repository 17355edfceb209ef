"""What models are held against transformers by: a small config, our decoder of a folder, what
theirs says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.choose import choose
from penstock.models.decoder import Decoder
from penstock.weights.load import load_model

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
PROMPT = 70  # longer than the windows, and over several blocks
NEW = 64


def decoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    device = torch.device("cpu")
    ops = choose(device, dtype, "auto")
    return load_model(folder, load_format="auto", dtype=dtype, device=device, ops=ops, seed=0)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@torch.inference_mode()
def greedy_of(theirs: Any) -> tuple[list[int], list[int], Tensor]:
    """A prompt, its 64 greedy tokens, and the logits of the whole."""
    prompt = torch.randint(0, 211, (PROMPT,), generator=torch.Generator().manual_seed(3))
    whole = theirs.generate(
        prompt[None],
        attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )[0]
    return prompt.tolist(), whole[PROMPT:].tolist(), theirs(whole[None]).logits[0]
