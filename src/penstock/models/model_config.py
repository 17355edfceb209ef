"""ModelConfig: what a model's config.json says, in our words; read key by key, the unknown refused by name.

It reads what transformers 4 and 5 write (`rope_scaling` and `rope_theta`, or `rope_parameters`; `torch_dtype` or
`dtype`). No torch: a wrong folder is told of before anything heavy is loaded. What differs between model types lies in
a file for each; `FAMILIES` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from penstock.errors import CheckpointError
from penstock.layers.rope_config import RopeConfig
from penstock.models import llama, mistral, qwen2, qwen3
from penstock.models.family import Family
from penstock.models.keys import ANYTHING, MOST, REQUIRED, Keys, read_json
from penstock.models.rope_keys import read_rope, stretched_context

# The most that a size may be: ten times and more what any model has. No one of them alone makes lists or tables that
# fill a memory, nor a product that no integer holds, before the weights or the memory that there is refuse the model.
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
FAMILIES: dict[str, Family] = {f.model_type: f for f in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)}

# Keys that change no number of a forward pass: key -> the value that changes nothing, or ANYTHING.
NOTHING: dict[str, Any] = {
    # where it came from
    "_name_or_path": ANYTHING,
    "transformers_version": ANYTHING,
    "unsloth_version": ANYTHING,
    "unsloth_fixed": ANYTHING,
    # training
    "initializer_range": ANYTHING,
    "attention_dropout": ANYTHING,
    "problem_type": ANYTHING,
    "finetuning_task": ANYTHING,
    "task_specific_params": ANYTHING,
    # how transformers runs it, not what it computes (pretraining_tp splits products, their sum is the same)
    "use_cache": ANYTHING,
    "pretraining_tp": ANYTHING,
    "output_attentions": ANYTHING,
    "output_hidden_states": ANYTHING,
    "output_scores": ANYTHING,
    "return_dict": ANYTHING,
    "return_dict_in_generate": ANYTHING,
    "use_return_dict": ANYTHING,
    "torchscript": ANYTHING,
    "chunk_size_feed_forward": ANYTHING,
    "_attn_implementation": ANYTHING,
    "_attn_implementation_autoset": ANYTHING,
    "attn_implementation": ANYTHING,
    "tf_legacy_loss": ANYTHING,
    "use_bfloat16": ANYTHING,
    # words of the tokenizer or of a classifier's labels
    "tokenizer_class": ANYTHING,
    "pad_token_id": ANYTHING,
    "sep_token_id": ANYTHING,
    "prefix": ANYTHING,
    "id2label": ANYTHING,
    "label2id": ANYTHING,
    # generation's defaults as transformers 4 once wrote them here: they are read from generation_config.json alone
    "do_sample": ANYTHING,
    "early_stopping": ANYTHING,
    "max_length": ANYTHING,
    "min_length": ANYTHING,
    "temperature": ANYTHING,
    "top_k": ANYTHING,
    "top_p": ANYTHING,
    "typical_p": ANYTHING,
    "repetition_penalty": ANYTHING,
    "length_penalty": ANYTHING,
    "diversity_penalty": ANYTHING,
    "num_beams": ANYTHING,
    "num_beam_groups": ANYTHING,
    "num_return_sequences": ANYTHING,
    "no_repeat_ngram_size": ANYTHING,
    "encoder_no_repeat_ngram_size": ANYTHING,
    "remove_invalid_values": ANYTHING,
    # parts that these models could have, switched off
    "is_decoder": ANYTHING,  # they are decoders, whatever it says
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,  # read where a model has the choice
    "mlp_bias": False,
    "use_sliding_window": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a decoder."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # positions: prompt and output of a sequence together
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # [num_layers]: sliding window of each layer, None: it sees everything
    hidden_act: Literal["silu"] = "silu"
    dtype: ConfigDtype | None = None  # what the checkpoint is meant to be run in
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # config.json's; generation_config.json's come first: see `end_ids`

    @property
    def uses_window(self) -> bool:
        return any(window is not None for window in self.windows)


def read_model_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json. CheckpointError, one line, for whatever is missing or not understood."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no config.json: give a model folder as transformers saves it, or a hub id"
        )
    return model_config_of(read_json(path), str(path))


def model_config_of(raw: dict[str, Any], where: str) -> ModelConfig:
    """The config of a parsed config.json; `where` opens the errors."""
    keys = Keys(raw, where)
    family = _family(keys)
    if keys.take("quantization_config", None) is not None:
        raise keys.fail("key 'quantization_config' is not supported yet: take the model's unquantized checkpoint")
    shapes = _shapes(keys, family)
    rope = read_rope(keys, shapes["max_position_embeddings"])
    differences = family.read(keys, shapes["num_layers"])
    shapes["context"] = max(shapes.pop("max_position_embeddings"), stretched_context(rope))
    config = ModelConfig(
        model_type=family.model_type,
        architecture=family.architecture,
        rope=rope,
        rms_norm_eps=keys.positive("rms_norm_eps", 1e-6),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        hidden_act=_hidden_act(keys),
        dtype=_dtype(keys),
        bos_id=_bos_id(keys),
        eos_ids=keys.ids("eos_token_id") or (),
        **shapes,
        **{f.name: getattr(differences, f.name) for f in fields(differences)},
    )
    keys.refuse_rest(NOTHING, f"model_type {family.model_type!r}")
    _check(keys, config)
    return config


def _family(keys: Keys) -> Family:
    model_type = keys.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise keys.fail(f"model_type {model_type!r} is not supported: supported are {', '.join(sorted(FAMILIES))}")
    named = keys.take("architectures", [family.architecture])
    if named != [family.architecture]:
        raise keys.fail(f"architectures {named!r} is not supported: for {model_type} only [{family.architecture!r}] is")
    return family


def _shapes(keys: Keys, family: Family) -> dict[str, Any]:
    def size(name: str, default: Any = REQUIRED) -> Any:
        return keys.count(name, default, high=MOST_OF[name])

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    default_width = family.head_dim if family.head_dim is not None else hidden // heads
    default_kv_heads = heads if family.kv_heads_default_to_heads else REQUIRED
    return {
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": size("num_key_value_heads", default_kv_heads),
        "head_dim": size("head_dim", default_width),
        "vocab_size": size("vocab_size"),
        "intermediate_size": size("intermediate_size"),
        "num_layers": size("num_hidden_layers"),
        "max_position_embeddings": size("max_position_embeddings"),
    }


def _hidden_act(keys: Keys) -> Literal["silu"]:
    act = keys.text("hidden_act", "silu")
    if act not in ("silu", "swish"):  # two names of one function
        raise keys.fail(f"hidden_act {act!r} is not supported: only 'silu' is")
    return "silu"


def _dtype(keys: Keys) -> ConfigDtype | None:
    new, old = keys.text("dtype", None), keys.text("torch_dtype", None)
    if new is not None and old is not None and new != old:
        raise keys.fail(f"dtype ({new}) and torch_dtype ({old}) disagree: remove the wrong one")
    named = new if new is not None else old
    if named is not None and named not in get_args(ConfigDtype):
        raise keys.fail(f"dtype {named!r} is not supported: supported are {', '.join(get_args(ConfigDtype))}")
    return cast(ConfigDtype | None, named)


def _bos_id(keys: Keys) -> int | None:
    ids = keys.ids("bos_token_id")
    if ids is not None and len(ids) != 1:
        raise keys.fail(f"bos_token_id must be one token id, not {list(ids)}")
    return ids[0] if ids else None


def _check(keys: Keys, config: ModelConfig) -> None:
    if config.heads % config.kv_heads:
        raise keys.fail(
            f"num_attention_heads ({config.heads}) is no multiple of num_key_value_heads ({config.kv_heads})"
        )
    if not config.head_dim:
        raise keys.fail(f"hidden_size ({config.hidden_size}) is below num_attention_heads ({config.heads})")
    if config.head_dim > MOST_OF["head_dim"]:
        raise keys.fail(
            f"hidden_size ({config.hidden_size}) makes heads wider than {MOST_OF['head_dim']}: num_attention_heads is "
            f"{config.heads}"
        )
    if config.head_dim % 2:
        raise keys.fail(f"head_dim ({config.head_dim}) is odd: rotary positions need pairs")
    outside = [i for i in config.eos_ids if i >= config.vocab_size]
    if outside:
        raise keys.fail(f"eos_token_id {outside[0]} is outside the vocabulary of {config.vocab_size}")
