"""tokenizer_files: reads the tokenizer's files of a model folder. They are tokenizer.json,
tokenizer_config.json, special_tokens_map.json and chat templates.

tokenizer.json decides the ids, also whether BOS is added, as in transformers' AutoTokenizer (5.x
ignores the config's `add_bos_token` if the file exists). tokenizer_config.json gives the names of
special tokens, tokens that only it adds, and chat templates. Knows JSON and files; encodes nothing,
and runs no code of a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from penstock.disk import read_plain
from penstock.errors import TokenizerError
from penstock.json_keys import read_json

LARGEST_FILE = 512 << 20  # most bytes of a file; Gemma's tokenizer.json has 33 MB
# limit of how many times longer the normalizer may make a text; for served models it is 1 to 3
MOST_GROWTH = 256


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents of the tokenizer's files, not validated. added: id -> entry of the token in
    tokenizer_config.json. named: special tokens by their names there, as bos_token -> "<s>"."""

    folder: Path
    tokenizer_json: bytes
    named: dict[str, str]
    extra_special: tuple[str, ...] = ()
    added: dict[int, dict[str, Any]] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    response_template: Any = None
    template_file: Path | None = None  # file that replaces the folder's chat templates, or None


def read_tokenizer_files(folder: Path, template_file: Path | None = None) -> TokenizerFiles:
    """Reads the tokenizer's files in a folder. template_file: file that replaces the folder's chat
    templates. Raises TokenizerError, which names the missing or broken file and a remedy."""
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise TokenizerError(
            f"no folder {folder} to read a tokenizer from; give a model folder with a"
            " tokenizer.json"
        )
    if not path.is_file():
        others = [
            name
            for name in ("tokenizer.model", "vocab.json", "tekken.json")
            if (folder / name).is_file()
        ]
        hint = (
            f" ({others[0]} alone isn't read: save it as a fast tokenizer with transformers'"
            " save_pretrained)"
            if others
            else ""
        )
        raise TokenizerError(
            f"{folder} has no tokenizer.json{hint}; add it, or start with skip_tokenizer_init and"
            " token ids"
        )
    tokenizer_json = _read_bytes(path)
    _check_growth(tokenizer_json, path)
    config, named = _read_config(folder)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    words = list(extra.values()) if isinstance(extra, dict) else extra
    if not isinstance(words, list):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'} has special tokens that are no list: fetch it"
            " again"
        )
    return TokenizerFiles(
        folder=folder,
        tokenizer_json=tokenizer_json,
        named=named,
        extra_special=tuple(word for entry in words if (word := _content(entry)) is not None),
        added=_added_tokens(config.get("added_tokens_decoder") or {}, folder),
        templates=(
            _chat_templates(config, folder)
            if template_file is None
            else {"default": _read_text(template_file)}
        ),
        template_file=template_file,
        response_template=config.get("response_template"),
    )


class _Token(msgspec.Struct):
    id: int
    content: str


class _Added(msgspec.Struct):
    added_tokens: list[_Token] = []


class _Model(msgspec.Struct):
    # a dict of ids by text; for models of type Unigram a list of texts and scores
    vocab: dict[str, int] | list[tuple[str, float]]


class _Whole(msgspec.Struct):
    model: _Model


def read_end_of_text(folder: Path) -> int | None:
    """Returns the id of the tokenizer's eos_token without making a tokenizer, which takes a third
    of a second. Returns None if there is no tokenizer or no eos_token. Raises TokenizerError for a
    broken file."""
    if not (folder / "tokenizer.json").is_file():
        return None
    config, named = _read_config(folder)
    word = named.get("eos_token")
    if word is None:
        return None
    for index, entry in _added_tokens(config.get("added_tokens_decoder") or {}, folder).items():
        if entry["content"] == word:
            return index
    data = _read_bytes(folder / "tokenizer.json")
    try:
        for token in msgspec.json.decode(data, type=_Added).added_tokens:
            if token.content == word:
                return token.id
        vocab = msgspec.json.decode(data, type=_Whole).model.vocab
    except (msgspec.DecodeError, RecursionError):
        return None  # the file is no tokenizer at all, so loading it later raises the error
    ids = (
        vocab if isinstance(vocab, dict) else {text: index for index, (text, _) in enumerate(vocab)}
    )
    return ids.get(word)


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the object in tokenizer_config.json, and its named tokens; in older folders
    special_tokens_map.json has some of these."""
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(config)
    if "added_tokens_decoder" not in config:
        named = _named_tokens(_read_json(folder / "special_tokens_map.json")) | named
    return config, named


class _Spec(msgspec.Struct):
    """The parts of tokenizer.json that are read here. Parsing its vocabulary too would take a tenth
    of a second."""

    normalizer: Any = None


def _check_growth(tokenizer_json: bytes, path: Path) -> None:
    """Raises TokenizerError for a normalizer that may make a text MOST_GROWTH times as long or
    longer. A normalizer that doubles a letter thirty times would take all memory for a single word.
    """
    try:
        growth = _growth(msgspec.json.decode(tokenizer_json, type=_Spec).normalizer)
    except (msgspec.DecodeError, RecursionError):
        return  # the file is no tokenizer at all, so the library raises the error later
    if growth > MOST_GROWTH:
        raise TokenizerError(
            f"{path} has a normalizer that may make texts over {MOST_GROWTH} times as long: not"
            " served"
        )


def prefixes(part: Any) -> bool:
    """Returns True if a normalizer or pre-tokenizer adds a space before a text. part: its JSON in
    tokenizer.json."""
    return bool(without_prefix(part) != part)


def without_prefix(part: Any) -> Any:
    """Returns a normalizer or pre-tokenizer changed so that it adds no space before a text. part:
    its JSON in tokenizer.json, or None."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        return {
            **part,
            name: [without_prefix(each) for each in part[name] if each.get("type") != "Prepend"],
        }
    if kind == "Prepend":
        return None
    if kind == "Metaspace" and part.get("prepend_scheme") != "never":
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel" and part.get("add_prefix_space"):
        return {**part, "add_prefix_space": False}
    return part


def _growth(normalizer: Any) -> float:
    """Returns the largest number of characters that a normalizer's replacements may make of one
    character. normalizer: its JSON in tokenizer.json."""
    if not isinstance(normalizer, dict):
        return 1
    inner = normalizer.get("normalizers")
    if isinstance(inner, list):
        return prod(min(_growth(each), MOST_GROWTH + 1) for each in inner)
    pattern, content = normalizer.get("pattern"), normalizer.get("content")
    if not isinstance(pattern, dict) or not isinstance(content, str) or not content:
        return 1
    text = pattern.get("String")
    # a regex may match the empty string, so its replacement may come between any two characters
    return max(len(content) / len(text), 1) if isinstance(text, str) and text else len(content) + 1


def _read_bytes(path: Path) -> bytes:
    try:
        return read_plain(path, LARGEST_FILE)
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror or error}") from error


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text; fetch the file again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} if there is no file, since both config files are
    optional."""
    if not path.is_file():
        return {}
    value = read_json(path, TokenizerError)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which no token's text can contain
        raise TokenizerError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    return value


def _content(entry: Any) -> str | None:
    """Returns the text of a token written as a string or as {"content": ...}, else None."""
    value = entry.get("content") if isinstance(entry, dict) else entry
    return value if isinstance(value, str) else None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the tokens under a config's keys `..._token`, by key. They are also variables of chat
    templates."""
    found = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    return {key: value for key, value in found.items() if value is not None}


def _added_tokens(entries: Any, folder: Path) -> dict[int, dict[str, Any]]:
    try:
        added = {
            int(index): {**entry, "content": str(entry["content"])}
            for index, entry in entries.items()
        }
        if any(not 0 <= index < 2**31 for index in added):
            raise ValueError("an id below 0 or beyond 2**31 - 1")
        return added
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'} has a broken added_tokens_decoder ({error!r})"
        ) from error


def _chat_templates(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Returns the chat templates by name. A file chat_template.jinja in the folder replaces the
    config's default template."""
    value = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        pairs = [
            (entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)
        ]
        templates.update(
            {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
        )
    elif isinstance(value, dict):
        templates.update({name: text for name, text in value.items() if isinstance(text, str)})
    elif value is not None:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'} has a chat_template that is neither text nor a"
            " list"
        )
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    written = {path.stem: _read_text(path) for path in files}
    if (folder / "chat_template.jinja").is_file():
        written["default"] = _read_text(folder / "chat_template.jinja")
    return written or templates
