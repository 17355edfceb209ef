"""Small tokenizers of the shapes that real models have, made on the spot, for the tests of the text
room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    (
        "Question: Mia has 12 apples and buys 7 more. How many does she have?\nAnswer: 12 + 7 ="
        " 19.\n#### 19\n\n"
    ),
    "Das Café an der Straße öffnet um acht; naïve Gäste zahlen 3 € für Crème brûlée.",
    "日本語のテキストと中文字符 混在 한국어 😀👍🏽👨‍👩‍👧‍👦 العربية हिन्दी",
    "def f(x):\n    return x  +  1\n\n\tprint('it''s', f(2))  # done\r\n",
] * 3

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def byte_level(split: str, specials: list[str], size: int = 500) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([special(text) for text in specials])
    return tokenizer


def write(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any], template: str | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def llama3(folder: Path) -> Path:
    """Byte-level BPE; BOS comes from the post-processor; a token that isn't special and has a space
    in it."""
    tokenizer = byte_level(LLAMA3_SPLIT, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), template]
    )
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    config = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return write(folder, tokenizer, config)


def qwen2(folder: Path) -> Path:
    """Byte-level BPE with NFC, no BOS; some special tokens stand in tokenizer_config.json alone."""
    tokenizer = byte_level(QWEN_SPLIT, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    size = tokenizer.get_vocab_size()
    entry = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": {
            **{
                str(tokenizer.token_to_id(text)): {"content": text, "special": True, **entry}
                for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
            },
            str(size): {"content": "<|box_start|>", "special": True, **entry},
            str(size + 1): {"content": "<tool_call>", "special": False, **entry},
        },
        "tokenizer_class": "Qwen2Tokenizer",
    }
    return write(folder, tokenizer, config)


def sentencepiece(tokenizer: Tokenizer) -> Tokenizer:
    specials = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False, special_tokens=specials + fallback
    )
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    return tokenizer


def llama2(folder: Path) -> Path:
    """What sentencepiece models become: "▁" put in front, byte fallback, one space stripped by the
    decoder."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = _without_special_bytes(sentencepiece(raw))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    entry = {
        "__type": "AddedToken",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    config = {
        "bos_token": {"content": "<s>", **entry},
        "eos_token": {"content": "</s>", **entry},
        "unk_token": "<unk>",
        "legacy": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return write(folder, tokenizer, config)


def metaspace(folder: Path) -> Path:
    """Metaspace before and after: the first token of a text loses its "▁"; tokens may have one
    inside."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    raw.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    raw.train_from_iterator(TEXTS, trainer)
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return write(folder, raw, config)


def _without_special_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer makes byte tokens special; in real files they are ordinary entries of the
    vocabulary."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [
        token for token in spec["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(spec))


MAKERS = {"llama3": llama3, "qwen2": qwen2, "llama2": llama2, "metaspace": metaspace}
