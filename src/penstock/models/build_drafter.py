"""make_drafter: makes the layers of a drafter that has a checkpoint of its own."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.layers.attention import Attention
from penstock.layers.decoder_layer import DecoderLayer
from penstock.layers.dflash_layer import DFlashLayer
from penstock.layers.draft_head import DraftHead
from penstock.layers.eagle_layer import EagleLayer
from penstock.layers.linear import Linear
from penstock.layers.maker import Heads, Maker
from penstock.layers.mlp import Mlp
from penstock.layers.norm import Norm
from penstock.models.speculators_format import DFlashConfig, EagleConfig, SpeculatorConfig


def make_drafter(config: SpeculatorConfig, make: Maker) -> EagleLayer | DFlashLayer:
    """Makes the drafter of a config, in the model's dtype; its weights are not loaded yet. make:
    the model's, without its quantization."""
    if isinstance(config, DFlashConfig):
        return _make_dflash(config, _Parts(config, make))
    assert isinstance(config, EagleConfig)
    return _make_eagle3(config, _Parts(config, make))


@dataclass(slots=True)
class _Parts:
    """Makes the parts that drafters of any kind have."""

    config: SpeculatorConfig
    make: Maker

    @property
    def hidden(self) -> int:
        return self.config.layer.hidden_size

    def norm(self, name: str, size: int | None = None) -> Norm:
        eps = self.config.layer.rms_norm_eps
        return self.make.norm(f"{name}.weight", size or self.hidden, eps)

    def join(self) -> Linear:
        return self.make.linear("fc", self.hidden, len(self.config.reads) * self.hidden)

    def attention(self, at: str, into: int | None = None) -> Attention:
        """Makes attention. at: prefix of its layer. into: size of its input; None: the hidden
        size."""
        c, at = self.config.layer, f"{at}.self_attn"
        norms = None
        if c.qk_norm:
            norms = self.norm(f"{at}.q_norm", c.head_dim), self.norm(f"{at}.k_norm", c.head_dim)
        return self.make.attention(
            at,
            self.hidden,
            Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim),
            c.rope,
            into=into,
            qkv_bias=c.qkv_bias,
            out_bias=c.o_bias,
            norms=norms,
        )

    def mlp(self, at: str) -> Mlp:
        c = self.config.layer
        return self.make.mlp(f"{at}.mlp", self.hidden, c.intermediate_size, bias=c.mlp_bias)

    def head(self) -> DraftHead:
        tokens, every = self.config.tokens, self.config.vocabulary
        product = self.make.linear("lm_head", tokens, self.hidden)
        return DraftHead(product, every, self.make.vocabulary_range(every))


def _make_eagle3(config: EagleConfig, parts: _Parts) -> EagleLayer:
    at, hidden = "layers.0", parts.hidden
    embedding = None
    if config.own_table:
        embedding = parts.make.embedding("embed_tokens.weight", config.vocabulary, hidden)
    before = parts.norm("input_norm", len(config.reads) * hidden) if config.joined_norm else None
    return EagleLayer(
        reads=config.reads,
        joined_norm=before,
        join=parts.join(),
        embedding_norm=parts.norm(f"{at}.input_layernorm"),
        hidden_norm=parts.norm(f"{at}.hidden_norm"),
        attention=parts.attention(at, 2 * hidden),
        mlp_norm=parts.norm(f"{at}.post_attention_layernorm"),
        mlp=parts.mlp(at),
        norm=parts.norm("norm"),
        head=parts.head(),
        embedding=embedding,
        normed_residual=config.normed_residual,
        on_normed=config.on_normed,
    )


def _make_dflash(config: DFlashConfig, parts: _Parts) -> DFlashLayer:
    names = [f"layers.{number}" for number in range(config.layer.num_layers)]
    attentions = tuple(parts.attention(at) for at in names)
    return DFlashLayer(
        reads=config.reads,
        join=parts.join(),
        joined_norm=parts.norm("hidden_norm"),
        blocks=[
            DecoderLayer(
                parts.norm(f"{at}.input_layernorm"),
                attention,
                parts.norm(f"{at}.post_attention_layernorm"),
                parts.mlp(at),
            )
            for at, attention in zip(names, attentions, strict=True)
        ],
        attentions=attentions,
        norm=parts.norm("norm"),
        head=parts.head() if config.tokens < config.vocabulary else None,
        mask=config.mask,
    )
