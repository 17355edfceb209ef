"""GenerationDefaults: the contents of a model's generation_config.json. No torch, no engine.

End ids are tokens that end a sample. The file's end ids replace those of config.json, and the
tokenizer's eos token is added. The file's sampling parameters are defaults of the HTTP API alone,
as in vLLM, not of `SamplingParams()`. The file is optional."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.json_keys import ANYTHING, Keys, read_json
from penstock.models.model_config import ModelConfig
from penstock.row_table import RANGES

# real sampling parameters that the file may have, as in vLLM
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
# Keys that don't affect which tokens are sampled here: key -> ANYTHING, or the one value with that
# property.
NOTHING = {
    "_from_model_config": ANYTHING,
    "transformers_version": ANYTHING,
    "bos_token_id": ANYTHING,  # the tokenizer decides whether to add it
    "pad_token_id": ANYTHING,
    "do_sample": ANYTHING,  # a request's temperature decides, as in vLLM
    "use_cache": ANYTHING,
    "cache_implementation": ANYTHING,
    "return_dict_in_generate": ANYTHING,
    "output_attentions": ANYTHING,
    "output_hidden_states": ANYTHING,
    "output_scores": ANYTHING,
    "output_logits": ANYTHING,
    # transformers' bound of prompt plus output; here the context bounds it
    "max_length": ANYTHING,
    "num_return_sequences": ANYTHING,  # the request's n decides
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": ANYTHING,  # used by beam search only, as is the next key
    "early_stopping": ANYTHING,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "remove_invalid_values": ANYTHING,
    "renormalize_logits": ANYTHING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """sampling: the sampling parameters that the file gives, by SamplingParams' names. unserved:
    keys of the file that the engine doesn't support."""

    eos_ids: tuple[int, ...] | None = None
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    unserved: tuple[str, ...] = ()


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Reads `folder`/generation_config.json, if there is one. Raises CheckpointError for invalid
    values."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    keys = Keys(read_json(path), str(path))
    found: dict[str, float | int | None] = {name: _number(keys, name) for name in NUMBERS}
    found["top_k"] = keys.count("top_k", None, low=-1)
    found["max_tokens"] = keys.count("max_new_tokens", None)
    return GenerationDefaults(
        eos_ids=keys.ids("eos_token_id"),
        sampling={name: value for name, value in found.items() if value is not None},
        unserved=tuple(keys.left(NOTHING)),
    )


def _number(keys: Keys, name: str) -> float | None:
    """Reads a sampling parameter; its allowed range is that of a request."""
    low, high, open_low = RANGES[name]
    found: float | None = keys.number(
        name, None, **{"above" if open_low else "low": low}, high=high
    )
    return found


def end_ids(
    config: ModelConfig, generation: GenerationDefaults, of_tokenizer: int | None = None
) -> tuple[int, ...]:
    """Returns the token ids that end a sample: those of generation_config.json, or of config.json
    if it has none. The tokenizer's eos token is added, as in vLLM, since a fine-tuned model's
    end-of-turn token is often given only there."""
    ends = config.eos_ids if generation.eos_ids is None else generation.eos_ids
    outside = [i for i in ends if i >= config.vocab_size]
    if outside:
        raise CheckpointError(
            f"generation_config.json: eos_token_id {outside[0]} is outside the vocabulary of"
            f" {config.vocab_size}"
        )
    if of_tokenizer is None or of_tokenizer >= config.vocab_size or of_tokenizer in ends:
        return ends
    return (*ends, of_tokenizer)
