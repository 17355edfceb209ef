"""A hybrid that can only say what its prompt says, as `canary_model`'s does. A token is a pair of
32 by 32 signs: the first comes out of recurrent state, the second out of keys and values. So a
foreign, stale or lost state, window or block gives wrong tokens.

    layer 0   gated delta rule. Heads 0 to 2 are a memory: at each token the one before it is the
    key (by the
              convolution), the token is written, and what is stored for it is read: what followed
              it in the text.
              Head 3 has one key for all and notes the token before
    layer 1   gated attention looks for the token whose note is the present token, and copies it out
    head      the first sign of what was read, the second of what was copied

Keys of the memory are 6 of 128 numbers, drawn: two tokens' are alike by 0.05 in the mean and 0.09
around it, so that 40 tokens written later leave the right one 64, others 32 at most, give or take
5.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from canary_model import CONFIG as PLAIN
from canary_model import VOCABULARY
from safetensors.torch import save_file
from torch import Tensor

_CODE, _KEY, _HEADS, _MEMORY, _SET = 64, 128, 4, 3, 6
_KEYS = _CODE  # where keys of the memory stand in the hidden state, behind the token's code
_ONE = _KEYS + _MEMORY * _KEY  # a constant, and nothing up to the next
_NOTE, _RECALLED, _COPIED = (_ONE + (number + 1) * _CODE for number in range(3))
_HIDDEN = _COPIED + _CODE
_OPEN = 10.0  # what gates and channels are driven to before silu
_CONSTANT = 8.0
CONFIG = {name: value for name, value in PLAIN.items() if name != "rope_theta"} | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": _HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": _KEY,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "linear_key_head_dim": _KEY,
    "linear_value_head_dim": _KEY,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}


def make_hybrid(folder: Path) -> Path:
    """config.json and model.safetensors, float32, about 9 MB."""
    codes, keys = _codes(), _keys()
    embedding = torch.zeros(VOCABULARY, _HIDDEN)
    embedding[:, :_CODE], embedding[:, _KEYS:_ONE], embedding[:, _ONE] = (
        codes,
        keys.flatten(1),
        _CONSTANT,
    )
    head = torch.zeros(VOCABULARY, _HIDDEN)
    half = _CODE // 2  # of a code: a sign's
    head[:, _RECALLED : _RECALLED + half], head[:, _COPIED + half : _COPIED + _CODE] = (
        3 * codes[:, :half],
        3 * codes[:, half:],
    )
    named = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.zeros(_HIDDEN),
        "lm_head.weight": head,
    }
    seen = float(embedding[0].square().mean().sqrt())  # the same for each token
    for layer, mixer in enumerate((_memory(seen), _looks_up())):
        at = f"model.layers.{layer}"
        # norms are by 1 + w
        named |= {f"{at}.{norm}.weight": torch.zeros(_HIDDEN) for norm in _NORMS}
        named |= {
            f"{at}.mlp.{part}_proj.weight": torch.zeros(32, _HIDDEN) for part in ("gate", "up")
        }
        named |= {f"{at}.mlp.down_proj.weight": torch.zeros(_HIDDEN, 32)}
        named |= {f"{at}.{name}": weight for name, weight in mixer.items()}
    folder.mkdir(exist_ok=True)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _codes() -> Tensor:
    """[VOCABULARY, _CODE] of +1 and -1: two signs of the rows of a Hadamard matrix."""
    signs = torch.ones(1, 1)
    while len(signs) < _CODE // 2:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    token = torch.arange(VOCABULARY)
    return torch.cat((signs[token % len(signs)], signs[token // len(signs)]), 1)


def _keys() -> Tensor:
    """[VOCABULARY, heads of the memory, _KEY]: _SET numbers of each are 1."""
    draw = torch.Generator().manual_seed(2)
    chosen = torch.rand(VOCABULARY, _MEMORY, _KEY, generator=draw).topk(_SET).indices
    return torch.zeros(VOCABULARY, _MEMORY, _KEY).scatter_(2, chosen, 1.0)


def _memory(seen: float) -> dict[str, Tensor]:
    """seen: the root mean square of what the layer's norm divides by."""
    size, code, one = _HEADS * _KEY, torch.arange(_CODE), _OPEN * seen / _CONSTANT
    q, k, v, z = (torch.zeros(_HEADS, _KEY, _HIDDEN) for _ in range(4))
    lane = torch.arange(_KEY)
    for head in range(_MEMORY):
        for part in (
            q,
            k,
        ):  # _OPEN where the token's key is 1, -_OPEN elsewhere, which silu makes nothing
            part[head, lane, _KEYS + head * _KEY + lane] = 2 * _OPEN * seen
            part[head, :, _ONE] = -one
    for part in (q, k):
        part[_MEMORY, 0, _ONE] = one
    # what is above 0 of the code, and below
    v[:, code, code], v[:, _CODE + code, code] = (
        _OPEN * seen,
        -_OPEN * seen,
    )
    z[:, :, _ONE] = one
    taps = torch.zeros(3, _HEADS, _KEY, 4)
    taps[..., -1] = 1.0
    before = torch.tensor([0.0, 0.0, 1.0, 0.0])
    taps[1, :_MEMORY] = taps[2, _MEMORY] = before  # keys of the memory, and what is noted
    out = torch.zeros(_HIDDEN, _HEADS, _KEY)
    # A head's answer is normed: half of its numbers are the root of 2, and the gate multiplies
    # them.
    for head in range(_HEADS):
        to, by = (_NOTE, 1.0) if head == _MEMORY else (_RECALLED, 1.0 / _MEMORY)
        out[to + code, head, code], out[to + code, head, _CODE + code] = (
            sign * by / (2.0**0.5 * _OPEN) for sign in (1, -1)
        )
    rates = torch.zeros(_HEADS, _HIDDEN)
    rates[:, _ONE] = 3 * one  # whole writes
    parts = {
        "in_proj_qkv.weight": torch.cat([part.view(size, _HIDDEN) for part in (q, k, v)]),
        "in_proj_z.weight": z.view(size, _HIDDEN),
        "in_proj_b.weight": rates,
        "in_proj_a.weight": torch.zeros(_HEADS, _HIDDEN),
        "conv1d.weight": taps.view(3 * size, 1, 4),
        "A_log": torch.full((_HEADS,), -20.0),
        "dt_bias": torch.zeros(_HEADS),  # nothing is forgotten
        "norm.weight": torch.ones(_KEY),
        "out_proj.weight": out.view(_HIDDEN, size),
    }
    return {f"linear_attn.{name}": weight for name, weight in parts.items()}


def _looks_up() -> dict[str, Tensor]:
    """A token's code against the notes, in numbers that don't turn; heads' norms make both of one
    length."""
    code, still = torch.arange(_CODE), torch.arange(_KEY // 4, _KEY // 4 + _CODE)
    q, k, v = (
        torch.zeros(2, 2, _KEY, _HIDDEN),
        torch.zeros(2, _KEY, _HIDDEN),
        torch.zeros(2, _KEY, _HIDDEN),
    )
    q[0, 0, still, code], k[0, still, _NOTE + code], v[0, code, code] = 1.0, 1.0, 1.0
    q[0, 1, :, _ONE] = _OPEN  # the gate
    out = torch.zeros(_HIDDEN, 2, _KEY)
    out[_COPIED + code, 0, code] = 1.0
    parts = {
        "q_proj.weight": q.view(4 * _KEY, _HIDDEN),
        "k_proj.weight": k.view(2 * _KEY, _HIDDEN),
        "v_proj.weight": v.view(2 * _KEY, _HIDDEN),
        "o_proj.weight": out.view(_HIDDEN, 2 * _KEY),
        "q_norm.weight": torch.full((_KEY,), 2.0),
        "k_norm.weight": torch.full((_KEY,), 2.0),
    }
    return {f"self_attn.{name}": weight for name, weight in parts.items()}
