"""Catalog: the table of served model types. Each row has the devices on which logits were compared
with transformers. The table is printed by `penstock models` and in docs/models.md.

Rows are written by hand after the comparison (LOG.md); a test checks that no model type is missing.
Loads no model."""

from __future__ import annotations

from dataclasses import dataclass

SMALL = (
    "37 small models on an H200 against transformers there (tests/models/test_families_gpu.py,"
    " 2026-11-26)"
)


@dataclass(frozen=True, slots=True)
class Served:
    """A served model type. models: common names of its models. on: devices where logits were
    compared with transformers. notes: remarks for users."""

    models: str
    on: str = "CPU"
    notes: str = ""


_GPU = "CPU, GPU"
_EXPERTS = "experts wide, in float8, int8, int4, NVFP4 or MXFP4"
_LATENT = f"latent attention; {_EXPERTS}"
_TEXT = "its text; the vision part is left out"
CATALOG: dict[str, Served] = {
    "afmoe": Served("Trinity Nano, Mini, Large (Arcee)", notes=_EXPERTS),
    "cohere2": Served("Command R7B, Command A"),
    "cohere2_moe": Served("Command A+, its text saved alone, North-Mini-Code", notes=_EXPERTS),
    "cohere2_vision": Served("Command A Vision, Command A+", notes=_TEXT),
    "deepseek_v2": Served("DeepSeek-V2, V2-Lite", notes=_LATENT),
    "deepseek_v3": Served("DeepSeek-V3, R1, Moonlight-16B-A3B", notes=_LATENT),
    "dots1": Served("dots.llm1", notes=_EXPERTS),
    "ernie4_5": Served("ERNIE 4.5 0.3B"),
    "ernie4_5_moe": Served("ERNIE 4.5 21B-A3B, 300B-A47B", notes=_EXPERTS),
    "exaone4": Served("EXAONE 4.0 1.2B, 32B"),
    "exaone_moe": Served("K-EXAONE 236B-A23B", notes=_EXPERTS),
    "falcon_h1": Served("Falcon-H1 0.5B to 34B"),
    "gemma2": Served("Gemma 2", _GPU),
    "gemma3": Served("Gemma 3 4B, 12B, 27B", notes=_TEXT),
    "gemma3_text": Served("Gemma 3 270M, 1B", _GPU),
    "gemma4": Served("Gemma 4 E2B, E4B, 26B-A4B, 31B", notes=f"{_TEXT}, sound too; {_EXPERTS}"),
    "gemma4_text": Served("Gemma 4, its text saved alone", notes=_EXPERTS),
    "gemma4_unified": Served("Gemma 4 12B", notes=f"{_TEXT}, sound too"),
    "glm4": Served("GLM-4 and GLM-Z1 9B, 32B, of 2025-04"),
    "glm4_moe": Served("GLM-4.5 to 4.7, Air, INTELLECT-3", notes=_EXPERTS),
    "glm4_moe_lite": Served("GLM-4.7-Flash", notes=_LATENT),
    "gpt_oss": Served(
        "gpt-oss-20b, gpt-oss-120b", _GPU, notes="experts in four bits (MXFP4) or wide"
    ),
    "granite": Served("Granite 3.0 to 3.3", _GPU),
    "granitemoehybrid": Served("Granite 4.0 H Micro, Tiny, Small; Micro", notes=_EXPERTS),
    "hunyuan_v1_dense": Served("Hunyuan 0.5B to 7B"),
    "hunyuan_v1_moe": Served("Hunyuan-A13B", notes=_EXPERTS),
    "hyperclovax": Served("HyperCLOVA X SEED Think 14B"),
    "kimi_k2": Served("Kimi K2, its text", notes=_LATENT),
    "laguna": Served("Laguna XS, S, M (poolside)", notes=_EXPERTS),
    "lfm2": Served("LFM2 and LFM2.5, 230M to 2.6B"),
    "lfm2_moe": Served("LFM2 and LFM2.5, 8B-A1B", notes=_EXPERTS),
    "llama": Served("Llama 1 to 3.x, and what was saved as such", _GPU),
    "minimax_m2": Served("MiniMax-M2 to M2.5", notes=_EXPERTS),
    "ministral3": Served("Ministral 3, its text saved alone", _GPU),
    "mistral": Served("Mistral 7B, Nemo, Small 2 and 3", _GPU),
    "mistral3": Served("Mistral Small 3.1 to 4, Ministral 3", notes=_TEXT),
    "mistral4": Served("Mistral Small 4, its text saved alone", notes=_LATENT),
    "mixtral": Served("Mixtral 8x7B, 8x22B", _GPU, notes=_EXPERTS),
    "muse_glimmer": Served("Muse Glimmer 30B", notes=_TEXT),
    "muse_glimmer_text": Served("Muse Glimmer, its text saved alone"),
    "nemotron_h": Served("Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super", notes=_EXPERTS),
    "olmo2": Served("OLMo 2", _GPU),
    "olmo3": Served("OLMo 3", _GPU),
    "olmo_hybrid": Served("OLMo Hybrid 7B"),
    "olmoe": Served("OLMoE", _GPU, notes=_EXPERTS),
    "phi3": Served(
        "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        _GPU,
        notes="max_model_len decides on longrope's factors",
    ),
    "qwen2": Served("Qwen1.5, Qwen2, Qwen2.5", _GPU),
    "qwen2_moe": Served("Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", notes=_EXPERTS),
    "qwen3": Served("Qwen3", _GPU),
    "qwen3_moe": Served("Qwen3-30B-A3B, 235B-A22B, Coder", _GPU, notes=_EXPERTS),
    "qwen2_vl": Served("Qwen2-VL 2B, 7B, 72B", notes=_TEXT),
    "qwen2_5_vl": Served("Qwen2.5-VL 3B to 72B, olmOCR", notes=_TEXT),
    "qwen3_vl": Served("Qwen3-VL 2B to 32B", notes=_TEXT),
    "qwen3_vl_moe": Served("Qwen3-VL-30B-A3B, 235B-A22B", notes=f"{_TEXT}; {_EXPERTS}"),
    "qwen3_5": Served("Qwen3.5 0.8B to 27B", notes=_TEXT),
    "qwen3_5_moe": Served("Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B", notes=f"{_TEXT}; {_EXPERTS}"),
    "qwen3_5_moe_text": Served("Qwen3.5 with experts, its text saved alone", notes=_EXPERTS),
    "qwen3_5_text": Served("Qwen3.5, its text saved alone"),
    "qwen3_next": Served("Qwen3-Next-80B-A3B, Qwen3-Coder-Next", notes=_EXPERTS),
    "seed_oss": Served("Seed-OSS 36B"),
    "smollm3": Served("SmolLM3", _GPU),
}
MEASURED = (
    "CPU: logits within 1e-4 of their largest and 64 of 64 greedy tokens as transformers gives"
    " them, in float32, on random small models that reach every switch (tests/models); of"
    f" multimodal checkpoints a prompt's logits, beside their text's own row. GPU: {SMALL}; how"
    " fast some are: docs/performance.md. Of published weights those that packages carry: `make"
    " real`."
)


def print_catalog() -> None:
    """Prints one line per model type, then the meaning of the columns."""
    rows = [
        ("model_type", "models", "compared on", ""),
        *((k, s.models, s.on, s.notes) for k, s in CATALOG.items()),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print(
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
            ).rstrip()
        )
    print(
        f"\n{MEASURED}\nWhether a folder or hub id runs here, and how many tokens fit: penstock"
        " doctor MODEL"
    )
