"""A small random model with a DFlash drafter as `speculators` stores it, and the drafter's slow
twin: plain torch over all tokens so far. It knows no rows, blocks or steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eagle_models import READS, SMALL, TOKENS, fill, open_model, write_models
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

LAYERS, MASK, BLOCK = 2, 3, 9  # of the drafter
SEED = 21  # with it some drafts are right at every place
# kind of the model -> True if the drafter drafts few of its tokens, by a head of its own
FEW = {"llama": False, "qwen3": True}


@dataclass(slots=True)
class DFlashTwin:
    """The model by transformers, and the drafter's parts beside it."""

    model: Any
    parts: nn.ModuleDict
    tokens: Tensor | None  # [TOKENS] int64: the model's token of each of the drafter's; None: same

    @torch.inference_mode()
    def drafts(self, tokens: list[int], most: int) -> list[tuple[int, float]]:
        """The greedy drafts of the tokens after the last one, and by how much each leads."""
        ids, found = torch.tensor(tokens), list[tuple[int, float]]()
        states = self.model.model(ids[None, :-1], output_hidden_states=True).hidden_states
        scores = self.scores(torch.cat([states[layer][0] for layer in READS], -1), tokens[-1], most)
        for best in (each.topk(2) for each in scores[1:]):
            token = int(best.indices[0])
            token = token if self.tokens is None else int(self.tokens[token])
            found.append((token, float(best.values[0] - best.values[1])))
        return found

    def scores(self, read: Tensor, newest: int, most: int) -> Tensor:
        """The scores [1 + most, drafter's tokens] at the newest token and at each mask. read: the
        joined outputs [n, 3 d] of the model's layers for the n tokens before the newest one."""
        parts = self.parts
        context = parts["hidden_norm"](parts["fc"](read))
        x = self.model.model.embed_tokens(torch.tensor([newest, *[MASK] * most]))
        for layer in parts["layers"]:
            x = x + self._attention(layer.self_attn, context, layer.input_layernorm(x))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        head = self.model.lm_head if self.tokens is None else parts["lm_head"]
        scored: Tensor = head(parts["norm"](x))
        return scored

    def _attention(self, part: Any, context: Tensor, x: Tensor) -> Tensor:
        """Each token of x [m, d] sees the context's n tokens and all of x, at the next places."""
        both, width = torch.cat((context, x)), part.head_dim
        q = part.q_norm(part.q_proj(x).view(len(x), -1, width)).transpose(0, 1)
        k = part.k_norm(part.k_proj(both).view(len(both), -1, width)).transpose(0, 1)
        v = part.v_proj(both).view(len(both), -1, width).transpose(0, 1)
        cos, sin = self.model.model.rotary_emb(both[None], torch.arange(len(both))[None])
        q, k = _rotated(q, cos[0, -len(x) :], sin[0, -len(x) :]), _rotated(k, cos[0], sin[0])
        k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
        weights = (q @ k.mT * width**-0.5).softmax(-1)
        mixed: Tensor = part.o_proj((weights @ v).transpose(0, 1).flatten(1))
        return mixed


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def make_dflash_model(folder: Path, kind: str, sizes: dict[str, Any] | None = None) -> DFlashTwin:
    """Writes a checkpoint and, in its folder "drafter", the drafter's. sizes: keys of their configs
    in place of the small ones."""
    keys = SMALL | (sizes or {})
    model = open_model(kind, keys)
    config = Qwen3Config(**keys, num_hidden_layers=LAYERS, attn_implementation="eager")
    size, parts = config.hidden_size, nn.ModuleDict()
    parts["layers"] = nn.ModuleList(Qwen3DecoderLayer(config, at) for at in range(LAYERS))
    parts["fc"] = nn.Linear(len(READS) * size, size, bias=False)
    parts["hidden_norm"], parts["norm"] = (Qwen3RMSNorm(size, 1e-6) for _ in range(2))
    if FEW[kind]:
        parts["lm_head"] = nn.Linear(size, TOKENS, bias=False)
    torch.manual_seed(SEED)
    tokens = fill(model, parts)
    with torch.no_grad():  # what a mask sees decides its token
        model.model.embed_tokens.weight[MASK] *= 0.1
    given = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": READS,
        "block_size": BLOCK,
        "mask_token_id": MASK,
    }
    few = tokens if FEW[kind] else None
    tensors: dict[str, Tensor] = parts.state_dict()
    write_models(folder, model, kind, keys, tensors, few, given, LAYERS)
    return DFlashTwin(model, parts, few)
