"""TextOfWhole: the text part of a multimodal checkpoint. The engine serves the text part only;
images are left out.

Knows the outer objects of config.json and the names of tensors in such checkpoints. The text part's
own config is read like that of a text-only model type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.json_keys import ANYTHING, Keys

# pairs: prefix of the language model's tensors in multimodal checkpoints, as transformers wrote it
# up to 4.51 and since; prefix in text-only checkpoints
RENAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_OF_IMAGES = (
    "vision_tower",
    "multi_modal_projector",
    "visual",
    "vision_adapter",
    "vision_projection",
    "embed_vision",
    "audio_tower",
    "embed_audio",
)
LEFT_OUT = tuple(f"{before}{part}." for before in ("", "model.") for part in _OF_IMAGES)
OF_IMAGES: dict[str, Any] = dict.fromkeys(
    (
        "vision_config",
        "mm_tokens_per_image",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
        "projector_hidden_act",
        "vision_feature_layer",
        "multimodal_projector_bias",
        "spatial_merge_size",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
        "out_hidden_size",
        "projector_hidden_size",
        "downsample_factor",
        "alignment_intermediate_size",
        "audio_config",
        "audio_token_id",
        "boa_token_id",
        "eoa_token_id",
        "eoa_token_index",
    ),
    ANYTHING,
)
FOR_BOTH = (
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "tie_word_embeddings",
)


@dataclass(frozen=True, slots=True)
class TextOfWhole:
    """A multimodal model type. architecture: its value of `architectures`. text: text-only model
    type that serves its text part. given: defaults of keys in the text's config. called: model_type
    in the text's config, if different from `text`. theta: default base of the rope. always: keys of
    the text's config with the one value that is accepted. flat: True if the text's keys may be at
    the top level."""

    architecture: str
    text: str
    given: dict[str, Any] = field(default_factory=dict, hash=False)
    called: str | None = None
    theta: float | None = None
    always: dict[str, Any] = field(default_factory=dict, hash=False)
    flat: bool = False

    def ours(self, name: str) -> str | None:
        """Returns the text-only name of a checkpoint's tensor or matrix; None: it is left out."""
        if f"{name}.".startswith(LEFT_OUT):
            return None
        for theirs, ours in RENAMES:
            if f"{name}.".startswith(theirs):
                return f"{ours}{f'{name}.'.removeprefix(theirs)}"[:-1]
        return name

    def text_keys(self, keys: Keys) -> Keys:
        """Returns the text's config, taken out of the whole file's `keys`. In a flat file it is the
        file itself. A key that is in both is read from the top level, as transformers 5 does."""
        flat = self.flat and keys.rest.get("text_config") is None
        text = {"text_config": None} if flat else keys.object("text_config")
        outer = {name: value for name in FOR_BOTH if (value := keys.take(name, None)) is not None}
        if outer.keys() & {"dtype", "torch_dtype"}:
            text = text | {"dtype": None, "torch_dtype": None}
        if self.flat:  # transformers 4 wrote the text's keys at the top level as well
            keys.rest = {
                name: value
                for name, value in keys.rest.items()
                if name not in text or text[name] != value
            }
        if flat:
            text = {name: keys.rest.pop(name) for name in list(keys.rest) if name not in OF_IMAGES}
        text = {name: value for name, value in text.items() if name not in OF_IMAGES}
        if self.called is not None and text.get("model_type") in (self.called, None):
            text["model_type"] = self.text
        for name, value in self.always.items():
            if text.get(name) not in (None, value):
                raise keys.fail(f"{name} of text_config must be {value!r} in a {self.architecture}")
        if self.theta is not None and not _tells_theta(text):
            text["rope_theta"] = self.theta
        whole = (
            {"model_type": self.text}
            | self.given
            | text
            | outer
            | self.always
            | {"architectures": None}
        )
        if not flat:
            return keys.part("text_config", whole)
        keys.rest = whole
        return keys


def _tells_theta(text: dict[str, Any]) -> bool:
    """Returns True if a config gives the rope's base."""
    places = (text, text.get("rope_parameters"), text.get("rope_scaling"))
    return any(isinstance(place, dict) and place.get("rope_theta") is not None for place in places)


_UNIFIED = {
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
}
_QWEN2_VL = {"rms_norm_eps": 1e-5, "max_window_layers": 80}
TEXT_PARTS = {
    # Logits are scaled as in the text-only model type. transformers doesn't scale them in the
    # multimodal one.
    "cohere2_vision": TextOfWhole(
        "Cohere2VisionForConditionalGeneration", "cohere2", {"tie_word_embeddings": True}
    ),
    "gemma3": TextOfWhole("Gemma3ForConditionalGeneration", "gemma3_text", {"vocab_size": 262_208}),
    "gemma4": TextOfWhole("Gemma4ForConditionalGeneration", "gemma4_text"),
    "gemma4_unified": TextOfWhole(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_text",
        _UNIFIED,
        called="gemma4_unified_text",
        always={"enable_moe_block": False},
    ),
    "mistral3": TextOfWhole("Mistral3ForConditionalGeneration", "mistral"),
    "muse_glimmer": TextOfWhole("MuseGlimmerForConditionalGeneration", "muse_glimmer_text"),
    "qwen2_vl": TextOfWhole(
        "Qwen2VLForConditionalGeneration",
        "qwen2",
        _QWEN2_VL,
        called="qwen2_vl_text",
        theta=1e6,
        flat=True,
    ),
    "qwen2_5_vl": TextOfWhole(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2",
        _QWEN2_VL,
        called="qwen2_5_vl_text",
        theta=1e6,
        flat=True,
    ),
    "qwen3_5": TextOfWhole("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": TextOfWhole("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "qwen3_vl": TextOfWhole(
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        called="qwen3_vl_text",
        theta=5e5,
        always={"use_sliding_window": False},
    ),
    "qwen3_vl_moe": TextOfWhole(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_moe",
        {"moe_intermediate_size": 1408, "num_experts_per_tok": 4},
        called="qwen3_vl_moe_text",
        theta=5e5,
        always={"norm_topk_prob": True, "use_sliding_window": False},
    ),
}
