"""config.json and generation_config.json: what decides of real models' ones, both spellings, and
every refusal.

(That each key which transformers writes is understood is in test_against_transformers.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointError
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import DenseConfig
from penstock.models.families import families
from penstock.models.gemma3_text import GemmaConfig
from penstock.models.generation_config import GenerationDefaults, end_ids, read_generation_defaults
from penstock.models.model_config import ModelConfig
from penstock.models.model_list import CATALOG
from penstock.models.read_config import model_config_of, read_model_config
from penstock.models.text_part import TEXT_PARTS
from penstock.request import SamplingParams
from penstock.row_table import RANGES

LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
MISTRAL_7B = {name: value for name, value in LLAMA_2_7B.items() if name != "rope_scaling"} | {
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {name: value for name, value in QWEN25_05B.items() if name != "use_mrope"} | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
}
QWEN3_CODER: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "max_position_embeddings": 131072,
    "vocab_size": 100,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "rope_theta": 150000,
}
GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "vocab_size": 100,
    "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
REMOVE = object()


def _changed(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in (raw | changes).items() if v is not REMOVE}


PHI_4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    "bos_token_id": 199999,
    "embd_pdrop": 0.0,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 200064,
}
OLMO_3: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "max_position_embeddings": 65536,
    "vocab_size": 100278,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "sliding_window": 4096,
}


def _read(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return model_config_of(_changed(raw, changes), "config.json")


def test_llama_3_2() -> None:
    config = _read(LLAMA_32_1B)
    assert (config.heads, config.kv_heads, config.head_dim, config.num_layers) == (32, 8, 64, 16)
    assert config.context == 131072 and config.tie_word_embeddings and config.dtype == "bfloat16"
    assert config.eos_ids == (128001, 128008, 128009) and config.bos_id == 128000
    assert config.rope == RopeConfig(
        theta=500_000.0,
        kind="llama3",
        factor=32.0,
        original_context=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    assert config.windows == (None,) * 16


def test_llama_2_has_as_many_kv_heads_as_heads_and_the_default_rope() -> None:
    config = _read(LLAMA_2_7B)
    assert (config.kv_heads, config.head_dim, config.dtype, config.eos_ids) == (
        32,
        128,
        "float16",
        (2,),
    )
    assert config.rope == RopeConfig(theta=10_000.0) and config.rms_norm_eps == 1e-5


def test_mistral_windows() -> None:
    assert _read(MISTRAL_7B).windows == (4096,) * 32
    assert _read(MISTRAL_7B, sliding_window=None).windows == (None,) * 32
    assert _read(MISTRAL_7B, sliding_window=REMOVE).windows == (4096,) * 32, "its own default"


def test_qwen() -> None:
    config = _read(QWEN25_05B)
    assert (
        config.qkv_bias
        and not config.o_bias
        and config.windows == (None,) * 24
        and config.head_dim == 64
    )
    config = _read(QWEN3_06B)
    assert config.qk_norm and not config.qkv_bias and config.head_dim == 128
    assert _read(QWEN3_06B, head_dim=REMOVE).head_dim == 128, (
        "Qwen3's own default, not hidden_size / heads"
    )
    assert _read(QWEN3_06B, attention_bias=True).o_bias


def test_qwen_windows_by_number_and_by_layer() -> None:
    on = {"use_sliding_window": True, "sliding_window": 100}
    assert _read(QWEN25_05B, **on, max_window_layers=22).windows == (None,) * 22 + (100, 100)
    types = ["sliding_attention", "full_attention"] * 12
    assert _read(QWEN25_05B, **on, layer_types=types).windows == (100, None) * 12


def test_qwen3_coder_as_it_is_published() -> None:
    config = _read(QWEN3_CODER)
    assert (
        config.qk_norm
        and not config.qkv_bias
        and config.experts == 128
        and config.windows == (None,) * 48
    )
    plain = {"use_qk_norm": REMOVE, "qkv_bias": REMOVE, "shared_expert_intermediate_size": REMOVE}
    assert _read(QWEN3_CODER, **plain) == config


def test_all_layers_of_qwen3_moe_have_its_window_or_none() -> None:
    on = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": REMOVE}
    assert _read(QWEN3_CODER, **on).windows == (100,) * 48


@pytest.mark.parametrize(
    ("raw", "changes", "said"),
    [
        (QWEN3_CODER, {"use_qk_norm": False}, "key 'use_qk_norm' (false) is not supported"),
        (
            QWEN3_CODER,
            {"shared_expert_intermediate_size": 512},
            "key 'shared_expert_intermediate_size' (512)",
        ),
        (
            QWEN3_CODER,
            {"use_sliding_window": True, "sliding_window": 9},
            "key 'max_window_layers' (28)",
        ),
        (
            QWEN3_CODER,
            {"num_local_experts": 64},
            "num_local_experts (64) and num_experts (128) disagree",
        ),
        (
            MISTRAL_7B,
            {"use_sliding_window": False},
            "key 'use_sliding_window' (false) is not supported",
        ),
        (
            GPT_OSS,
            {"experts_per_token": 3},
            "num_experts_per_tok (2) and experts_per_token (3) disagree",
        ),
        (GPT_OSS, {"rope_scaling": REMOVE}, "key 'rope_parameters' is missing"),
        (
            GEMMA_3,
            {"sliding_window_pattern": 6, "_sliding_window_pattern": 3},
            "sliding_window_pattern (6) and _sliding_window_pattern (3) disagree",
        ),
        (
            PHI_4_MINI,
            {"rope_scaling": PHI_4_MINI["rope_scaling"] | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.75 at the top and 0.5 inside",
        ),
        (
            GEMMA_3,
            {"rope_theta": 777.0},
            "full_attention: rope_theta is 777 at the top and 1e+06 inside",
        ),
        (
            GEMMA_3,
            {"rope_local_base_freq": 7.0},
            "sliding_attention: rope_theta is 7 at the top and 10000 inside",
        ),
        (
            PHI_4_MINI,
            {
                "rope_scaling": (
                    PHI_4_MINI["rope_scaling"] | {"original_max_position_embeddings": 2048}
                )
            },
            "original_max_position_embeddings is 4096 at the top and 2048 inside",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(
    raw: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    _read(raw)
    with pytest.raises(CheckpointError) as caught:
        _read(raw, **changes)
    assert said in str(caught.value)


def test_both_spellings_say_the_same() -> None:
    changes = {"rope_scaling": REMOVE, "rope_theta": REMOVE, "torch_dtype": REMOVE}
    new = _read(
        LLAMA_32_1B,
        **changes,
        rope_parameters=LLAMA_32_1B["rope_scaling"] | {"rope_theta": 500000.0},
        dtype="bfloat16",
    )
    assert new == _read(LLAMA_32_1B)


def test_rope_kinds() -> None:
    linear = _read(LLAMA_2_7B, rope_scaling={"type": "linear", "factor": 2})
    assert (
        linear.rope == RopeConfig(theta=10_000.0, kind="linear", factor=2.0)
        and linear.context == 4096
    )
    dynamic = _read(
        LLAMA_2_7B, rope_scaling={"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
    )
    assert dynamic.rope.kind == "dynamic" and dynamic.context == 4096
    yarn = _read(
        QWEN25_05B,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert yarn.rope.kind == "yarn" and yarn.context == 131072, "as Qwen's model cards say"
    yarn = _read(
        QWEN25_05B,
        max_position_embeddings=131072,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert yarn.context == 131072


def test_nulls_and_old_generation_defaults_change_nothing() -> None:
    assert _read(LLAMA_32_1B, some_new_key=None, max_length=20, temperature=0.7, top_k=50) == _read(
        LLAMA_32_1B
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gpt2"},
            (
                "model_type 'gpt2' is not supported: it has positions that are learned or added to"
                " scores, not rotated"
            ),
        ),
        (
            {"model_type": "minicpm3"},
            "attention over compressed keys (MLA)",
        ),
        (
            {"model_type": "kimi_linear"},
            "linear attention in another form than Qwen3.5's; what is",
        ),
        ({"model_type": "mamba2"}, "state-space layers of the first Mamba"),
        (
            {"model_type": "qwen3_omni_moe"},
            "it has images, sound or video; what is served and nearest is Qwen3",
        ),
        (
            {"model_type": "lama"},
            "'lama' is not supported; what is served and nearest is llama: `penstock models` lists",
        ),
        (
            {"model_type": "gemma3"},
            "architectures ['LlamaForCausalLM'] is not supported: for gemma3 only",
        ),
        ({"model_type": REMOVE}, "key 'model_type' is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config: quant_method 'hqq' is not read",
        ),
        ({"hidden_size": REMOVE}, "key 'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number"),
        ({"num_key_value_heads": 5}, "no multiple of num_key_value_heads"),
        ({"head_dim": 63}, "head_dim (63) is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported"),
        ({"dtype": "float16"}, "dtype (float16) and torch_dtype (bfloat16) disagree"),
        ({"eos_token_id": 128256}, "eos_token_id 128256 is outside the vocabulary"),
        ({"logit_scale": 0.5}, "key 'logit_scale' (0.5) is not supported for model_type 'llama'"),
        ({"use_sliding_window": True}, "key 'use_sliding_window' (true) is not supported"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "key 'auto_map'"),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            "rope_type 'proportional' is not supported",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "key 'short_factor' is missing"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 31}},
            "short_factor must list 32 numbers",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "key 'partial_rotary_factor' (0.5) is not supported for model_type 'llama'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "key 'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "disagree"),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters and rope_scaling disagree",
        ),
        (
            {"rope_scaling": LLAMA_32_1B["rope_scaling"] | {"low_freq_factor": 4.0}},
            "high_freq_factor must be above low_freq_factor",
        ),
        (
            {"rope_scaling": LLAMA_32_1B["rope_scaling"] | {"rope_theta": 1e4}},
            "rope_theta is 500000 at the top",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _read(LLAMA_32_1B, **changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention"]}, "must list 24 layers"),
        ({"layer_types": ["chunked_attention"] * 24}, "'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 24}, "use_sliding_window is false"),
        ({"num_key_value_heads": REMOVE}, "key 'num_key_value_heads' is missing"),
    ],
)
def test_what_qwen_does_not_have_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _read(QWEN25_05B, **changes)
    assert said in str(caught.value)


def test_folders_that_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_model_config(tmp_path)
    path = tmp_path / "config.json"
    for broken in (b"{", b"[1]", b"\xff\xfe{}", b"[" * 100_000):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError) as caught:
            read_model_config(tmp_path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.write_text(json.dumps(LLAMA_32_1B))
    assert read_model_config(tmp_path) == _read(LLAMA_32_1B)


def _generation(folder: Path, raw: dict[str, Any]) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(raw))
    return read_generation_defaults(folder)


def test_generation_defaults(tmp_path: Path) -> None:
    config = _read(LLAMA_32_1B)
    nothing = read_generation_defaults(tmp_path)
    assert nothing == GenerationDefaults() and nothing.sampling == {}
    assert end_ids(config, nothing) == config.eos_ids
    many = list(range(1000))
    told = _generation(
        tmp_path,
        {
            "bos_token_id": 5,
            "do_sample": True,
            "eos_token_id": many,
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0,
            "repetition_penalty": 1.05,
            "max_new_tokens": 2048,
            "transformers_version": "4.45.0",
        },
    )
    assert end_ids(config, told) == tuple(many), "before config.json's, a list of any length"
    assert told.sampling == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }
    assert told.unserved == ()
    seven = _generation(tmp_path, {"eos_token_id": 7})
    assert (
        end_ids(config, seven)
        == (7,)
        == end_ids(config, seven, 7)
        == end_ids(config, seven, config.vocab_size)
    )
    assert end_ids(config, seven, 9) == (7, 9) and end_ids(config, nothing, 9) == (
        *config.eos_ids,
        9,
    )
    assert _generation(
        tmp_path, {"num_beams": 4, "top_k": None, "num_beam_groups": 1}
    ).unserved == ("num_beams",)


@pytest.mark.parametrize(
    "raw",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 0.5},
        {"min_p": 1.1},
        {"repetition_penalty": 1e-38},
        {"eos_token_id": "x"},
        {"max_new_tokens": 0},
    ],
)
def test_generation_defaults_that_make_no_sense(tmp_path: Path, raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(raw))):
        _generation(tmp_path, raw)


def test_what_a_request_may_say_generation_defaults_may(tmp_path: Path) -> None:
    for end in (0, 1):
        numbers = {
            name: RANGES[name][end] for name in ("temperature", "min_p", "repetition_penalty")
        }
        told = _generation(
            tmp_path, numbers | {"top_p": (1e-30, 1.0)[end], "top_k": (-1, 2**31 - 1)[end]}
        ).sampling
        assert (
            SamplingParams(**told).repetition_penalty == numbers["repetition_penalty"]
            and len(told) == 5
        )


def test_an_end_id_outside_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="200000 is outside the vocabulary"):
        end_ids(_read(LLAMA_32_1B), _generation(tmp_path, {"eos_token_id": [1, 200000]}))


def test_phi_4_mini_as_it_is_published() -> None:
    """Its keys, and the factors' number, as on the hub; which set is taken is the table's length to
    say."""
    config = _read(PHI_4_MINI)
    assert isinstance(config, DenseConfig) and config.fused_qkv and config.context == 131072
    assert config.windows == (None,) * 32, "a window of more than the context hides nothing"
    assert (config.rope.kind, config.rope.part, config.rope.factor) == ("longrope", 0.75, 32.0)
    assert _read(PHI_4_MINI, rope_scaling=PHI_4_MINI["rope_scaling"] | {"type": "su"}) == config
    with pytest.raises(
        CheckpointError, match=r"partial_rotary_factor 0.01 turns 1 numbers of a head"
    ):
        _read(PHI_4_MINI, partial_rotary_factor=0.01)
    with pytest.raises(CheckpointError, match="key 'auto_map'"):
        _read(PHI_4_MINI, auto_map={"AutoModelForCausalLM": "mine.Mine"})


def test_olmo_3_and_smollm3_turn_layer_by_layer() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    olmo = _read(OLMO_3, rope_scaling=scaling)
    assert (
        isinstance(olmo, DenseConfig)
        and [rope.kind for rope in olmo.ropes] == [*["default"] * 3, "yarn"] * 2
    )
    assert {rope.theta for rope in olmo.ropes} == {500_000.0} and olmo.windows == (
        4096,
        4096,
        4096,
        None,
    ) * 2
    with pytest.raises(
        CheckpointError, match="layer_types asks for sliding_attention but sliding_window is null"
    ):
        _read(OLMO_3, sliding_window=None)
    smol = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
    with pytest.raises(CheckpointError, match="no_rope_layers must list 8 layers"):
        _read(OLMO_3 | smol, no_rope_layers=[1, 0], layer_types=None, sliding_window=None)
    with pytest.raises(
        CheckpointError, match="asks for sliding_attention but use_sliding_window is false"
    ):
        _read(OLMO_3 | smol, layer_types=["sliding_attention"] * 8)


def test_the_catalog_has_every_model_type() -> None:
    assert sorted(CATALOG) == sorted([*families(), *TEXT_PARTS])


@pytest.mark.parametrize(
    "raw", [LLAMA_32_1B, QWEN3_CODER, GEMMA_3, GPT_OSS], ids=lambda raw: raw["model_type"]
)
def test_a_folder_that_transformers_made_of_a_gguf_file(raw: dict[str, Any]) -> None:
    assert _read(raw, _model_name_or_path="Smollm2 135M 8k", unk_token_id=0) == _read(raw)


def test_all_unknown_keys_are_told_at_once() -> None:
    def told(raw: dict[str, Any], **changes: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            _read(raw, **changes)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    scaling = LLAMA_32_1B["rope_scaling"] | {"odd": 3}
    assert (
        told(LLAMA_32_1B, logit_scale=0.5, auto_map={"A": "b"}, rope_scaling=scaling)
        == "config.json: keys 'odd' of rope parameters (3), 'logit_scale' (0.5), 'auto_map'"
        ' ({"A": "b"}) are not supported for model_type \'llama\': remove them only if they'
        " change nothing"
    )
    assert (
        told(LLAMA_32_1B, logit_scale=0.5)
        == "config.json: key 'logit_scale' (0.5) is not supported for model_type 'llama': "
        "remove it only if it changes nothing"
    )
    text = {key: value for key, value in GEMMA_3.items() if key != "architectures"} | {"inner": 1}
    text["rope_parameters"] = {
        kind: {**rope, "odd": kind[:4]} for kind, rope in GEMMA_3["rope_parameters"].items()
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    said = told(whole, outer=2)
    for key in (
        "'outer' (2)",
        "'inner' of text_config (1)",
        "'odd' of rope parameters of full_attention of text_config (\"full\")",
        "'odd' of rope parameters of sliding_attention of text_config (\"slid\")",
    ):
        assert key in said
    many = told(LLAMA_32_1B, **{f"key{number}": "x" * 500 for number in range(500)})
    assert "'key0'" in many and " and 476 more are not supported" in many and len(many) < 3000


def test_gemma_3_4b_as_it_is_published() -> None:
    """Its text's config is short, and what is left is transformers' own; of end ids the whole's
    count."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    config = _read(raw)
    assert isinstance(config, GemmaConfig) and config.text_part is not None
    assert (config.vocab_size, config.heads, config.kv_heads, config.context) == (
        262208,
        8,
        4,
        131072,
    )
    assert config.eos_ids == (1, 106) and config.dtype == "bfloat16" and config.tie_word_embeddings
    assert (config.rope.kind, config.rope.factor, config.local_rope.theta) == (
        "linear",
        8.0,
        10_000.0,
    )
    assert config.windows[:6] == (1024,) * 5 + (None,)
    for text, said in (
        ({"model_type": "gemma3"}, "which is no text's"),
        ({"new_switch": 1}, "config.json: text_config: key 'hidden_size' is missing"),
        (3, "text_config must be an object"),
        ({"model_type": [1]}, "model_type must be a string"),
    ):
        with pytest.raises(CheckpointError, match=said):
            _read(raw, text_config=text)
    with pytest.raises(CheckpointError, match="key 'new_switch'"):
        _read(raw, new_switch=1)
