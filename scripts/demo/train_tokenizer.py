"""Trains the demo's tokenizer: byte-level BPE over training documents and a page of plain text.

Single digits are tokens of their own, so that a number always reads the same way; bytes cover every
other text. It writes the files that `transformers.AutoTokenizer` reads. It knows the documents and
no model.

`python scripts/demo/train_tokenizer.py` writes them into the package; the same files each time.
"""

import argparse
import json
from pathlib import Path
from random import Random

from documents import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN, PAD, SPECIALS, TURN, document
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.demo import model_folder

VOCABULARY = 2048
CONTEXT = 2304
SEED, DOCUMENTS = 10_000, 6_000
PLAIN_TEXT = Path(__file__).with_name("plain_text.txt")

# Words and single digits, each with its leading space, runs of marks, line ends, other white space.
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer of exactly `vocabulary` tokens. Raises ValueError when the text has too few
    different words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = Random(SEED)
    texts = [document(rng) for _ in range(DOCUMENTS)]
    for special in SPECIALS:
        texts = [text.replace(special, "\n") for text in texts]
    tokenizer.train_from_iterator([*texts, PLAIN_TEXT.read_text(encoding="utf-8")], trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(
            f"the text gives {tokenizer.get_vocab_size()} tokens, not {vocabulary}; add plain text"
        )
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [TURN, END_OF_TURN],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **names,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    (folder / "special_tokens_map.json").write_text(
        json.dumps(names, indent=2) + "\n", encoding="utf-8"
    )


def main() -> None:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description="train the demo's tokenizer")
    parser.add_argument("--out", type=Path, default=model_folder(), help="folder to write to")
    write(train(), parser.parse_args().out)


if __name__ == "__main__":
    main()
