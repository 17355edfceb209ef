"""TextOfWhole: the text of a multimodal checkpoint, which is served, and what is left out of it: images are not.

It knows config.json's outer objects and how such checkpoints name their tensors; the text's own config is read as any.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.models.keys import ANYTHING, Keys

# The language model's tensors begin so, in the spellings that have been: transformers up to 4.51, and since.
RENAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_OF_IMAGES = ("vision_tower", "multi_modal_projector", "visual")
LEFT_OUT = tuple(f"{before}{part}." for before in ("", "model.") for part in _OF_IMAGES)
OF_IMAGES: dict[str, Any] = dict.fromkeys((
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "boi_token_id", "eoi_token_id", "image_token_id", "projector_hidden_act", "vision_feature_layer",
    "multimodal_projector_bias", "spatial_merge_size", "video_token_id", "vision_start_token_id", "vision_end_token_id",
), ANYTHING)  # fmt: skip
FOR_BOTH = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class TextOfWhole:
    """architecture: of the whole.   text: the model type of its text where it doesn't say.   given: what its text's
    config has where it doesn't say."""

    architecture: str
    text: str
    given: dict[str, Any] = field(default_factory=dict, hash=False)

    def ours(self, name: str) -> str | None:
        """Returns what the text alone would call a tensor or matrix of the checkpoint; None: it is left out."""
        if f"{name}.".startswith(LEFT_OUT):
            return None
        for theirs, ours in RENAMES:
            if f"{name}.".startswith(theirs):
                return f"{ours}{f'{name}.'.removeprefix(theirs)}"[:-1]
        return name

    def text_config(self, keys: Keys) -> dict[str, Any]:
        """Takes the text's config.json out of the whole's `keys`. What both say, the whole says first, as in
        transformers 5."""
        text = keys.take("text_config")
        if not isinstance(text, dict):
            raise keys.fail(f"text_config must be an object, not {text!r}")
        outer = {name: value for name in FOR_BOTH if (value := keys.take(name, None)) is not None}
        if outer.keys() & {"dtype", "torch_dtype"}:
            text = text | {"dtype": None, "torch_dtype": None}
        return {"model_type": self.text} | self.given | text | outer | {"architectures": None}


TEXT_PARTS = {
    "gemma3": TextOfWhole("Gemma3ForConditionalGeneration", "gemma3_text", {"vocab_size": 262_208}),
    "qwen3_5": TextOfWhole("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": TextOfWhole("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "mistral3": TextOfWhole("Mistral3ForConditionalGeneration", "mistral"),
}
