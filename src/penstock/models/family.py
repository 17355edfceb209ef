"""Family: what one model_type does differently from the decoder that all share. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.models.keys import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Switches of the shared decoder; ModelConfig has fields of the same names."""

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model_type, and how its config keys become Differences."""

    model_type: str
    architecture: str
    read: Callable[[Keys, int], Differences]  # (keys, num_layers)
    head_dim: int | None = None  # where config.json doesn't say; None: hidden_size / heads
    kv_heads_default_to_heads: bool = False  # where config.json doesn't say; False: it must


def given_window(keys: Keys, absent: int) -> int | None:
    """`sliding_window`: a key that isn't there has the model type's own default, a null means no window."""
    return keys.count("sliding_window", None if "sliding_window" in keys.rest else absent)  # type: ignore[no-any-return]


def qwen_windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Windows as Qwen2 and Qwen3 configure them: per layer by `layer_types`, or from layer `max_window_layers` on.

    `sliding_window` counts only where `use_sliding_window` is true; where false, transformers 5 writes null for it.
    """
    used = keys.flag("use_sliding_window")
    window = given_window(keys, 4096)
    first = keys.count("max_window_layers", 28, low=0)
    types = keys.take("layer_types", None)
    if types is None:
        types = ["sliding_attention" if used and layer >= first else "full_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise keys.fail(f"layer_types must list {num_layers} layers, one for each of num_hidden_layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.fail(f"layer_types holds {kind!r}: only full_attention and sliding_attention are supported")
    if "sliding_attention" in types and not used:
        raise keys.fail("layer_types asks for sliding_attention but use_sliding_window is false: set one right")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
