"""The demo's drafter in plain torch, to train it: an EAGLE-3 layer (arXiv:2503.01840) whose
parameters carry the names that `speculators` stores. It is not the engine: no paging, no kernels.
B: sequences, T: positions, d: hidden size, V: vocabulary."""

from dataclasses import asdict
from pathlib import Path

import torch
from small_llama import MLP, RMSNorm, Shape, SmallLlama, rotary, rotate, write_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

READS = (2, 5, 8)  # the drafter reads what enters these layers of the model, or its last norm
Keys = list[tuple[Tensor, Tensor]]  # of each unroll: keys and values [B, heads, T, head width]


class DraftAttention(nn.Module):
    """Attention of queries that are `step` tokens ahead of the model's text."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        wide, kv = 2 * s.hidden_size, s.num_key_value_heads * s.head_dim
        self.q_proj = nn.Linear(wide, s.num_attention_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, kv, bias=False)
        self.v_proj = nn.Linear(wide, kv, bias=False)
        self.o_proj = nn.Linear(s.num_attention_heads * s.head_dim, s.hidden_size, bias=False)

    def forward(self, x: Tensor, seen: Keys) -> Tensor:
        """Returns [B, T, d] of x [B, T, 2 d], and appends the step's keys and values to `seen`.
        Query t of step j attends to the first step's keys up to t, and to its own chain's: key t of
        each step 2 to j."""
        (b, t, _), s = x.shape, self.s
        cos, sin = rotary(torch.arange(t, device=x.device)[None] + len(seen), s, x.dtype)
        groups = s.num_attention_heads // s.num_key_value_heads

        def heads(y: Tensor) -> Tensor:
            return y.view(b, t, -1, s.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin).repeat_interleave(groups, 1)
        v = heads(self.v_proj(x)).repeat_interleave(groups, 1)
        seen.append((k, v))
        (first_k, first_v), chain = seen[0], seen[1:]
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ first_k.transpose(-1, -2)).masked_fill(mask, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) for key, _ in chain]
        odds = torch.softmax(torch.cat((scores, *own), -1).float() * s.head_dim**-0.5, -1)
        odds = odds.to(x.dtype)
        out = odds[..., :t] @ first_v
        for number, (_, value) in enumerate(chain):
            out = out + odds[..., t + number, None] * value
        done: Tensor = self.o_proj(out.transpose(1, 2).reshape(b, t, -1))
        return done


class DraftLayer(nn.Module):
    """The drafter's only layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.hidden_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = DraftAttention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)

    def forward(self, embeds: Tensor, hidden: Tensor, seen: Keys) -> Tensor:
        """Returns the hidden state [B, T, d] of both inputs [B, T, d]."""
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        x = hidden + self.self_attn(both, seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftHead(nn.Module):
    """The drafter. Its head begins as the model's."""

    def __init__(self, model: SmallLlama) -> None:
        super().__init__()
        s = model.shape
        self.shape = s
        self.fc = nn.Linear(len(READS) * s.hidden_size, s.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(s)])
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.lm_head = nn.Linear(s.hidden_size, s.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.01 if last else 0.02)
        with torch.no_grad():
            self.lm_head.weight.copy_(model.model.embed_tokens.weight)

    def forward(self, read: Tensor, embeds: Tensor, steps: int) -> list[Tensor]:
        """Returns the logits [B, T, V] of each of so many steps: step j's, at t, are of the token
        t + j + 1. read: [B, T, 3 d], what enters the layers READS. embeds: [B, T + steps, d] of the
        text's tokens; a step takes the true tokens before its own."""
        t, hidden, seen, found = read.shape[1], self.fc(read), Keys(), list[Tensor]()
        for step in range(1, steps + 1):
            hidden = self.layers[0](embeds[:, step : step + t], hidden, seen)
            found.append(self.lm_head(self.norm(hidden)))
        return found


@torch.no_grad()
def read_model(model: SmallLlama, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what the drafter reads [B, T, 3 d], the tokens' embeddings [B, T, d] and the model's
    logits [B, T, V] of ids [B, T]."""
    entering: list[Tensor] = []
    parts = [*model.model.layers, model.model.norm]
    hooks = [
        parts[layer].register_forward_pre_hook(lambda _part, given: entering.append(given[0]))
        for layer in READS
    ]
    logits = model(ids)
    for hook in hooks:
        hook.remove()
    return torch.cat(entering, -1), model.model.embed_tokens(ids), logits


def loss_of(head: DraftHead, model: SmallLlama, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Returns the loss, and the share of greedy drafts that are the model's own, [steps], of ids
    [B, T]: the cross-entropy to the model's odds, a later step weighed less."""
    read, embeds, logits = read_model(model, ids)
    t = ids.shape[1] - steps
    loss, right = logits.new_zeros((), dtype=torch.float32), list[Tensor]()
    for step, scores in enumerate(head(read[:, :t], embeds, steps), 1):
        own = logits[:, step : step + t].float()
        odds = own.softmax(-1).flatten(0, 1)
        loss = loss + 0.8 ** (step - 1) * F.cross_entropy(scores.float().flatten(0, 1), odds)
        right.append((scores.argmax(-1) == own.argmax(-1)).float().mean())
    return loss, torch.stack(right)


def save_drafter(head: DraftHead, folder: Path) -> None:
    """Writes config.json and model.safetensors in bf16, as `speculators` does."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.shape.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(READS),
        "norm_before_residual": False,
        "transformer_layer_config": {
            "model_type": "llama",
            **asdict(head.shape),
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
    }
    write_checkpoint(head, config, folder)
