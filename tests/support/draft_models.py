"""Small random models with a layer that drafts, as checkpoints have it, and its slow twin:
transformers' layers over all tokens so far. The layers here are those for multi-token prediction,
`eagle_models` has EAGLE-3's, `dflash_models` DFlash's. It knows no rows, blocks or steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from dflash_models import FEW, make_dflash_model
from eagle_models import SWITCHES, make_eagle_model
from engine_model import VOCABULARY, make_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LAYERS = 2  # of the model; the mtp layer follows
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4Moe", EXPERTS | {"head_dim": 16, "use_qk_norm": True}),
    "deepseek_v3": (
        "DeepseekV3",
        EXPERTS
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 16,
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5",
        {
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
        },
    ),
}


@dataclass(slots=True)
class Twin:
    """The model by transformers, and the mtp layer beside it. parts: embedding norm, hidden norm,
    join, norm of the output."""

    model: Any
    layer: Any
    parts: tuple[Any, Any, Any, Any]
    on_normed: bool

    @torch.inference_mode()
    def drafts(self, tokens: list[int], most: int) -> list[tuple[int, float]]:
        """The greedy drafts of the tokens after the last one, and by how much each leads."""
        inner, (embedding_norm, hidden_norm, join, norm) = self.model.model, self.parts
        ids = torch.tensor(tokens)
        # the newest token has no hidden state yet
        hidden = inner(ids[None, :-1]).last_hidden_state[0]
        after, found = ids[1:], list[tuple[int, float]]()
        for _ in range(most):
            embeds = inner.embed_tokens(after)
            x = join(torch.cat((embedding_norm(embeds), hidden_norm(hidden)), -1))
            stream = self._layer(x)
            normed = norm(stream)
            scores = self.model.lm_head(normed[-1])
            best = scores.topk(2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            chained = (normed if self.on_normed else stream)[-1:]
            hidden, after = torch.cat((hidden, chained)), torch.cat((after, best.indices[:1]))
        return found

    def _layer(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        places = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        told = self.layer(
            x[None],
            attention_mask=mask,
            position_ids=places,
            position_embeddings=self.model.model.rotary_emb(x[None], places),
        )
        return (told[0] if isinstance(told, tuple) else told)[0]


# sizes that a GPU's kernels take
WIDE: dict[str, dict[str, Any]] = {
    "glm4_moe": {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 48},
    "deepseek_v3": {
        "hidden_size": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 48,
    },
    "qwen3_5_text": {
        "hidden_size": 128,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}


def make_mtp_model(
    folder: Path, kind: str, spread: float = 0.3, sizes: dict[str, Any] | None = None
) -> Twin:
    """Writes a checkpoint. sizes: keys of its config in place of the small ones. spread: how far
    layers change the stream and the mtp layer looks at hidden states; at 0 its drafts are what the
    model says."""
    name, more = KINDS[kind]
    config_name = f"{name}TextConfig" if name == "Qwen3_5" else f"{name}Config"
    config = getattr(transformers, config_name)(**COMMON | more | (sizes or {}))
    torch.manual_seed(11)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    kind_of_norm = type(model.model.norm)
    size = config.hidden_size
    norms = [kind_of_norm(size, config.rms_norm_eps) for _ in range(3)]
    join = nn.Linear(2 * size, size, bias=False)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed" in weight_name else weight.shape[-1] ** -0.5)
            if weight_name.endswith(
                ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
            ):
                weight.mul_(spread)
        model.lm_head.weight.mul_(1.5)
        join.weight.normal_(0.0, spread * size**-0.5)
        join.weight[:, :size] += torch.eye(size)
        for one, norm in enumerate(norms):
            norm.weight.add_(spread * torch.randn(size)) if one < 2 else None
        norms[2].weight.copy_(model.model.norm.weight)
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    parts = (norms[0], norms[1], join, norms[2])
    layer = model.model.layers[LAYERS]
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    _as_published(folder, kind, parts)
    return Twin(model, layer, parts, on_normed=kind == "qwen3_5_text")


def _as_published(folder: Path, kind: str, parts: tuple[Any, Any, Any, Any]) -> None:
    """Turns a checkpoint of LAYERS + 1 layers into one of LAYERS and an mtp layer."""
    tensors, config = load_file(folder / "model.safetensors"), folder / "config.json"
    keys = json.loads(config.read_text())
    at, names = f"model.layers.{LAYERS}", DEEPSEEK
    if kind == "qwen3_5_text":
        names = QWEN
        tensors = {name.replace(f"{at}.", "mtp.layers.0."): t for name, t in tensors.items()}
        keys["layer_types"], at = keys["layer_types"][:LAYERS], "mtp"
    else:
        # published checkpoints repeat the model's embedding and head
        tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        keys["num_nextn_predict_layers"] = 1
    for name, part in zip(names, parts, strict=True):
        tensors[f"{at}.{name}.weight"] = part.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.write_text(json.dumps(keys | {"num_hidden_layers": LAYERS}))


SPECULATORS = (*(f"eagle3 {kind}" for kind in SWITCHES), *(f"dflash {kind}" for kind in FEW))
DRAFTERS = (*KINDS, *SPECULATORS)


def mtp(most: int = 3) -> dict[str, Any]:
    """The option by which a model's own layer makes so many drafts."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": most}}


@dataclass(slots=True)
class Drafted:
    """A checkpoint, its twin, and what speculative_config asks for."""

    folder: Path
    twin: Any
    asked: dict[str, Any]

    def config(self, most: int = 3) -> dict[str, Any]:
        """The option by which the layer makes so many drafts."""
        return {"speculative_config": self.asked | {"num_speculative_tokens": most}}


def make_drafted(folder: Path, name: str, sizes: dict[str, Any] | None = None) -> Drafted:
    """Writes the checkpoint of one of DRAFTERS. sizes: keys of its config in place of the small
    ones."""
    method, _, kind = name.rpartition(" ")
    if not method:
        return Drafted(folder, make_mtp_model(folder, kind, sizes=sizes), {"method": "mtp"})
    make = {"eagle3": make_eagle_model, "dflash": make_dflash_model}[method]
    twin: Any = make(folder, kind, sizes)
    return Drafted(folder, twin, {"method": method, "model": str(folder / "drafter")})
