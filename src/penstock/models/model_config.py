"""ModelConfig: the fields of a config.json that all models have. A model type's own fields are in
its file, which `families` finds by name. `read_config` reads a whole config.json. Knows keys and
numbers; no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from penstock.json_keys import MOST, REQUIRED, Keys
from penstock.models.text_part import TextOfWhole
from penstock.quant.stored_quantization import StoredQuantization

# The largest accepted sizes, at least ten times those of any model. With larger ones, lists and
# products of sizes could be too large to compute before the model's memory use is checked.
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
Windows = tuple[int | None, ...]  # sliding window of each layer, in tokens; None: full attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Fields of every decoder; a model type's config has more."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context: int  # the most tokens of a sequence, prompt and output together
    tie_word_embeddings: bool
    windows: Windows
    dtype: ConfigDtype | None = None  # dtype named in the config
    bos_id: int | None = None
    quantization: StoredQuantization | None = (
        None  # quantization of the checkpoint's matrices; None: unquantized
    )
    # the multimodal model type whose text part this is; None: the model is text-only
    text_part: TextOfWhole | None = None
    # prefixes of the names of tensors of layers for drafting, which are loaded only for drafts
    left_out: tuple[str, ...] = ()
    mtp: bool = False  # True: there is a layer for drafting that penstock can run
    # pairs: part of a tensor's name in the checkpoint, its replacement
    renames: tuple[tuple[str, str], ...] = ()
    # end ids in config.json; those in generation_config.json take precedence, see `end_ids`
    eos_ids: tuple[int, ...] = ()


def our_name(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Returns the model's name of a checkpoint's tensor or matrix. renames: see ModelConfig."""
    own = f".{name}."
    for theirs, ours in renames:
        own = own.replace(f".{theirs}.", f".{ours}.")
    return own[1:-1]


def size(keys: Keys, name: str, default: Any = REQUIRED) -> Any:
    """Returns a size read from the config, at most MOST_OF[name]."""
    return keys.count(name, default, high=MOST_OF[name])


def read_common(keys: Keys, *, tied: bool = False) -> dict[str, Any]:
    """Reads the fields of ModelConfig except context and windows. tied: default of
    tie_word_embeddings."""
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
    """Raises CheckpointError if the KV heads don't divide the query heads, or if a head has a width
    that can't rotate."""
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
    """Returns `attends`, for each layer True if it has attention, as a tuple. Raises
    CheckpointError if no layer has attention."""
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
