"""A model that can only say what its prompt says, built from weights by hand, and prompts whose
answers are known.

A prompt is [BOS, header ..., cycle c0 c1 ... cm, c0]; the answer goes round the cycle: c1, c2, ...,
c0, c1, ... Every token of it is found by content in the sequence's own KV, so a foreign block, a
stale one or a lost one gives a token that is wrong: another request's cycle goes through the same
tokens in another order.

    layer 0   head 0 looks one token back, whatever stands there, and notes it beside each token
    layer 1   head 0 looks for the token whose note is the present token, and copies it out: what
    follows it in the text
    experts   where it has some: only those that a copied token is routed to write it down for the
    head; of half of the
              tokens any other writes nothing
    head      the copied token leads by e^20 at least, at temperature 1 too, in float32 and bfloat16

With latent attention the code and the note are a token's latent, and layer 0 looks at the rotated
part of keys alone.

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
# the token's code | the note of the one before | what is copied out | a constant, then nothing |
# what experts write
_HIDDEN = 5 * _CODE
_WIDTH = 128
_THETA = 1e12  # half of the frequencies turn within a few tokens, the other half never
_ONE = 8.0  # the constant
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": _WIDTH,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": _THETA,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END,
}
_RANK, _TURNING = 512, 64
LATENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": _RANK,
    "qk_rope_head_dim": _TURNING,
    "qk_nope_head_dim": _WIDTH,
    "v_head_dim": _WIDTH,
    "rope_theta": 1e4,
    "first_k_dense_replace": 2,  # no experts
}
EXPERTS = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": _CODE,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def make_folder(folder: Path, *, experts: bool = False, latent: bool = False) -> Path:
    """config.json and model.safetensors, float32, about 5 MB. experts: a mixture of them in place
    of the MLP. latent: multi-head latent attention."""
    codes = _codes()
    embedding = torch.zeros(VOCABULARY, _HIDDEN)
    embedding[:, :_CODE], embedding[:, 3 * _CODE] = codes, _ONE
    named = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(_HIDDEN)}
    named["lm_head.weight"] = torch.zeros(VOCABULARY, _HIDDEN)
    said = 4 if experts else 2
    named["lm_head.weight"][:, said * _CODE : (said + 1) * _CODE] = codes
    layers = _latents() if latent else (_looks_back(), _looks_up())
    for layer, attention in enumerate(layers):
        at = f"model.layers.{layer}"
        named |= {f"{at}.self_attn.{part}.weight": weight for part, weight in attention.items()}
        named |= {
            f"{at}.{norm}.weight": torch.ones(_HIDDEN)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        made = _experts(codes, write=layer == 1) if experts else _no_mlp()
        named |= {f"{at}.{part}.weight": weight for part, weight in made.items()}
    folder.mkdir(exist_ok=True)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    other = EXPERTS if experts else LATENT if latent else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | other))
    return folder


def _no_mlp() -> dict[str, Tensor]:
    named = {f"mlp.{part}_proj": torch.zeros(32, _HIDDEN) for part in ("gate", "up")}
    return named | {"mlp.down_proj": torch.zeros(_HIDDEN, 32)}


def _experts(codes: Tensor, *, write: bool) -> dict[str, Tensor]:
    """Each has a code of its own, or another's turned round: tokens go to those whose code is like
    the copied token's, whose gate is open for it."""
    count, copied, code = (
        EXPERTS["num_local_experts"],
        slice(2 * _CODE, 3 * _CODE),
        torch.arange(_CODE),
    )
    own, seed = torch.zeros(0, _CODE), 0
    while not len(own) or float((own @ codes.T).amax(0).min()) < 4:  # no token that opens no gate
        half = (
            torch.randint(2, (count // 2, _CODE), generator=torch.Generator().manual_seed(seed))
            * 2.0
            - 1
        )
        own, seed = torch.cat((half, -half)), seed + 1
    router = torch.zeros(count, _HIDDEN)
    router[:, copied] = own / 8
    named = {"block_sparse_moe.gate": router}
    for expert in range(count):
        gate, up, down = (torch.zeros(_CODE, _HIDDEN) for _ in range(3))
        gate[:, copied] = own[expert] / 2
        up[code, copied.start + code] = 1.0
        if write:
            down[code, 4 * _CODE + code] = 8.0
        at = f"block_sparse_moe.experts.{expert}"
        named |= {f"{at}.w1": gate, f"{at}.w3": up, f"{at}.w2": down.T.contiguous()}
    return named


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
    """Queries and keys are the same for all tokens; only rotation tells them apart, and one token
    back it fits best."""
    half = _WIDTH // 2
    turn = 1.0 / _THETA ** (torch.arange(half) / half)
    weights = _empty()
    # What the constant is after the norm; score = amplitude^2 * sum of cos(turn * (distance - 1)) /
    # sqrt(width).
    seen, amplitude = _ONE / _rms(_CODE), 30.0
    weights["q_proj"][:half, 3 * _CODE] = amplitude * turn.cos() / seen
    weights["q_proj"][half:_WIDTH, 3 * _CODE] = -amplitude * turn.sin() / seen
    weights["k_proj"][:half, 3 * _CODE] = amplitude / seen
    weights["v_proj"][:_CODE, :_CODE] = torch.eye(_CODE)
    weights["o_proj"][_CODE : 2 * _CODE, :_CODE] = torch.eye(_CODE) * _rms(_CODE)
    return weights


def _looks_up() -> dict[str, Tensor]:
    """A token's code against the notes, in the places that hardly turn: 64 for the right one, 32 at
    most for others."""
    weights, rms = _empty(), _rms(2 * _CODE)
    # both parts of the slow frequencies
    still = torch.cat((torch.arange(32, 64), torch.arange(96, 128)))
    code = torch.arange(_CODE)
    weights["q_proj"][still, code] = 5.0 * rms
    weights["k_proj"][still, code + _CODE] = 5.0 * rms
    weights["v_proj"][code, code] = rms
    weights["o_proj"][code + 2 * _CODE, code] = 8.0  # the logits': 64 * 8 * 8 / rms of all there is
    return weights


def _latents() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both layers, by latent attention. A latent is normed: with n numbers of +1 or -1 each becomes
    root(_RANK / n)."""
    back, up = _empty_latent(), _empty_latent()
    code = torch.arange(_CODE)
    # rotated pairs of the first head's queries and of the key that all heads share, as in
    # `_looks_back`
    real = torch.arange(0, _TURNING, 2)
    turn = 1.0 / float(LATENT["rope_theta"]) ** (real / _TURNING)
    seen, amplitude = _ONE / _rms(_CODE), 30.0
    back["q_proj"][_WIDTH + real, 3 * _CODE] = amplitude * turn.cos() / seen
    back["q_proj"][_WIDTH + real + 1, 3 * _CODE] = -amplitude * turn.sin() / seen
    back["kv_a_proj_with_mqa"][_RANK + real, 3 * _CODE] = amplitude / seen
    back["kv_a_proj_with_mqa"][code, code] = 1.0
    back["kv_b_proj"][_WIDTH + code, code] = (_CODE / _RANK) ** 0.5
    back["o_proj"][_CODE + code, code] = 1.0
    half = (2 * _CODE / _RANK) ** 0.5  # the code, and behind it the note
    up["q_proj"][code, code] = 5.0 * _rms(2 * _CODE)
    up["kv_a_proj_with_mqa"][: 2 * _CODE, : 2 * _CODE] = torch.eye(2 * _CODE)
    up["kv_b_proj"][code, _CODE + code] = 5.0 * half
    up["kv_b_proj"][_WIDTH + code, code] = half
    up["o_proj"][2 * _CODE + code, code] = 8.0
    return back, up


def _empty_latent() -> dict[str, Tensor]:
    return {
        "q_proj": torch.zeros(4 * (_WIDTH + _TURNING), _HIDDEN),
        "kv_a_proj_with_mqa": torch.zeros(_RANK + _TURNING, _HIDDEN),
        "kv_a_layernorm": torch.ones(_RANK),
        "kv_b_proj": torch.zeros(4 * (_WIDTH + _WIDTH), _RANK),
        "o_proj": torch.zeros(_HIDDEN, 4 * _WIDTH),
    }


def _empty() -> dict[str, Tensor]:
    return {
        "q_proj": torch.zeros(4 * _WIDTH, _HIDDEN),
        "k_proj": torch.zeros(2 * _WIDTH, _HIDDEN),
        "v_proj": torch.zeros(2 * _WIDTH, _HIDDEN),
        "o_proj": torch.zeros(_HIDDEN, 4 * _WIDTH),
    }


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
