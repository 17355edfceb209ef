"""Tokenizers are read from folders, refuse what is broken, and decode as the tokenizers library
does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import MAKERS, TEXTS, llama3, metaspace, qwen2
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from penstock.errors import TokenizerError, UsageError
from penstock.text.tokenizer import Tokenizer
from penstock.text.tokenizer_files import read_end_of_text
from penstock.text.vocabulary import DecoderStyle


@pytest.fixture(scope="module", params=sorted(MAKERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@given(data=st.data())
def test_decode_equals_the_library(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    assert text == tokenizer._fast.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode_batch([ids, []], skip_special_tokens=skip) == [text, ""]
    assert tokenizer.decode(np.array(ids, np.int64), skip_special_tokens=skip) == text


def test_texts_come_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    assert tokenizer.decode_batch(tokenizer.encode_batch(TEXTS)) == TEXTS
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in tokenizer.encode("hi", add_special_tokens=False)


def test_token_bytes_are_what_a_token_adds(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    ids = tokenizer.encode("日本 naïve 👍", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes[index] for index in ids).decode() == "日本 naïve 👍"
    assert tokenizer.token_bytes[tokenizer.eos_token_id or 0] == b"<|eot_id|>"
    assert tokenizer.token_text(tokenizer.encode("a", add_special_tokens=False)[0]) == "a"
    assert {len(piece) for piece in tokenizer.token_bytes[:256]} == {1}


def test_padded_vocabularies_spell_nothing_past_the_end(tmp_path: Path) -> None:
    own = Tokenizer.load(llama3(tmp_path)).vocab_size
    padded = Tokenizer.load(tmp_path, vocab_size=own + 100)
    assert padded.vocab_size == len(padded.token_bytes) == own + 100
    assert padded.decode([own + 3, *padded.encode("hi"), own + 99]) == "hi"
    with pytest.raises(TokenizerError, match="vocab_size is 300"):
        Tokenizer.load(tmp_path, vocab_size=300)


def test_special_tokens_may_lie_beyond_the_model(tmp_path: Path) -> None:
    """As in Gemma 3's small models, whose tokenizer has the place of an image. Its end and its text
    may not."""
    own = Tokenizer.load(llama3(tmp_path)).vocab_size
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["added_tokens"].append(
        spec["added_tokens"][-1] | {"id": own, "content": "<image>", "special": True}
    )
    path.write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(tmp_path, vocab_size=own)
    assert (
        tokenizer.vocab_size == len(tokenizer.token_bytes) == own
        and own not in tokenizer.special_ids
    )
    assert tokenizer.encode("<image>", add_special_tokens=False) == [own], (
        "a request with it is refused by its id"
    )
    assert Tokenizer.load(tmp_path).vocab_size == own + 1
    spec["added_tokens"][-1]["special"] = False
    path.write_text(json.dumps(spec))
    with pytest.raises(TokenizerError, match="not of one model"):
        Tokenizer.load(tmp_path, vocab_size=own)


@pytest.mark.parametrize("wrong", [[0, -1], [10**9], [0, 1, 5000]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, wrong: list[int]) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    with pytest.raises(UsageError, match="outside the vocabulary"):
        tokenizer.decode(wrong)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        tokenizer.token_text(wrong[-1])


def test_texts_that_are_no_unicode_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    with pytest.raises(UsageError, match="surrogate"):
        tokenizer.encode("a\ud83db")
    with pytest.raises(UsageError, match="must be text"):
        tokenizer.encode(None)  # type: ignore[arg-type]


class Panic(BaseException):
    """As the library's PanicException: no Exception."""


class Panicking:
    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        raise Panic(f"byte index 1 is not a char boundary of {texts[0]}")


def test_a_panic_of_the_library_is_an_error_of_ours(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    tokenizer._fast = Panicking()  # type: ignore[assignment]
    with pytest.raises(TokenizerError, match="library failed") as caught:
        tokenizer.encode("secret")
    assert "secret" not in str(caught.value)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no folder"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model alone"):
        Tokenizer.load(tmp_path)
    for broken in (b"", b"{", b"[]", b'{"model": {}}', b"\xff\xfe", b'{"version":"1.0"}'):
        (tmp_path / "tokenizer.json").write_bytes(broken)
        with pytest.raises(TokenizerError):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [b"{", b"[]", b"\xff", b'{"added_tokens_decoder": {"x": {}}}', b'{"chat_template": 5}'],
)
def test_broken_configs_are_named(tmp_path: Path, config: bytes) -> None:
    llama3(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        Tokenizer.load(tmp_path)


def test_config_that_contradicts_the_ids_is_refused(tmp_path: Path) -> None:
    qwen2(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"]["99"] = {"content": "<new>", "special": True}
    path.write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="not of one model"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_config_has_no_named_tokens(tmp_path: Path) -> None:
    metaspace(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (
        None,
        None,
        None,
    )
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert Tokenizer.load(tmp_path).eos_token_id == 2


def test_a_decoder_that_is_not_served_is_named(tmp_path: Path) -> None:
    FastTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decoder"):
        Tokenizer.load(tmp_path)
    with pytest.raises(TokenizerError, match="WordPiece"):
        DecoderStyle.read({"type": "WordPiece", "prefix": "##", "cleanup": True})


def test_chat_templates_are_found_where_they_may_lie(tmp_path: Path) -> None:
    llama3(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": "one"}))
    assert Tokenizer.load(tmp_path).chat_template == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    path.write_text(json.dumps({**config, "chat_template": named}))
    assert dict(Tokenizer.load(tmp_path).chat_templates) == {"default": "two", "tool_use": "three"}
    (tmp_path / "chat_template.jinja").write_text("four")
    assert Tokenizer.load(tmp_path).chat_template == "four"


@given(data=st.data())
def test_tokens_until_holds_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20))
    text = tokenizer.decode(ids)
    ends = [at + 1 for at, letter in enumerate(text) if letter != "\ufffd"]
    if ends:
        end = data.draw(st.sampled_from(ends))
        kept = tokenizer.tokens_until(ids, end)
        # Torn bytes may still change behind `end`, never before it; and one token less doesn't show
        # that character.
        assert len(tokenizer.decode(ids[:kept])) >= end
        assert tokenizer.decode(ids[: kept - 1])[:end] != text[:end]


def test_a_torn_run_of_bytes_that_begins_with_a_space_has_none_to_strip(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(MAKERS["llama2"](tmp_path))
    space, torn, line, unknown = 0x20 + 3, 0x80 + 3, 259, 0
    ids = [space, torn, line, unknown]
    assert [tokenizer.decode(ids[:n]) for n in range(5)] == [
        "",
        "",
        "\ufffd\ufffd",
        "\ufffd\ufffd\n",
        "\ufffd\ufffd\n",
    ]
    # A run is torn as a whole, and may be whole until its end is known, as a stream waits for it.
    assert [tokenizer.settled(ids[:n]) for n in range(5)] == [
        "",
        "",
        "",
        "\ufffd\ufffd\n",
        "\ufffd\ufffd\n",
    ]
    assert [tokenizer.tokens_until(ids, end) for end in range(4)] == [0, 3, 3, 3]
    # "\n\ufffd"
    assert [tokenizer.tokens_until([space, line, torn], end) for end in range(3)] == [
        0,
        2,
        3,
    ]


@pytest.mark.parametrize("maker", sorted(MAKERS))
@pytest.mark.parametrize("where", ["config", "map", "added tokens", "vocabulary"])
def test_the_end_of_text_is_found_without_a_tokenizer(
    tmp_path: Path, maker: str, where: str
) -> None:
    """In whichever file says its id: an older config, what transformers 5 writes, a vocabulary it
    is no special of."""
    folder = MAKERS[maker](tmp_path)
    path, spec = (
        folder / "tokenizer_config.json",
        json.loads((folder / "tokenizer.json").read_text()),
    )
    config = json.loads(path.read_text())
    word = config.pop("eos_token")
    word = word["content"] if isinstance(word, dict) else word
    entry = {"content": word, "special": True, "normalized": False}
    at = next((token["id"] for token in spec["added_tokens"] if token["content"] == word), None)
    if where == "config" and at is not None:
        config |= {"eos_token": entry, "added_tokens_decoder": {str(at): entry}}
    elif where == "map":
        config.pop("added_tokens_decoder", None)
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": word}))
    elif where == "vocabulary":
        config.pop("added_tokens_decoder", None)
        vocab = spec["model"]["vocab"]
        config["eos_token"] = next(iter(vocab)) if isinstance(vocab, dict) else vocab[-1][0]
    else:
        config.pop("added_tokens_decoder", None)
        config["eos_token"] = word
    path.write_text(json.dumps(config))
    assert read_end_of_text(folder) == Tokenizer.load(folder).eos_token_id is not None
    (folder / "tokenizer.json").unlink()
    assert read_end_of_text(folder) is None
