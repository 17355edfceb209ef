"""ModelConfig: what a model's config.json says, in our words; read key by key, the unknown refused
by name.

Here is what every model has, and no torch; a model type's own fields are in its file, which
`families` finds by its name, and `read_config` reads a whole config.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from penstock.models.keys import MOST, REQUIRED, Keys
from penstock.models.text_part import TextOfWhole
from penstock.quant.stored_quantization import StoredQuantization

# The most that a size may be: ten times and more what any model has. No one of them alone makes
# lists or tables that fill a memory, nor a product that no integer holds, before the weights or the
# memory that there is refuse the model.
MOST_OF = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "vocab_size": 2**22,
    "max_position_embeddings": MOST,
}
ConfigDtype = Literal["bfloat16", "float16", "float32"]
Windows = tuple[int | None, ...]  # of each layer, None: it sees everything


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every decoder has; a model type's config has more."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context: int  # positions: prompt and output of a sequence together
    tie_word_embeddings: bool
    windows: Windows
    dtype: ConfigDtype | None = None  # what the checkpoint is meant to be run in
    bos_id: int | None = None
    quantization: StoredQuantization | None = (
        None  # how the checkpoint's matrices are stored; None: in floats
    )
    text_part: TextOfWhole | None = None  # of a multimodal checkpoint
    # how tensors begin that a checkpoint has for what is not served: drafting heads
    left_out: tuple[str, ...] = ()
    # parts of tensors' names that a checkpoint may have, and ours for them
    renames: tuple[tuple[str, str], ...] = ()
    # config.json's; generation_config.json's come first: see `end_ids`
    eos_ids: tuple[int, ...] = ()


def our_name(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Returns a tensor's or matrix's name with our parts in place of a checkpoint's
    (ModelConfig.renames)."""
    own = f".{name}."
    for theirs, ours in renames:
        own = own.replace(f".{theirs}.", f".{ours}.")
    return own[1:-1]


def size(keys: Keys, name: str, default: Any = REQUIRED) -> Any:
    """Reads a size, up to MOST_OF."""
    return keys.count(name, default, high=MOST_OF[name])


def read_common(keys: Keys, *, tied: bool = False) -> dict[str, Any]:
    """Reads the fields of ModelConfig but for context and windows. tied: what holds where
    config.json doesn't say."""
    return {
        "vocab_size": size(keys, "vocab_size"),
        "hidden_size": size(keys, "hidden_size"),
        "num_layers": size(keys, "num_hidden_layers"),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", tied),
        "dtype": _dtype(keys),
        "bos_id": _bos_id(keys),
        "eos_ids": keys.ids("eos_token_id") or (),
    }


def check_heads(keys: Keys, hidden: int, heads: int, kv_heads: int, width: int) -> None:
    """Refuses heads that don't divide, and widths that no rotary position has."""
    if heads % kv_heads:
        raise keys.fail(
            f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})"
        )
    if not width:
        raise keys.fail(f"hidden_size ({hidden}) is below num_attention_heads ({heads})")
    if width > MOST_OF["head_dim"]:
        raise keys.fail(
            f"hidden_size ({hidden}) makes heads wider than {MOST_OF['head_dim']}:"
            f" num_attention_heads is {heads}"
        )
    if width % 2:
        raise keys.fail(f"head_dim ({width}) is odd: rotary positions need pairs")


def some_attend(keys: Keys, attends: Iterable[bool]) -> tuple[bool, ...]:
    """Returns whether each layer attends; refuses a model of which none does."""
    each = tuple(attends)
    if not any(each):
        raise keys.fail("no layer attends: models of recurrent layers alone are not supported")
    return each


def _dtype(keys: Keys) -> ConfigDtype | None:
    named = keys.same(**{name: keys.text(name, None) for name in ("dtype", "torch_dtype")})
    if named is not None and named not in get_args(ConfigDtype):
        raise keys.fail(
            f"dtype {named!r} is not supported: supported are {', '.join(get_args(ConfigDtype))}"
        )
    return cast(ConfigDtype | None, named)


def _bos_id(keys: Keys) -> int | None:
    ids = keys.ids("bos_token_id")
    if ids is not None and len(ids) != 1:
        raise keys.fail(f"bos_token_id must be one token id, not {list(ids)}")
    return ids[0] if ids else None
