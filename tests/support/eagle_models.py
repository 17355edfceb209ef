"""A small random model with an EAGLE-3 drafter as `speculators` stores it, and the drafter's slow
twin: transformers' parts over all tokens so far. It knows no rows, blocks or steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_model import VOCABULARY, make_tokenizer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

LAYERS, SIZE, TOKENS = 4, 32, 4  # of the model; tokens that the drafter drafts
READS = [1, 2, 3]  # the inputs of these layers
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 192,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
KINDS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
# the switches of a drafter's config.json
SWITCHES: dict[str, dict[str, bool]] = {
    "llama": {"norm_before_residual": True},
    "qwen3": {"norm_before_fc": True, "norm_output": True},
}


@dataclass(slots=True)
class EagleTwin:
    """The model by transformers, and the drafter's parts beside it. own: True if the drafter has an
    embedding of its own."""

    model: Any
    parts: nn.ModuleDict
    tokens: Tensor  # [TOKENS] int64: the model's token of each of the drafter's
    switches: dict[str, bool]

    @torch.inference_mode()
    def drafts(self, tokens: list[int], most: int) -> list[tuple[int, float]]:
        """The greedy drafts of the tokens after the last one, and by how much each leads."""
        parts, ids = self.parts, torch.tensor(tokens)
        states = self.model.model(ids[None, :-1], output_hidden_states=True).hidden_states
        x = torch.cat([states[layer][0] for layer in READS], -1)
        if self.switches.get("norm_before_fc"):
            x = parts["input_norm"](x)
        hidden, after, found = parts["fc"](x), ids[1:], list[tuple[int, float]]()
        own = "embed_tokens" in parts
        embedding = (parts if own else self.model.model).get_submodule("embed_tokens")
        for _ in range(most):
            stream = self._layer(embedding(after), hidden)
            normed = parts["norm"](stream)
            scores = parts["lm_head"](normed[-1])
            best = scores.topk(2)
            token = int(self.tokens[best.indices[0]])
            found.append((token, float(best.values[0] - best.values[1])))
            chained = (normed if self.switches.get("norm_output") else stream)[-1:]
            hidden = torch.cat((hidden, chained))
            after = torch.cat((after, torch.tensor([token])))
        return found

    def _layer(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        layer, normed = self.parts["layer"], self.parts["hidden_norm"](hidden)
        count = hidden.shape[0]
        places = 1 + torch.arange(count)[None]  # speculators counts from 1
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        x, _ = layer.self_attn(
            hidden_states=torch.cat((layer.input_layernorm(embeds), normed), -1)[None],
            attention_mask=mask,
            position_embeddings=self.model.model.rotary_emb(hidden[None], places),
        )
        x = x[0] + (normed if self.switches.get("norm_before_residual") else hidden)
        return x + layer.mlp(layer.post_attention_layernorm(x))


def open_model(kind: str, keys: dict[str, Any]) -> Any:
    """The model of these keys by transformers."""
    name = {"llama": "Llama", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config")(
        **keys, num_hidden_layers=LAYERS, attn_implementation="eager"
    )
    torch.manual_seed(13)
    return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()


def fill(model: Any, parts: nn.ModuleDict) -> Tensor:
    """Draws the weights. Returns the model's token of each of the drafter's, which the model mostly
    says."""
    tokens = torch.arange(TOKENS) * 65 + 45  # of both ranks where there are two
    with torch.no_grad():
        for weight_name, weight in [*model.named_parameters(), *parts.named_parameters()]:
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed" in weight_name else weight.shape[-1] ** -0.5)
            else:
                weight.uniform_(0.7, 1.3)
        model.lm_head.weight[tokens] *= 6.0
    return tokens


def make_eagle_model(folder: Path, kind: str, sizes: dict[str, Any] | None = None) -> EagleTwin:
    """Writes a checkpoint and, in its folder "drafter", the drafter's. sizes: keys of their configs
    in place of the small ones."""
    keys = SMALL | (sizes or {})
    model = open_model(kind, keys)
    config = model.config
    size, kind_of_norm = config.hidden_size, type(model.model.norm)
    layer, parts = KINDS[kind](config, 0), nn.ModuleDict()
    for one in "qkv":
        old = getattr(layer.self_attn, f"{one}_proj")
        setattr(layer.self_attn, f"{one}_proj", nn.Linear(2 * size, old.out_features, bias=False))
    parts["layer"], parts["fc"] = layer, nn.Linear(3 * size, size, bias=False)
    parts["lm_head"] = nn.Linear(size, TOKENS, bias=False)
    parts["hidden_norm"], parts["norm"] = (kind_of_norm(size, 1e-6) for _ in range(2))
    if SWITCHES[kind].get("norm_before_fc"):
        parts["input_norm"] = kind_of_norm(3 * size, 1e-6)
    else:
        parts["embed_tokens"] = nn.Embedding(VOCABULARY, size)
    tokens = fill(model, parts)
    tensors = {
        name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name: weight
        for name, weight in parts.state_dict().items()
    }
    tensors["layers.0.hidden_norm.weight"] = tensors.pop("hidden_norm.weight")
    given = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "eagle_aux_hidden_state_layer_ids": READS,
        **SWITCHES[kind],
    }
    write_models(folder, model, kind, keys, tensors, tokens, given)
    return EagleTwin(model, parts, tokens, SWITCHES[kind])


def write_models(
    folder: Path,
    model: Any,
    kind: str,
    keys: dict[str, Any],
    tensors: dict[str, Tensor],
    tokens: Tensor | None,
    given: dict[str, Any],
    layers: int = 1,
) -> None:
    """Writes the model's checkpoint and the drafter's. kind, keys: of the drafter's layers.
    tensors: of the drafter. tokens: the model's token of each of the drafter's; None: the same.
    given: further keys of its config.json."""
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    folder = folder / "drafter"
    folder.mkdir()
    if tokens is not None:
        known = torch.zeros(VOCABULARY, dtype=torch.bool)
        known[tokens] = True
        tensors = tensors | {"d2t": tokens - torch.arange(TOKENS), "t2d": known}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    layer = keys | {"model_type": kind, "num_hidden_layers": layers, "rms_norm_eps": 1e-6}
    config = given | {
        "draft_vocab_size": VOCABULARY if tokens is None else TOKENS,
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(config))
