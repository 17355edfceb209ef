"""Writes a random model's tokenizer: a given one or the demo's, extended to the model's vocabulary.

A made-up token is spelled with three to nine letters, half of them after a space, and no merge
makes it: text never encodes to one, but a model that draws every id gets text of a usual length
from it. Knows files alone.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.demo import model_folder

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # the first are drawn more often
SPACE = "\u0120"  # a space, as byte-level vocabularies write it
WORD_SEED = 11


def write_tokenizer(folder: Path, source: Path | None, vocab: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json. source: a tokenizer.json, plain or .gz, or a
    folder with one; None: the demo's."""
    text = _read(source or model_folder())
    tokenizer = json.loads(text)
    ids = _ids(tokenizer)
    most = max(ids.values()) + 1
    if most > vocab or len(ids) < min(vocab, most):
        raise SystemExit(
            f"the tokenizer's ids go up to {most - 1}, {len(ids)} of them: no vocabulary of {vocab}"
        )
    if len(ids) < vocab:
        tokenizer["model"]["vocab"] |= made_up(ids, vocab - len(ids))
        text = json.dumps(tokenizer, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    end = next(
        (t["content"] for t in tokenizer["added_tokens"] if "end_of_text" in t["content"]), None
    )
    if end is not None:
        config["eos_token"] = end
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def made_up(known: dict[str, int], count: int) -> dict[str, int]:
    """Returns `count` new spellings with the ids after the known ones; the same for the same
    arguments."""
    draw = random.Random(WORD_SEED)
    weights = [1.0 / (place + 2) for place in range(len(LETTERS))]
    found: dict[str, int] = {}
    while len(found) < count:
        letters = "".join(draw.choices(LETTERS, weights, k=draw.randint(3, 9)))
        word = SPACE + letters if draw.random() < 0.5 else letters
        if word not in known and word not in found:
            found[word] = len(known) + len(found)
    return found


def rare_pair(token_bytes: Sequence[bytes], share: float) -> str:
    """Returns two letters that occur in about `share` of all tokens: as a stop string they end a
    sample of evenly drawn tokens after 1 / share tokens or sooner, since two neighbours can form
    them too."""
    counts: dict[bytes, int] = {}
    for piece in token_bytes:
        for pair in {piece[i : i + 2] for i in range(len(piece) - 1)}:
            if pair.isalpha() and pair.islower():
                counts[pair] = counts.get(pair, 0) + 1
    wanted = share * len(token_bytes)
    if not counts:
        raise SystemExit("no token of this tokenizer holds two letters: give another --tokenizer")
    return min(counts, key=lambda pair: (abs(counts[pair] - wanted), pair)).decode()


def _read(source: Path) -> str:
    path = source
    if source.is_dir():
        path = next(
            (p for p in (source / "tokenizer.json", source / "tokenizer.json.gz") if p.is_file()),
            source,
        )
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Returns every token with its id, added ones too."""
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    return ids
