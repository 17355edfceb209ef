"""What is not served, by its name: why, and what to take. It knows names alone."""

from __future__ import annotations

from difflib import get_close_matches

MLA = "attention over compressed keys (MLA)"
STATE = "state-space layers (Mamba)"
LINEAR = "layers of linear attention, whose state grows with no text"
VISION = "images, sound or video"
OTHER = "an order of layers that no family here has"

CLOSE = 0.8  # a spelling of a served one; below that names say nothing of what a model is
QWEN3 = "Qwen3 (qwen3, qwen3_moe)"
WHY: dict[str, tuple[str, ...]] = {
    MLA: (
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe_lite", "glm5_next", "glm_moe_dsa",
        "kimi_k2", "kimi_k25", "longcat_flash", "minicpm3", "mistral4", "mistral_large4", "youtu",
    ),
    STATE: (
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba",
        "zamba2",
    ),
    LINEAR: (
        "bailing_hybrid", "kimi_linear", "minimax", "recurrent_gemma", "rwkv",
    ),
    VISION: (
        "gemma3n", "gemma4", "gemma4_unified", "idefics3", "internvl", "kimi_vl", "llama4", "llava", "llava_next",
        "llava_onevision", "mllama", "paligemma", "phi4_multimodal", "pixtral", "qwen2_5_omni",
        "qwen2_audio", "qwen3_omni_moe", "smolvlm", "voxtral", "whisper",
    ),
    OTHER: ("cohere", "gemma", "glm", "gpt2", "gpt_neox", "phi", "phimoe"),
}  # fmt: skip
_TAKE = {
    "deepseek": "DeepSeek-R1's distillations (qwen2, llama)",
    "gemma": "Gemma 3 (gemma3, gemma3_text)",
    "ernie": "ERNIE 4.5 (ernie4_5, ernie4_5_moe)",
    "exaone": "EXAONE 4 (exaone4, exaone_moe)",
    "glm": "GLM-4.5 to 4.7 (glm4_moe)",
    "granite": "Granite 3.3 (granite)",
    "kimi": QWEN3,
    "llama4": "Llama 3.x (llama)",
    "hunyuan": "Hunyuan (hunyuan_v1_dense, hunyuan_v1_moe)",
    "lfm2": "LFM2 (lfm2, lfm2_moe)",
    "minimax": "MiniMax-M2 (minimax_m2)",
    "mistral": "Mistral Small 3.2 (mistral3)",
    "mllama": "Llama 3.x (llama)",
    "olmo": "OLMo 3 (olmo3)",
    "phi": "Phi-4 or Phi-4-mini (phi3)",
    "pixtral": "Mistral Small 3.2 (mistral3)",
    "qwen": QWEN3,
    "recurrent_gemma": "Gemma 3 (gemma3, gemma3_text)",
    "smolvlm": "SmolLM3 (smollm3)",
}


def why_not(model_type: str, served: list[str]) -> str:
    """Returns the rest of the error for a model type that is not among those `served`."""
    why = next((f": it has {reason}" for reason, names in WHY.items() if model_type in names), "")
    take = next((text for start, text in _TAKE.items() if model_type.startswith(start)), None)
    take = take or next(iter(get_close_matches(model_type, served, 1, CLOSE)), QWEN3 if why else None)
    nearest = f"; what is served and nearest is {take}" if take else ""
    return f"model_type {model_type[:100]!r} is not supported{why}{nearest}: supported are {', '.join(served)}"
