"""Model types that are not served: the reason and an alternative for each. Knows names alone: those
of all model types in transformers (`tests/models/test_unserved.py` compares them with the installed
version), and of some models published with their own code."""

from __future__ import annotations

import re
from difflib import get_close_matches


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


MLA = "attention over compressed keys (MLA)"
PICKED = "attention to keys that an indexer picks"
STATE = "state-space layers of the first Mamba, or of Mamba2 in an order that no family here has"
LINEAR = "layers of linear attention in another form than Qwen3.5's"
EXPERTS = "experts, or an attention beside them, in a form that no family here has"
NEAR = "a form near one that is served, and no file here"
OTHER = "an order of layers that no family here has"
LEARNED = "positions that are learned or added to scores, not rotated"
PAIR = "an encoder beside its decoder"
ENCODER = "an encoder, or a head that decides, and makes no text"
DRAFTS = "layers that draft tokens for another model"
SERIES = "numbers to foretell, and no text"
MEDIA = "images, sound or video"

LONGEST = 100  # characters of a name; longer names are not compared
CLOSE = 0.8  # least similarity of spelling at which a served model type is suggested
QWEN3 = "Qwen3 (qwen3, qwen3_moe)"
WHY: dict[str, frozenset[str]] = {
    MLA: _names("""
        axk1 kimi_k25 longcat_flash minicpm3 sarvam_mla youtu
    """),
    PICKED: _names("""
        axk2 deepseek_v32 deepseek_v4 dots3_note glm5_next glm_moe_dsa hy_v4 hy_v4_vl minimax_m3_vl
        mistral_large4 qwen4_exp
    """),
    STATE: _names("""
        bamba falcon_mamba jamba mamba mamba2 nemotron_h_omni zamba zamba2
    """),
    LINEAR: _names("""
        bailing_hybrid kimi_linear lara_mini minimax recurrent_gemma rwkv xlstm
    """),
    EXPERTS: _names("""
        beam dbrx doge flex_olmo flint granitemoe granitemoe_swa granitemoeshared inkling2_loop_text
        inkling2_text inkling_text jetmoe mimo_v2_flash phimoe step3p5 zaya
    """),
    NEAR: _names("""
        cwm exaone granite_swa hy_v3 hyperclovax internlm3 iquestcoder kolibri1 mellum ministral
        sarvam_moe solar_open
    """),
    OTHER: _names("""
        apertus arcee bitnet blt codegen cohere diffllama dory falcon gemma gemma3n glm gptj
        gpt_neox gpt_neox_japanese helium hrm_text jais2 lfm3 llama4 nanochat nemotron olmo
        persimmon phi stablelm starcoder2 vaultgemma
    """),
    LEARNED: _names("""
        biogpt bloom cpmant ctrl gpt-sw3 gpt2 gpt_bigcode gpt_neo mpt openai-gpt opt xglm
    """),
    PAIR: _names("""
        bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100
        marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet rag switch_transformers t5
        t5_gemma_module t5gemma t5gemma2 umt5
    """),
    ENCODER: _names("""
        albert bert bert-generation big_bird bros camembert canine convbert data2vec-text deberta
        deberta-v2 diffusion_gemma distilbert dpr electra embedding_gemma2 ernie esm esmc esmfold2
        eurobert flaubert fnet funnel gte ibert jev jina_embeddings_v3 layoutlm layoutlmv2
        layoutlmv3 layoutxlm lilt longformer luke markuplm megatron-bert mobilebert modernbert
        modernbert-decoder mpnet mra nomic_bert nystromformer openai_privacy_filter reformer rembert
        roberta roberta-prelayernorm roc_bert roformer splinter squeezebert tapas ultrabert
        visual_bert xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso
    """),
    DRAFTS: _names("""
        gemma4_assistant gemma4_unified_assistant muse_glimmer_assistant
    """),
    SERIES: _names("""
        autoformer decision_transformer informer patchtsmixer patchtst time_series_transformer
        timesfm timesfm2_5
    """),
    MEDIA: _names("""
        EvollaModel aimv2 align altclip apertus1p5 aria audio-spectrogram-transformer audioflamingo3 aya_vision bark
        beit bit blip blip-2 bridgetower canary chameleon chinese_clip chmv2 clap clip clipseg clvp
        cohere_asr cohere_compass colmodernvbert colpali colqwen2 conditional_detr convnext
        convnextv2 cosmos3_edge cosmos3_omni csm cvt d_fine dab-detr dac data2vec-audio
        data2vec-vision deepseek_ocr2 deepseek_vl deepseek_vl_hybrid deformable_detr deimv2 deit
        depth_anything depth_pro detr dia dinat dinov2 dinov2_with_registers dinov3_convnext
        dinov3_vit donut-swin dpt edgetam edgetam_video efficientloftr efficientnet emu3 encodec
        eomt eomt_dinov3 ernie4_5_vl_moe evolla exaone4_5 fast_vlm fastspeech2_conformer flava
        flava_image_codebook flava_image_model florence2 florence_vision focalnet fun_asr_nano fuyu
        git glm46v glm4v glm4v_moe glm_image glm_ocr glmasr glmga glpn got_ocr2 gradium_phonon_tts
        granite4_vision granite_docling granite_speech granite_speech5_ctc granite_speech5_encoder
        granite_speech_plus grounding-dino groupvit hgnet_v2 hiera higgs_audio_v2 hubert hunyuan_vl
        hyperclovax_vision_v2 idefics idefics2 idefics3 ijepa imagegpt inkling2 inkling2_loop
        inkling_audio inkling_mm_model inkling_vision instructblip instructblipvideo internvl janus
        kimi_vl kosmos-2 kosmos-2.5 kyutai_speech_to_text lasr_ctc lasr_encoder levit lfm2_vl
        lfm3_vl lightglue lighton_ocr llava llava_next llava_next_video llava_onevision lw_detr
        lxmert mask2former maskformer maskformer-swin metaclip_2 mgp-str mimi minicpm_ocr
        minicpmv4_6 minicpmv4_7 mlcd mllama mm-grounding-dino mobilenet_v1 mobilenet_v2 mobilevit
        mobilevitv2 modernvbert molmo2 moonshine moonshine_streaming moshi moss_transcribe_diarize
        muse_spark musicflamingo musicgen musicgen_melody nemo_speechlm nemotron3_5_asr
        nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio
        nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron_asr_streaming neomme
        neucodec nougat omdet-turbo omniasr omniasr_ctc oneformer ovis2 owlv2 owlvit paddleocr_vl
        paligemma parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt pe_audio pe_audio_video
        pe_video perceiver perception_lm phi4_multimodal pi0 pix2struct pixio pixtral pocket_tts
        poolformer pop2piano pp_chart2table pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4
        pp_formulanet pp_lcnet pp_lcnet_v3 pp_lcnet_v4 pp_ocrv5_mobile_det pp_ocrv5_mobile_rec
        pp_ocrv5_server_det pp_ocrv5_server_rec pp_ocrv6_medium_det pp_ocrv6_small_det
        pp_ocrv6_small_rec pp_ocrv6_tiny_rec prompt_depth_anything pvt pvt_v2 qianfan_ocr
        qwen2_5_omni qwen2_audio qwen3_asr qwen3_omni_moe radio regnet resnet rf_detr rf_detr_dinov2
        rt_detr rt_detr_resnet rt_detr_v2 sam sam2 sam2_video sam3 sam3_lite_text sam3_tracker
        sam3_tracker_video sam3_video sam_hq sapiens2 seamless_m4t seamless_m4t_v2 segformer seggpt
        sew sew-d shieldgemma2 siglip siglip2 slanet slanext smolvlm speech-encoder-decoder
        speech_to_text speecht5 step3p7 superglue superpoint swiftformer swin swin2sr swinv2
        table-transformer textnet timesformer timm_backbone timm_wrapper tipsv2 tipsv2_dpt trocr tvp
        udop ultravbert unispeech unispeech-sat univnet unlimited_ocr upernet uvdoc vibevoice
        vibevoice_asr vibevoice_diffusion video_llama_3 video_llava videomae videomt videoprism vilt
        vipllava vision-encoder-decoder vision-text-dual-encoder vit vit_mae vit_msn vitdet vitmatte
        vitpose vits vivit vjepa2 voxtral voxtral_realtime wav2vec2 wav2vec2-bert wav2vec2-conformer
        wavlm wavtokenizer whisper xclip xcodec xcodec2 yolos zoedepth
    """),
}
SILENT = (DRAFTS, ENCODER, SERIES)  # reasons for which no served model type is suggested
# Words that follow a model type's name to name a part of it, such as its vision encoder.
PARTS = _names("""
    acoustic adapter audio backbone bigvgan code decoder depth det detr dit encoder geometry global
    head hiera hifigan local mask model multimodal patcher perceiver perciever predictor prompt
    qformer sam talker text thinker token2wav tokenizer transformer vision vit vqgan vqmodel with
""")
_TAKE = {
    "deepseek": "DeepSeek-V3 (deepseek_v3), or R1's distillations (qwen2, llama)",
    "gemma": "Gemma 3 (gemma3, gemma3_text)",
    "cohere": "Command R7B or Command A (cohere2, cohere2_moe)",
    "ernie": "ERNIE 4.5 (ernie4_5, ernie4_5_moe)",
    "exaone": "EXAONE 4 (exaone4, exaone_moe)",
    "glm": "GLM-4.5 to 4.7 (glm4_moe)",
    "granite": "Granite 4 or 3.3 (granitemoehybrid, granite)",
    "kimi": "Kimi K2 (kimi_k2)",
    "llama4": "Llama 3.x (llama)",
    "hunyuan": "Hunyuan (hunyuan_v1_dense, hunyuan_v1_moe)",
    "lfm2": "LFM2 (lfm2, lfm2_moe)",
    "minimax": "MiniMax-M2 (minimax_m2)",
    "mistral": "Mistral Small 3.2 (mistral3)",
    "mllama": "Llama 3.x (llama)",
    "olmo": "OLMo 3 (olmo3)",
    "phi": "Phi-4 or Phi-4-mini (phi3)",
    "llava": "Qwen3-VL, its text (qwen3_vl)",
    "internvl": "Qwen3-VL, its text (qwen3_vl)",
    "pixtral": "Mistral Small 3.2 (mistral3)",
    "qwen": QWEN3,
    "recurrent_gemma": "Gemma 3 (gemma3, gemma3_text)",
    "smolvlm": "SmolLM3 (smollm3)",
}


def why(model_type: str, served: list[str]) -> str | None:
    """Returns the reason why a model type is not served; None: the name is unknown. served: names
    of the served model types."""
    reason = _reason(model_type)
    if reason is not None:
        return f"it has {reason}"
    whole = _whole(model_type, served)
    if whole is None:
        return None
    of_whole = _reason(whole)
    return f"it is a part of {whole}" + ("" if of_whole is None else f", which has {of_whole}")


def why_not(model_type: str, served: list[str]) -> str:
    """Returns the part of the error message that explains why a model type is not served and names
    an alternative. served: names of the served model types."""
    reason = why(model_type, served)
    take = nearest(model_type, served)
    said = ("" if reason is None else f": {reason}") + (
        "" if take is None else f"; what is served and nearest is {take}"
    )
    return (
        f"model_type {model_type[:LONGEST]!r} is not supported{said}: `penstock models` lists"
        " what is"
    )


def nearest(model_type: str, served: list[str]) -> str | None:
    """Returns the served model type to use instead; None: no served type is similar."""
    whole = _whole(model_type, served)
    if whole in served:
        return whole
    if _reason(whole or model_type) in SILENT:
        return None
    take = next((text for start, text in _TAKE.items() if model_type.startswith(start)), None)
    known = QWEN3 if why(model_type, served) is not None else None
    return take or next(iter(get_close_matches(model_type, served, 1, CLOSE)), known)


def _reason(model_type: str) -> str | None:
    return next((reason for reason, names in WHY.items() if model_type in names), None)


def _whole(model_type: str, served: list[str]) -> str | None:
    """Returns the known model type of which this one is a part, judged by its name; None: there is
    none. Example: `qwen3_vl_text` is a part of qwen3_vl."""
    if _reason(model_type) is not None or len(model_type) > LONGEST:
        return None
    known = {
        _spelt(name): name
        for name in (*served, *(name for names in WHY.values() for name in names))
    }
    words = _spelt(model_type).split("_")
    for cut in range(len(words) - 1, 0, -1):
        if words[cut] not in PARTS:
            return None
        if (whole := known.get("_".join(words[:cut]))) is not None:
            return whole
    return None


def _spelt(name: str) -> str:
    return re.sub("[-.]", "_", name)
