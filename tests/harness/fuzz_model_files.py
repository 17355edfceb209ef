"""A model's files for fuzzing, made by hypothesis: configs, safetensors and their index, sound or
lying.

As fuzz_inputs.py, whose ways to bend and to write JSON these use. It knows the shapes of good
files.
"""

from __future__ import annotations

from typing import Any

from fuzz_inputs import LEAVES, NUMBERS, TEXTS, VALUES, bent, render
from hypothesis import strategies as st

CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "eos_token_id": [1, 2],
        "bos_token_id": 0,
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
    },
    {
        "model_type": "mistral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "linear", "factor": 2},
    },
)
_ROPE = bent(
    {"rope_type": "yarn", "factor": 4.0},
    {
        "rope_type": st.sampled_from(
            ["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
        ),
        "type": st.sampled_from(["default", "linear", "yarn"]),
        "factor": NUMBERS,
        "original_max_position_embeddings": NUMBERS,
        "rope_theta": NUMBERS,
        "low_freq_factor": NUMBERS,
        "high_freq_factor": NUMBERS,
        "beta_fast": NUMBERS,
        "attention_factor": NUMBERS,
    },
)
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_CONFIG: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        (*_SIZES, "vocab_size", "max_position_embeddings", "head_dim", "sliding_window"), NUMBERS
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta", "max_window_layers", "initializer_range"), NUMBERS
    ),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), st.booleans()
    ),
    **dict.fromkeys(("eos_token_id", "bos_token_id"), NUMBERS | st.lists(NUMBERS, max_size=3)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _ROPE),
    **dict.fromkeys(
        ("dtype", "torch_dtype", "hidden_act", "model_type"),
        TEXTS | st.sampled_from(["float16", "silu"]),
    ),
    "architectures": st.lists(TEXTS, max_size=2),
    "layer_types": st.lists(st.sampled_from(["full_attention", "sliding_attention"]), max_size=4),
    "quantization_config": VALUES,
    "auto_map": VALUES,
}
_GENERATION: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"), NUMBERS
    ),
    "eos_token_id": NUMBERS | st.lists(NUMBERS, max_size=3),
    "num_beams": NUMBERS,
    "bad_words_ids": VALUES,
}
_ADDED = st.dictionaries(
    st.sampled_from(["0", "256", "257", "300", "-1", "x", "9" * 4_000]),
    st.fixed_dictionaries(
        {}, optional={"content": TEXTS | LEAVES, "special": LEAVES, "lstrip": LEAVES}
    )
    | LEAVES,
    max_size=2,
)
_TOKENIZER: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("bos_token", "eos_token", "pad_token"), TEXTS | st.fixed_dictionaries({"content": TEXTS})
    ),
    **dict.fromkeys(
        ("extra_special_tokens", "additional_special_tokens"), VALUES | st.lists(TEXTS, max_size=2)
    ),
    "added_tokens_decoder": _ADDED,
    "chat_template": TEXTS | VALUES,
}


def configs() -> st.SearchStrategy[bytes]:
    return st.sampled_from(CONFIGS).flatmap(lambda base: bent(base, _CONFIG)).map(render)


def generation_configs() -> st.SearchStrategy[bytes]:
    return bent({"eos_token_id": 2}, _GENERATION).map(render)


def tokenizer_configs() -> st.SearchStrategy[bytes]:
    return bent({"tokenizer_class": "PreTrainedTokenizerFast"}, _TOKENIZER).map(render)


@st.composite
def shards(draw: st.DrawFn) -> bytes:
    """A safetensors file: sound, or with a header that lies."""
    data = bytes(range(96))
    whole = {
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [32], "data_offsets": [32, 96]},
    }
    entry = bent(
        whole["b"],
        {
            "dtype": st.sampled_from(["F32", "F16", "F64", "I8", "BOOL", "F4", ""]),
            "shape": st.lists(NUMBERS, max_size=3)
            | st.just([2**40, 2**40])
            | st.just([-4, -8])
            | st.just([1] * 40),
            "data_offsets": st.lists(NUMBERS, max_size=3)
            | st.sampled_from([[96, 32], [0, 96], [32, 97], [-64, 0], [2**63 - 64, 2**63]]),
        },
    )
    tensors = {"a": whole["a"] if draw(st.integers(0, 3)) < 3 else draw(VALUES), "b": draw(entry)}
    more = {
        "a": entry,
        "b": VALUES,
        "c": entry,
        "__metadata__": st.dictionaries(TEXTS, TEXTS | VALUES, max_size=2),
    }
    header = render(draw(bent(tensors, more)))
    header += b" " * draw(st.integers(0, 9))
    lie = draw(
        st.sampled_from([None] * 6 + [0, 1, 2**31, 2**63, 2**64 - 1, 99_999_999, len(header) + 1])
    )
    return (len(header) if lie is None else lie).to_bytes(8, "little") + header + data


@st.composite
def indexes(draw: st.DrawFn) -> bytes:
    """model.safetensors.index.json over one shard that is there."""
    files = st.sampled_from(
        [
            "model-1.safetensors",
            "../x.safetensors",
            "/etc/passwd",
            "x.bin",
            "",
            "\x00.safetensors",
            "a" * 300,
            ".",
            "a" * 300 + ".safetensors",
            "é" * 140 + ".safetensors",
            "folder.safetensors",
            "none.safetensors",
        ]
    )
    names = st.sampled_from(["a", "b", "c", "x" * 5_000, "\u2028", ""])
    kept = st.dictionaries(names, files | LEAVES, max_size=4)
    base = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    return render(draw(bent(base, {"weight_map": kept, "metadata": VALUES})))
