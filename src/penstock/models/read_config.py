"""read_model_config: reads a folder's config.json. Returns the config of its model type; an unknown
key is an error that names it.

Reads the files of transformers 4 and 5 (`rope_scaling` and `rope_theta`, or `rope_parameters`;
`torch_dtype` or `dtype`). Needs no torch, so that a wrong folder is reported before torch is
imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.json_keys import ANYTHING, Keys, read_json
from penstock.models.families import families, find_family
from penstock.models.model_config import ModelConfig, our_name
from penstock.models.text_part import OF_IMAGES, TEXT_PARTS, TextOfWhole
from penstock.models.unserved import why_not
from penstock.quant.read_quantization import read_quantization

# file with ModelOpt's quantization config; newer checkpoints also have it in config.json
MODELOPT = "hf_quant_config.json"

# Keys that don't change the results of a forward pass: key -> its harmless value, or ANYTHING.
NOTHING: dict[str, Any] = {
    # about the origin of the file
    "_name_or_path": ANYTHING,
    "_model_name_or_path": ANYTHING,  # written by transformers for models from GGUF files
    "transformers_version": ANYTHING,
    "unsloth_version": ANYTHING,
    "unsloth_fixed": ANYTHING,
    # about training
    "initializer_range": ANYTHING,
    "attention_dropout": ANYTHING,
    "resid_pdrop": ANYTHING,
    "embd_pdrop": ANYTHING,
    "attn_pdrop": ANYTHING,
    "summary_first_dropout": ANYTHING,
    "output_router_logits": ANYTHING,
    "router_aux_loss_coef": ANYTHING,
    "router_jitter_noise": ANYTHING,
    "problem_type": ANYTHING,
    "finetuning_task": ANYTHING,
    "task_specific_params": ANYTHING,
    # settings of execution in transformers that don't change results (pretraining_tp splits
    # products into sums)
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
    # about tokenizers and classifier labels
    "tokenizer_class": ANYTHING,
    "pad_token_id": ANYTHING,
    "unk_token_id": ANYTHING,
    "sep_token_id": ANYTHING,
    "prefix": ANYTHING,
    "cache_implementation": ANYTHING,
    "id2label": ANYTHING,
    "label2id": ANYTHING,
    # generation defaults that transformers 4 wrote here; the engine reads them from
    # generation_config.json only
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
    # optional parts of models, accepted only if they are switched off
    "is_decoder": ANYTHING,  # the engine always runs the model as a decoder
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,  # model types that may have biases read these keys themselves
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,  # these keys belong to Phi models with block-sparse attention
    "interpolate_factor": 1,
    "use_sliding_window": False,
}


def read_model_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json. Raises CheckpointError, whose message is one line, for a missing
    or unknown key or value."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no config.json: give a model folder as transformers saves it, or a"
            " hub id"
        )
    raw, beside = read_json(path), folder / MODELOPT
    if beside.is_file() and not _tells_quantization(raw):
        told = read_json(beside) | {"quant_method": "modelopt"}
        read_quantization(told, str(beside))  # called for its errors, which name this file
        raw = raw | {"quantization_config": told}
    return model_config_of(raw, str(path))


def _tells_quantization(raw: dict[str, Any]) -> bool:
    """Returns True if config.json declares the quantization. ModelOpt's own file is then not
    needed."""
    text = raw.get("text_config")
    return any(
        isinstance(each, dict) and each.get("quantization_config") is not None
        for each in (raw, text)
    )


def model_config_of(raw: dict[str, Any], where: str) -> ModelConfig:
    """Returns the config of a parsed config.json. where:
    file name with which error messages begin."""
    keys = Keys(raw, where)
    config = _config_of(keys)
    keys.refuse_unknown(f"model_type {raw['model_type']!r}")
    return config


def _config_of(keys: Keys) -> ModelConfig:
    """Takes the known keys out of `keys` and collects unknown ones."""
    model_type = keys.text("model_type")
    if (part := TEXT_PARTS.get(model_type)) is not None:
        return _text_of(part, model_type, keys)
    family = find_family(model_type)
    if family is None:
        raise keys.fail(why_not(model_type, sorted([*families(), *TEXT_PARTS])))
    named = keys.take("architectures", [family.ARCHITECTURE])
    if named != [family.ARCHITECTURE]:
        raise keys.fail(
            f"architectures {named!r} is not supported: for {model_type} only"
            f" [{family.ARCHITECTURE!r}] is"
        )
    quantized = keys.take("quantization_config", None)
    stored = None if quantized is None else read_quantization(quantized, keys.where)
    if stored is not None and stored.method == "mxfp4" and model_type != "gpt_oss":
        raise keys.fail(
            "quant_method 'mxfp4' is read for gpt_oss alone: take an fp8 one, or"
            " compressed-tensors' MXFP4"
        )
    config = family.read(keys, {"model_type": model_type, "architecture": family.ARCHITECTURE})
    # False means that no layer has a window. If a layer has one and the model type hasn't read the
    # key, the two contradict each other, and the key is refused.
    unread = {"use_sliding_window": None} if any(config.windows) else {}
    keys.note_rest(NOTHING | unread)
    outside = [i for i in config.eos_ids if i >= config.vocab_size]
    if outside:
        raise keys.fail(
            f"eos_token_id {outside[0]} is outside the vocabulary of {config.vocab_size}"
        )
    return replace(
        config, quantization=stored and stored.called(lambda name: our_name(name, config.renames))
    )


def _text_of(part: TextOfWhole, model_type: str, keys: Keys) -> ModelConfig:
    """Returns the text config of a multimodal checkpoint, with its `text_part` set."""
    named = keys.take("architectures", [part.architecture])
    if named != [part.architecture]:
        raise keys.fail(
            f"architectures {named!r} is not supported: for {model_type} only"
            f" [{part.architecture!r}] is"
        )
    text = part.text_keys(keys)
    if text is not keys:
        keys.note_rest(NOTHING | OF_IMAGES)
    if text.rest["model_type"] in [*TEXT_PARTS]:  # model_type may be of any JSON type here
        raise keys.fail(
            f"text_config is of model_type {text.rest['model_type']!r}, which is no text's"
        )
    config = _config_of(text)
    stored = config.quantization and config.quantization.called(
        lambda name: part.ours(name) or name
    )
    return replace(config, text_part=part, quantization=stored)
