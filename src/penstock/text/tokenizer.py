"""Tokenizer: converts text to ids and back. Encodes by the `tokenizers` library, and decodes by
tables of token bytes.

The ids are those of tokenizer.json, which almost always equal AutoTokenizer's. Importing
AutoTokenizer would take 1.6 s and torch; `tokenizers` takes 0.02 s. Decoding a sample is one join
over a table. Also makes stop strings, so that their tables over the vocabulary are made once per
tokenizer. Knows no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ContextLengthError, TokenizerError, UsageError, too_long
from penstock.text.stop_strings import StopIndex, StopStrings
from penstock.text.tokenizer_files import (
    TokenizerFiles,
    prefixes,
    read_tokenizer_files,
    without_prefix,
)
from penstock.text.vocabulary import DecoderStyle, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

    from penstock.text.parsers.response_template import ResponseTemplate

Ids = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

# characters per token assumed for the first part of a long text to encode; prose has 3 to 5
_USUAL = 6
_WORD = re.compile(r"\S\s")  # matches the end of a word


class Tokenizer:
    """The tokenizer of one model. Made by `load`; may be used by several threads.

    vocab_size: number of ids in the model's logits; without a model, the tokenizer's own number.
    token_bytes and StopStrings.watch_bits have this length. Ids after the tokenizer's last token
    have no text.
    """

    def __init__(
        self, fast: FastTokenizer, files: TokenizerFiles, vocab_size: int | None = None
    ) -> None:
        self._fast = fast
        self.folder, self.template_file = files.folder, files.template_file
        self._tokens = _tokens_by_id(fast, vocab_size, files)
        self.vocab_size = size = len(self._tokens)
        added = fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special and i < size)
        self.special_tokens: Mapping[str, str] = files.named
        self.chat_templates: Mapping[str, str] = files.templates
        self._response_template = files.response_template
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.special_texts = frozenset(self._tokens[i] or "" for i in self.special_ids)
        self._stops: dict[tuple[tuple[str, ...], bool], StopStrings] = {}
        self._style = DecoderStyle.read(_decoder_spec(fast))
        self.longest = max(map(len, filter(None, self._tokens)))  # characters of the longest token

    @classmethod
    def load(
        cls, folder: Path, *, vocab_size: int | None = None, chat_template: Path | str | None = None
    ) -> Tokenizer:
        """Reads a folder with a tokenizer.json. chat_template: a file that replaces the folder's
        templates.

        Raises TokenizerError for a missing or broken file, an unsupported decoder, or ordinary
        tokens beyond the model's `vocab_size`.
        """
        template = None if chat_template is None else Path(chat_template).expanduser()
        files = read_tokenizer_files(Path(folder), template)
        from tokenizers import Tokenizer as FastTokenizer

        try:
            fast = FastTokenizer.from_buffer(files.tokenizer_json)
        except Exception as error:  # the library raises a bare Exception for any error of the file
            path = files.folder / "tokenizer.json"
            raise TokenizerError(
                f"{path} cannot be read as a fast tokenizer ({error}); fetch the file again"
            ) from error
        fast.no_truncation()
        fast.no_padding()
        _add_config_tokens(fast, files)
        return cls(fast, files, vocab_size)

    # -- from text to token ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text. add_special_tokens: add BOS and the like, as tokenizer.json
        defines."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_prompt(
        self, text: str, limit: int, *, keep: int | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the ids of a prompt for a context of `limit` tokens, without tokenising much more
        text than that.

        keep: if there are more ids than this, return only the last keep + 1. Of a long text only
        the end is then tokenised, from the beginning of a word on, so far before the kept part that
        the cut doesn't change its ids. Raises ContextLengthError if the text cannot fit, and the
        errors of encode_batch.
        """
        if keep is not None and keep < limit:
            return self._last_ids(text, keep + 1, add_special_tokens)
        if len(text) > limit * self.longest:
            raise _too_long(limit)
        # A beginning of the text with this many ids is certainly too long: more text could change
        # only its last few ids.
        enough = limit + self.longest
        size = _USUAL * enough
        while size < len(text):
            if len(self.encode(text[:size], add_special_tokens=add_special_tokens)) >= enough:
                raise _too_long(limit)
            size *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _last_ids(self, text: str, count: int, add_special_tokens: bool) -> list[int]:
        """Returns the last `count` ids of a text, or all if it has fewer."""
        # The end of the text is encoded until it has this many ids, since its first few may differ
        # from the whole text's.
        enough = count + self.longest
        size = _USUAL * enough
        while size < len(text):
            # look for a word's end only in the first half of the part, since too little text would
            # be left otherwise
            end = _WORD.search(text, len(text) - size, len(text) - size // 2)
            start = len(text) - size if end is None else end.start() + 1
            ids = self.encode(text[start:], add_special_tokens=add_special_tokens)
            if len(ids) >= enough:
                return ids[-count:]
            size *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)[-count:]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Returns the ids of several texts, using several cores. Raises TokenizerError if the
        library fails."""
        for text in texts:
            _check_text(text)
        try:
            batch = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # catches BaseException: a panic in Rust is no Exception
            message = (
                "the tokenizers library failed at this text: change it, or the model's"
                " tokenizer.json"
            )
            # the message doesn't quote the panic's own, which may contain the text
            raise TokenizerError(message) from error
        return [encoding.ids for encoding in batch]

    def encode_inside(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of texts that stand inside another text, without BOS or an added leading
        space. A text that the tokenizer would change (to lower case, say) is spelled by tokens with
        its bytes instead, the longest first. A text that no tokens spell gets an empty list."""
        fast, out = self._inside, []
        for encoding, text in zip(
            fast.encode_batch_fast(list(texts), add_special_tokens=False), texts, strict=True
        ):
            spelt = b"".join(map(self.token_bytes.__getitem__, encoding.ids))
            out.append(encoding.ids if spelt == text.encode() else self._by_longest(text.encode()))
        return out

    @cached_property
    def _inside(self) -> FastTokenizer:
        """The same tokenizer, but without adding a leading space to texts."""
        parts = (self._fast.normalizer, self._fast.pre_tokenizer)
        if not any(prefixes(json.loads(part.__getstate__())) for part in parts if part is not None):
            return self._fast
        from tokenizers import Tokenizer as FastTokenizer

        spec = json.loads(self._fast.to_str())
        spec["normalizer"] = without_prefix(spec.get("normalizer"))
        spec["pre_tokenizer"] = without_prefix(spec.get("pre_tokenizer"))
        return FastTokenizer.from_str(json.dumps(spec))

    def _by_longest(self, data: bytes) -> list[int]:
        ids, at = list[int](), 0
        while at < len(data):
            lengths = range(min(self._longest_bytes, len(data) - at), 0, -1)
            found = next(
                (
                    self._by_bytes[piece]
                    for n in lengths
                    if (piece := data[at : at + n]) in self._by_bytes
                ),
                None,
            )
            if found is None:
                return []
            ids.append(found)
            at += len(self.token_bytes[found])
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """Token ids by their bytes; the lowest id if several tokens have the same bytes. Without
        special tokens."""
        pieces = reversed(list(enumerate(self.token_bytes)))
        return {piece: index for index, piece in pieces if piece and index not in self.special_ids}

    @cached_property
    def _longest_bytes(self) -> int:
        return max(map(len, self._by_bytes), default=0)

    # -- from token ids to text

    def decode(self, ids: Ids, *, skip_special_tokens: bool = True, begins: bool = True) -> str:
        """Returns the text of a sequence of ids. Bytes that aren't UTF-8 become U+FFFD. begins:
        True for a whole text, which loses its leading space with sentencepiece's tokenizers; False
        if it continues other text and keeps the space."""
        return self.vocabulary.decode(_as_list(ids), skip_special_tokens, begins)

    def settled(self, ids: Ids, *, skip_special_tokens: bool = True, begins: bool = True) -> str:
        """Returns the text of a sequence that may continue, without an incomplete character at its
        end."""
        return self.vocabulary.settled(_as_list(ids), skip_special_tokens, begins)

    def decode_batch(
        self, batch: Sequence[Ids], *, skip_special_tokens: bool = True, begins: bool = True
    ) -> list[str]:
        """Returns the texts of many sequences."""
        decode = self.vocabulary.decode
        return [decode(_as_list(ids), skip_special_tokens, begins) for ids in batch]

    def begins_behind(self, ids: Ids, *, skip_special_tokens: bool = True) -> bool:
        """Returns True if none of the prompt's ids gives text, so that the answer's text is decoded
        as a whole text (see `begins` of decode)."""
        return self.vocabulary.begins_behind(_as_list(ids), skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token inside a text, for logprobs. An incomplete character becomes
        U+FFFD; token_bytes has its bytes."""
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self.vocabulary.pieces[token_id].decode("utf-8", "replace")

    def tokens_until(
        self, ids: Ids, end: int, *, skip_special_tokens: bool = True, begins: bool = True
    ) -> int:
        """Returns the number of tokens to keep if a stop string ends at character `end` of the
        decoded text, including the token that completes it."""
        return self.vocabulary.tokens_until(_as_list(ids), end, skip_special_tokens, begins)

    @cached_property
    def response_template(self) -> ResponseTemplate | None:
        """The response template that describes the model's answers, or None if its files have none.
        Raises TokenizerError for an invalid one."""
        from penstock.text.parsers.response_template import read_template

        return None if self._response_template is None else read_template(self._response_template)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tables of token bytes, made at first use (30 ms for 128,256 tokens)."""
        return Vocabulary.build(self._tokens, self.special_ids, self._style)

    @property
    def token_bytes(self) -> list[bytes]:
        """Bytes of each id inside a text, a list with vocab_size entries. Read-only."""
        return self.vocabulary.pieces

    # -- stop strings and chat templates

    @cached_property
    def stop_index(self) -> StopIndex:
        """The vocabulary prepared for stop strings, made at first use."""
        return StopIndex(self.vocabulary)

    def stop_strings(
        self, stops: Sequence[str], *, skip_special_tokens: bool = True
    ) -> StopStrings:
        """Returns the stop strings of a request, with watch_bits computed. Requests with equal stop
        strings share them."""
        key = (tuple(stops), skip_special_tokens)
        found = self._stops.get(key)
        if found is None:
            found = StopStrings(key[0], self.stop_index, skip_special_tokens=skip_special_tokens)
            for oldest in tuple(self._stops)[:-255]:  # keeps the last 256; each takes 128 KB
                self._stops.pop(oldest, None)
            self._stops[key] = found
        return found

    def has_stops(self, stops: Sequence[str], *, skip_special_tokens: bool = True) -> bool:
        """Returns True if these stop strings were made before, with watch_bits computed."""
        found = self._stops.get((tuple(stops), skip_special_tokens))
        return found is not None and found.has_bits

    @property
    def chat_template(self) -> str | None:
        """The model's chat template for chats without tools, or None."""
        return self.chat_templates.get("default")

    def _named_id(self, name: str) -> int | None:
        word = self.special_tokens.get(name)
        return None if word is None else self._fast.token_to_id(word)


def _too_long(limit: int) -> ContextLengthError:
    return ContextLengthError(
        f"{too_long(limit)}: shorten it, or cut it to its end", param="prompt"
    )


def _tokens_by_id(
    fast: FastTokenizer, vocab_size: int | None, files: TokenizerFiles
) -> list[str | None]:
    """Returns the vocabulary's entry for each id; None for gaps and for padding up to the model's
    `vocab_size`.

    Special tokens may lie beyond vocab_size: models of a family share a tokenizer, and Gemma 3's
    small ones have no row for the image token. A prompt with such an id is refused.
    """
    vocabulary, added = fast.get_vocab(with_added_tokens=True), fast.get_added_tokens_decoder()
    own = max(vocabulary.values(), default=-1) + 1
    if own == 0:
        raise TokenizerError(
            f"{files.folder / 'tokenizer.json'} has no tokens; fetch the file again"
        )
    size = own if vocab_size is None else vocab_size
    ends = {files.named.get("bos_token"), files.named.get("eos_token")}
    spare = {index for index, token in added.items() if token.special and token.content not in ends}
    if own > size and any(index >= size and index not in spare for index in vocabulary.values()):
        raise TokenizerError(
            f"the tokenizer in {files.folder} has ids up to {own - 1}, the model's vocab_size is"
            f" {vocab_size}; they are not of one model: give the tokenizer that came with the"
            " weights"
        )
    tokens: list[str | None] = [None] * size
    for token, index in vocabulary.items():
        if index < size:
            tokens[index] = token
    # an added token replaces an ordinary token with the same id
    for index, entry in added.items():
        if index < size:
            tokens[index] = entry.content
    return tokens


def _add_config_tokens(fast: FastTokenizer, files: TokenizerFiles) -> None:
    """Adds the tokens that only tokenizer_config.json has, in the order of ids, and marks named
    tokens (as bos_token) as special."""
    from tokenizers import AddedToken

    known = fast.get_added_tokens_decoder()
    for index, entry in sorted(files.added.items()):
        if index in known and known[index].content == entry["content"]:
            continue
        keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
        fast.add_tokens(
            [
                AddedToken(
                    entry["content"], **{key: bool(entry[key]) for key in keys if key in entry}
                )
            ]
        )
        if fast.token_to_id(entry["content"]) != index:
            raise TokenizerError(
                f"tokenizer_config.json in {files.folder} puts {entry['content']!r} at id {index},"
                f" tokenizer.json at {fast.token_to_id(entry['content'])}; the two files are not of"
                " one model"
            )
    special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
    # A pad token without an id is not added: Penstock doesn't use it, and its id could exceed the
    # model's vocabulary.
    named = [
        word
        for key, word in files.named.items()
        if key != "pad_token" or fast.token_to_id(word) is not None
    ]
    missing = [
        word
        for word in dict.fromkeys([*named, *files.extra_special])
        if word and word not in special
    ]
    if missing:
        fast.add_special_tokens(
            [AddedToken(word, special=True, normalized=False) for word in missing]
        )


def _decoder_spec(fast: FastTokenizer) -> dict[str, Any] | None:
    if fast.decoder is None:
        return None
    spec: dict[str, Any] = json.loads(fast.decoder.__getstate__())
    return spec


def _as_list(ids: Ids) -> Sequence[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise UsageError(f"a prompt must be text, not {type(text).__name__}", param="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text has half a surrogate pair at character {error.start}; send valid Unicode",
            param="prompt",
        ) from error
