"""A Llama in plain torch to train the demo with: parameters carry the names that checkpoints use.

It is not the engine: no paging, no kernels, no serving. It gives logits for training and samples
for the measurement at the training's end, and writes and reads the folder that `transformers` and
the engine load.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

Cache = list[tuple[Tensor, Tensor]]  # a layer: keys and values [batch, kv_heads, room, head_width]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, under the names of `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 896
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = (
        2304  # trained on 2,048; measured to hold so far, and no further (docs/demo.md)
    )
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm, worked out in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on `[batch, heads, time, width]`; halves are paired, as checkpoints of Llama
    have it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary(positions: Tensor, s: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of positions [batch, time], [batch, 1, time, width] each."""
    steps = torch.arange(0, s.head_dim, 2, device=positions.device, dtype=torch.float32)
    # [batch, 1, time, width / 2]
    angles = positions[:, None, :, None].float() * s.rope_theta ** -(steps / s.head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden_size, s.num_attention_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, s.num_key_value_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, s.num_key_value_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.num_attention_heads * s.head_dim, s.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: tuple[Tensor, Tensor] | None,
        at: int,
        mask: Tensor | None,
    ) -> Tensor:
        """x `[batch, time, hidden]`. With a cache, time begins at `at` and `mask` `[batch, 1, time,
        at + time]` is True where a query may look; without one the attention is causal."""
        b, t, _ = x.shape
        width = self.s.head_dim
        q = rotate(self.q_proj(x).view(b, t, -1, width).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(b, t, -1, width).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, t, -1, width).transpose(1, 2)
        if cache is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            cache[0][:, :, at : at + t], cache[1][:, :, at : at + t] = k, v
            k, v = cache[0][:, :, : at + t], cache[1][:, :, : at + t]
            group = q.shape[1] // k.shape[1]
            # query heads of a KV head, one after the other
            rows = q.reshape(b, k.shape[1], group * t, width)
            seen = None if mask is None else mask.repeat(1, 1, group, 1)
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen).view(b, -1, t, width)
        done: Tensor = self.o_proj(out.transpose(1, 2).reshape(b, t, -1))
        return done


class MLP(nn.Module):
    """The gated MLP with SiLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: tuple[Tensor, Tensor] | None,
        at: int,
        mask: Tensor | None,
    ) -> Tensor:
        """`[batch, time, hidden]` to the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, at, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)


class SmallLlama(nn.Module):
    """The causal language model; its head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    weight, std=0.02 / ((2 * shape.num_hidden_layers) ** 0.5 if last else 1.0)
                )

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        at: int = 0,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits `[batch, time, vocabulary]` of ids `[batch, time]`, or of the last position with
        `last_only`."""
        s = self.shape
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.model.embed_tokens(ids)
        x = (
            x.to(torch.get_autocast_dtype(ids.device.type))
            if torch.is_autocast_enabled(ids.device.type)
            else x
        )
        cos, sin = rotary(positions, s, x.dtype)
        for number, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, None if cache is None else cache[number], at, mask)
        x = self.model.norm(x[:, -1:] if last_only else x)
        logits: Tensor = F.linear(x, self.model.embed_tokens.weight)
        return logits

    def new_cache(self, batch: int, room: int) -> Cache:
        """Room for `room` tokens of `batch` sequences."""
        s, like = self.shape, self.model.norm.weight
        size = (batch, s.num_key_value_heads, room, s.head_dim)
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in range(s.num_hidden_layers)]


def save(model: SmallLlama, folder: Path, end_ids: list[int], pad_id: int) -> None:
    """Writes config.json, generation_config.json and model.safetensors in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_ids[0],
        "pad_token_id": pad_id,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {"eos_token_id": end_ids, "pad_token_id": pad_id}
    (folder / "generation_config.json").write_text(
        json.dumps(generation, indent=2) + "\n", encoding="utf-8"
    )
    write_checkpoint(model, config, folder)


def write_checkpoint(module: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Writes config.json and model.safetensors in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {
        name: w.detach().to("cpu", torch.bfloat16).contiguous()
        for name, w in module.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, device: str, dtype: torch.dtype) -> SmallLlama:
    """Reads what `save` wrote."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = SmallLlama(Shape(**{name: config[name] for name in asdict(Shape())}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device, dtype).eval()
