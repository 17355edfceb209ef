"""A model that can only say what its prompt says, built from weights by hand, and prompts whose answers are known.

A prompt is [BOS, header ..., cycle c0 c1 ... cm, c0]; the answer goes round the cycle: c1, c2, ..., c0, c1, ... Every
token of it is found by content in the sequence's own KV, so a foreign block, a stale one or a lost one gives a token
that is wrong: another request's cycle goes through the same tokens in another order.

    layer 0   head 0 looks one token back, whatever stands there, and notes it beside each token
    layer 1   head 0 looks for the token whose note is the present token, and copies it out: what follows it in the text
    head      the copied token leads by e^20 at least, at temperature 1 too, in float32 and bfloat16

An induction head (Olsson et al., arXiv:2209.11895), exactly. It knows no engine.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY, BOS, END = 1024, 0, 1
HEADER_IDS, CYCLE_IDS = range(2, 200), range(200, VOCABULARY)
CONTEXT = 512
_CODE = 64  # numbers of a token's code, each +1 or -1
_HIDDEN = 4 * _CODE  # the token's code | the note of the one before | what is copied out | a constant, then nothing
_WIDTH = 128
_THETA = 1e12  # half of the frequencies turn within a few tokens, the other half never
_ONE = 8.0  # the constant
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": _HIDDEN,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": _WIDTH, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": _THETA,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": END,
}  # fmt: skip


def make_folder(folder: Path) -> Path:
    """config.json and model.safetensors, float32, about 5 MB."""
    codes = _codes()
    embedding = torch.zeros(VOCABULARY, _HIDDEN)
    embedding[:, :_CODE], embedding[:, 3 * _CODE] = codes, _ONE
    named = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(_HIDDEN)}
    named["lm_head.weight"] = torch.zeros(VOCABULARY, _HIDDEN)
    named["lm_head.weight"][:, 2 * _CODE : 3 * _CODE] = codes
    for layer, attention in enumerate((_looks_back(), _looks_up())):
        at = f"model.layers.{layer}"
        named |= {f"{at}.self_attn.{part}_proj.weight": weight for part, weight in attention.items()}
        named |= {
            f"{at}.{norm}.weight": torch.ones(_HIDDEN) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        named |= {f"{at}.mlp.{part}_proj.weight": torch.zeros(32, _HIDDEN) for part in ("gate", "up")}
        named[f"{at}.mlp.down_proj.weight"] = torch.zeros(_HIDDEN, 32)
    folder.mkdir(exist_ok=True)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _codes() -> Tensor:
    """[VOCABULARY, _CODE] of +1 and -1, any two alike in 48 places at most."""
    rng = torch.Generator().manual_seed(1)
    kept = torch.zeros(0, _CODE)
    while len(kept) < VOCABULARY:
        code = torch.randint(2, (1, _CODE), generator=rng) * 2.0 - 1
        if not len(kept) or float((kept @ code.T).max()) <= 32:
            kept = torch.cat((kept, code))
    return kept


def _looks_back() -> dict[str, Tensor]:
    """Queries and keys are the same for all tokens; only rotation tells them apart, and one token back it fits best."""
    half = _WIDTH // 2
    turn = 1.0 / _THETA ** (torch.arange(half) / half)
    weights = _empty()
    # What the constant is after the norm; score = amplitude^2 * sum of cos(turn * (distance - 1)) / sqrt(width).
    seen, amplitude = _ONE / _rms(_CODE), 30.0
    weights["q"][:half, 3 * _CODE] = amplitude * turn.cos() / seen
    weights["q"][half:_WIDTH, 3 * _CODE] = -amplitude * turn.sin() / seen
    weights["k"][:half, 3 * _CODE] = amplitude / seen
    weights["v"][:_CODE, :_CODE] = torch.eye(_CODE)
    weights["o"][_CODE : 2 * _CODE, :_CODE] = torch.eye(_CODE) * _rms(_CODE)
    return weights


def _looks_up() -> dict[str, Tensor]:
    """A token's code against the notes, in the places that hardly turn: 64 for the right one, 32 at most for others."""
    weights, rms = _empty(), _rms(2 * _CODE)
    still = torch.cat((torch.arange(32, 64), torch.arange(96, 128)))  # both parts of the slow frequencies
    code = torch.arange(_CODE)
    weights["q"][still, code] = 5.0 * rms
    weights["k"][still, code + _CODE] = 5.0 * rms
    weights["v"][code, code] = rms
    weights["o"][code + 2 * _CODE, code] = 8.0  # the logits': 64 * 8 * 8 / rms of all there is
    return weights


def _empty() -> dict[str, Tensor]:
    return {
        "q": torch.zeros(4 * _WIDTH, _HIDDEN), "k": torch.zeros(2 * _WIDTH, _HIDDEN),
        "v": torch.zeros(2 * _WIDTH, _HIDDEN), "o": torch.zeros(_HIDDEN, 4 * _WIDTH),
    }  # fmt: skip


def _rms(coded: int) -> float:
    """Of a hidden state with so many numbers of +1 or -1 beside the constant."""
    return float(((coded + _ONE**2) / _HIDDEN) ** 0.5)


@dataclass(slots=True)
class Canary:
    """A prompt, and the endless answer to it."""

    header: list[int]
    cycle: list[int]

    @property
    def prompt(self) -> list[int]:
        return [BOS, *self.header, *self.cycle, self.cycle[0]]

    def answer(self, count: int, first: int = 0) -> list[int]:
        """Tokens `first` and on of the answer."""
        return [self.cycle[(1 + at) % len(self.cycle)] for at in range(first, first + count)]


def canary(rng: random.Random, header: list[int], longest: int = 40) -> Canary:
    return Canary(header, rng.sample(CYCLE_IDS, rng.randint(2, longest)))


def header(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(HEADER_IDS) for _ in range(length)]
