"""The text of multimodal checkpoints: the logits of the whole, in every form that such checkpoints
have had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from beside_transformers import NEW, PROMPT, SMALL, assert_close, decoder_of, greedy_of
from paged_cache import PagedCache
from parity_cases import CASES
from safetensors.torch import load_file, save_file

from penstock.errors import CheckpointError
from penstock.models.read_config import model_config_of

pytestmark = pytest.mark.torch

SEEN = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("since", [4, 5])
@pytest.mark.parametrize(
    ("whole", "text"),
    [
        ("Gemma3", "gemma3"),
        ("Mistral3", "ministral3"),
        ("Mistral3", "mistral"),
        ("Cohere2Vision", "cohere2"),
        ("Cohere2Vision", "cohere2-moe"),
        ("Mistral3", "mistral-4"),
    ],
)
def test_the_text_of_a_multimodal_checkpoint(
    whole: str, text: str, since: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left out is said, and the text's logits are its own. since: transformers' names of
    the tensors."""
    kind, changes = CASES["mistral-window" if text == "mistral" else text]
    inner = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    seen = (
        transformers.PixtralVisionConfig(**SEEN)
        if whole == "Mistral3"
        else transformers.SiglipVisionConfig(**SEEN)
    )
    parts = {"text_config": inner.to_dict(), "vision_config": seen.to_dict()}
    config = getattr(transformers, f"{whole}Config")(**parts, tie_word_embeddings=text != "mistral")
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()
    for (
        name,
        parameter,
    ) in theirs.named_parameters():  # experts and routers are empty memory until they are loaded
        if ".mlp." in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    theirs.save_pretrained(tmp_path)
    path, named = (
        tmp_path / "model.safetensors",
        {4: "language_model.model.", 5: "model.language_model."},
    )
    tensors = {
        name.replace(named[9 - since], named[since]): tensor
        for name, tensor in load_file(path).items()
    }
    assert any(name.startswith(named[since]) for name in tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    prompt = list(range(50, 120))
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([prompt])).logits[0]
    # transformers' Cohere2Vision leaves it out
    logits = logits * getattr(inner, "logit_scale", 1.0)
    ours = decoder_of(tmp_path)
    assert_close(PagedCache(ours, 1, 9).step([], [(0, prompt)]), logits)
    assert "its vision part is left out" in capsys.readouterr().err
    assert ours.config.architecture == f"{kind.removesuffix('Text')}ForCausalLM"


@pytest.mark.parametrize(
    ("whole", "text", "stacked"),
    [
        ("Qwen3_5", "qwen3-5", False),
        ("Qwen3_5Moe", "qwen3-5-moe", False),
        ("Qwen3_5Moe", "qwen3-5-moe", True),
    ],
)
def test_the_text_of_qwen3_5(
    whole: str, text: str, stacked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its vision part and its layers that draft are left out aloud; a layer's experts may be one
    tensor."""
    kind, changes = CASES[text]
    inner = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    seen = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    config = getattr(transformers, f"{whole}Config")(
        text_config=inner.to_dict(), vision_config=seen
    )
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()
    for (
        name,
        parameter,
    ) in theirs.named_parameters():  # experts are empty memory until they are loaded
        torch.nn.init.normal_(parameter, 0.0, 0.2 if "experts" in name else 0.1)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(3 if stacked else 0):
        at = f"model.language_model.layers.{layer}.mlp.experts"
        each = [
            [tensors.pop(f"{at}.{n}.{matrix}_proj.weight") for n in range(6)]
            for matrix in ("gate", "up", "down")
        ]
        tensors[f"{at}.gate_up_proj"] = torch.stack(
            [torch.cat(both) for both in zip(*each[:2], strict=True)]
        )
        tensors[f"{at}.down_proj"] = torch.stack(each[2])
    tensors |= {
        "mtp.layers.0.input_layernorm.weight": torch.ones(64),
        "mtp.fc.weight": torch.ones(64, 128),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    prompt = list(range(50, 120))
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([prompt])).logits[0]
    assert_close(PagedCache(decoder_of(tmp_path), 1, 9).step([], [(0, prompt)]), logits)
    told = capsys.readouterr().err
    assert (
        "its vision part is left out" in told
        and "its layers that predict more tokens (mtp) are left out" in told
    )


VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}
WINDOWS = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
WHOLES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {"tie_word_embeddings": True, "rope_parameters": MROPE}),
    "qwen2_vl, windows": ("Qwen2VL", WINDOWS | {"rope_parameters": MROPE}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}),
    "qwen3_vl": ("Qwen3VL", {"head_dim": 16, "attention_bias": True}),
    "qwen3_vl, mrope": (
        "Qwen3VL",
        {"head_dim": 32, "rope_parameters": MROPE | {"mrope_interleaved": True}},
    ),
    "qwen3_vl_moe": ("Qwen3VLMoe", EXPERTS | {"rope_parameters": MROPE}),
    "muse_glimmer": ("MuseGlimmer", {"head_dim": 32, "sliding_window": 21, "num_hidden_layers": 4}),
    "muse_glimmer, its own": (
        "MuseGlimmer",
        {
            "head_dim": 16,
            "sliding_window": 33,
            "attention_bias": True,
            "layer_rope_theta": [0, 500.0, 500.0],
        }
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "post_norm_eps": 1e-2}
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "qk_scale_factor": 1.5,
        }
        | {"output_multiplier": 0.5, "final_logit_softcapping": 3.0},
    ),
    "qwen3_vl_moe, some layers": (
        "Qwen3VLMoe",
        EXPERTS | {"mlp_only_layers": [1], "attention_bias": True},
    ),
}


def _whole(name: str) -> Any:
    kind, changes = WHOLES[name]
    seen = VISION | ({"embed_dim": 32, "hidden_size": 64} if kind == "Qwen2VL" else {})
    if kind == "MuseGlimmer":
        seen = {name: seen[name] for name in ("hidden_size", "intermediate_size")}
        seen |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    tied = changes.get("tie_word_embeddings", False)
    text = SMALL | {name: value for name, value in changes.items() if name != "tie_word_embeddings"}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=seen, tie_word_embeddings=tied
    )
    torch.manual_seed(len(name))
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for parameter_name, parameter in theirs.named_parameters():
        one_plus = kind == "MuseGlimmer" and "layernorm" in parameter_name
        centre = 1.0 if "norm" in parameter_name and not one_plus else 0.0
        torch.nn.init.normal_(parameter, centre, 0.2 if parameter.dim() > 1 else 0.5)
    return theirs


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_of_whole(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = _whole(name)
    theirs.save_pretrained(tmp_path)
    prompt, greedy, logits = greedy_of(theirs)
    ours = decoder_of(tmp_path)
    assert_close(PagedCache(ours, 1, 9).step([], [(0, prompt + greedy)]), logits)
    cache, token, drawn = PagedCache(ours, 1, 9), greedy[0], [greedy[0]]
    cache.step([], [(0, prompt)])
    for position in range(PROMPT, PROMPT + NEW - 1):
        scores = cache.step([(0, token)])[0]
        assert_close(scores, logits[position])
        token = int(scores.argmax())
        drawn.append(token)
    assert drawn == greedy and len(set(greedy)) > 10
    assert "its vision part is left out" in capsys.readouterr().err


def test_experts_that_lie_the_other_way_round(tmp_path: Path) -> None:
    """Qwen3-VL's are published as [experts, in, out]."""
    theirs = _whole("qwen3_vl_moe")
    theirs.save_pretrained(tmp_path)
    path, turned = tmp_path / "model.safetensors", 0
    tensors = load_file(path)
    for name in [name for name in tensors if "experts." in name]:
        tensors[name] = tensors[name].mT.contiguous()
        turned += 1
    assert turned == 6
    save_file(tensors, path, metadata={"format": "pt"})
    prompt, greedy, logits = greedy_of(theirs)
    assert_close(PagedCache(decoder_of(tmp_path), 1, 9).step([], [(0, prompt + greedy)]), logits)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj.*config\.json asks for"):
        decoder_of(tmp_path)


QWEN2_VL: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def test_qwen2_vl_as_it_is_published_and_as_transformers_4_saves_it() -> None:
    """Its text's keys stand among the whole's, and later once more in an object of their own."""
    config: Any = model_config_of(QWEN2_VL, "config.json")
    assert config.rope.theta == 1e6 and config.tie_word_embeddings and config.qkv_bias
    assert (
        config.text_part.architecture == "Qwen2VLForConditionalGeneration"
        and config.rms_norm_eps == 1e-6
    )
    text = {
        k: v
        for k, v in QWEN2_VL.items()
        if k not in ("vision_config", "model_type", "tie_word_embeddings")
    }
    text["rope_scaling"] = QWEN2_VL["rope_scaling"] | {"type": "default", "rope_type": "default"}
    again = QWEN2_VL | {
        "text_config": text | {"model_type": "qwen2_vl_text"},
        "rope_scaling": text["rope_scaling"],
    }
    assert model_config_of(again, "config.json") == config
    unsaid = {k: v for k, v in QWEN2_VL.items() if k not in ("rms_norm_eps", "rope_theta")}
    config = model_config_of(unsaid, "config.json")
    assert config.rope.theta == 1e6 and config.rms_norm_eps == 1e-5, "its own defaults, not Qwen2's"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"new_switch": 1},
            "config.json: key 'new_switch' (1) is not supported for model_type 'qwen2_vl'",
        ),
        (
            {"text_config": {"hidden_size": 2}},
            "config.json: text_config: key 'vocab_size' is missing",
        ),
        ({"text_config": 3}, "text_config must be an object, not 3"),
        ({"rope_scaling": {"type": "mroped"}}, "rope_type 'mroped' is not supported"),
        (
            {"architectures": ["Qwen2VLModel"]},
            "for qwen2_vl only ['Qwen2VLForConditionalGeneration'] is",
        ),
    ],
)
def test_what_a_flat_config_has_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_config_of(QWEN2_VL | changes, "config.json")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_qwen3_vl_with_experts_renormalises() -> None:
    raw = json.loads(_whole("qwen3_vl_moe").config.to_json_string(use_diff=False))
    raw["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    config: Any = model_config_of(raw, "config.json")
    assert config.routing.renormalise and config.experts == 6
    raw["text_config"]["norm_topk_prob"] = False
    with pytest.raises(
        CheckpointError, match="norm_topk_prob of text_config must be True in a Qwen3VLMoe"
    ):
        model_config_of(raw, "config.json")


@pytest.mark.parametrize("name", WHOLES)
def test_every_key_that_transformers_can_write_of_a_whole_is_understood(name: str) -> None:
    config = _whole(name).config
    whole, short = (json.loads(config.to_json_string(use_diff=diff)) for diff in (False, True))
    assert model_config_of(whole, "whole") == model_config_of(short, "short")


@pytest.mark.parametrize("whole", ["Gemma4", "Gemma4Unified"])
def test_the_text_of_gemma4(whole: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the unified one layers have no inputs of their own and no experts."""
    _, changes = CASES["gemma4-both"]
    if whole == "Gemma4Unified":
        lacking = ("per_layer", "moe", "experts", "shared_layers")
        changes = {
            name: value
            for name, value in changes.items()
            if not any(part in name for part in lacking)
        }
    inner = getattr(transformers, f"{whole}TextConfig")(**(SMALL | changes | {"pad_token_id": 0}))
    config = getattr(transformers, f"{whole}Config")(
        text_config=inner.to_dict(), tie_word_embeddings=False
    )
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    theirs.save_pretrained(tmp_path)
    prompt = list(range(50, 120))
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([prompt])).logits[0]
    assert_close(PagedCache(decoder_of(tmp_path), 1, 9).step([], [(0, prompt)]), logits)
    assert "its vision part is left out" in capsys.readouterr().err
