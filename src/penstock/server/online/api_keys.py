"""API keys: reads, names and finds them. A key may have its own limits. Only its SHA-256 is kept,
and compared in constant time. Knows strings and files; no HTTP."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import UsageError

ENVIRONMENT = "PENSTOCK_API_KEY"
LONGEST = 512  # most characters of an API key
NAMED_BY = 8  # hex digits of its SHA-256 that name a key without a name
# most keys; each request is compared with all of them, which takes about 1 us per key
MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key. name: owner name of its files and batches, also used in logs. digest: SHA-256 of
    the key's UTF-8 bytes, in hex. max_num_queued_reqs, max_num_queued_tokens: the key's own limits
    in addition to the server's (request_limits.py); None: only the server's. admin: True if the key
    may use the admin routes."""

    name: str
    digest: str
    number: int = 0  # position among the API keys, from 1
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    admin: bool = False


class _FileKey(msgspec.Struct, forbid_unknown_fields=True):
    """A `[[key]]` table of the API key file."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    key: str | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    max_num_queued_reqs: Annotated[int, Meta(ge=1)] | None = None
    max_num_queued_tokens: Annotated[int, Meta(ge=1)] | None = None
    admin: bool = False


_FIELDS = _FileKey.__struct_fields__


def find_key(keys: Sequence[Key], shown: bytes) -> Key | None:
    """Returns the key whose text is `shown`, or None."""
    digest, found = hashlib.sha256(shown).hexdigest(), None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def gather_keys(
    given: Sequence[str], file: Path | None, environment: Mapping[str, str]
) -> tuple[Key, ...]:
    """Returns the keys of --api-key (`given`) and of --api-key-file, or the environment's key if
    there are none. Raises UsageError."""
    source = "--api-key"
    if not given and file is None and ENVIRONMENT in environment:
        given, source = [environment[ENVIRONMENT]], f"{ENVIRONMENT}, or unset it"
    keys = [_plain_key(key, source) for key in given]
    if file is not None:
        keys += read_key_file(file)
    if len({key.digest for key in keys}) < len(keys):
        raise UsageError("two API keys are the same: leave one out")
    if len({key.name for key in keys}) < len(keys):
        raise UsageError("two API keys have the same name: give each its own in the API key file")
    if len(keys) > MOST:
        raise UsageError(
            f"there are more than {MOST} API keys: put a gateway in front that knows its users"
        )
    return tuple(replace(key, number=number) for number, key in enumerate(keys, 1))


def read_key_file(path: Path) -> list[Key]:
    """Reads the keys of a TOML file, one `[[key]]` table each: `name`; `key` or `sha256` (hex);
    optionally max_num_queued_reqs and max_num_queued_tokens; `admin = true` for an operator. Raises
    UsageError; no message contains a key."""
    try:
        if path.stat().st_mode & stat.S_IWOTH:
            raise UsageError(
                f"everybody may write to the API key file {path}: take that away (chmod o-w)"
            )
        found = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"the API key file cannot be read ({error.strerror}): check --api-key-file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = _place_of(error)
        raise UsageError(
            f"the API key file is not TOML in UTF-8 ({where}): write a [[key]] with name and key"
            " for each"
        ) from error
    entries = found.get("key")
    if set(found) != {"key"} or not isinstance(entries, list) or not entries:
        raise UsageError(
            "the API key file must hold [[key]] tables and nothing else, one at least: write"
            ' [[key]], and below it name = "app" and key = "..."'
        )
    return [_file_key(entry, place) for place, entry in enumerate(entries, 1)]


def _place_of(error: tomllib.TOMLDecodeError | UnicodeDecodeError) -> str:
    """Returns the line and column of a parser's error, without its text, which may quote the secret
    file."""
    if isinstance(error, UnicodeDecodeError):
        line = 1 + error.object[: error.start].count(b"\n")
        return f"line {line}"
    found = re.search(r"\(at (line \d+, column \d+)\)\Z", str(error))
    return found[1] if found else "at its end"


def _file_key(entry: Any, place: int) -> Key:
    """Returns one key of the file. place: its number in the file, from 1. Raises UsageError. Field
    names in the message are followed by `=`, since cli/exit_codes.py would print two of them as
    options otherwise."""
    where = f"[[key]] number {place} of the API key file"
    try:
        read = msgspec.convert(entry, _FileKey)
    except msgspec.ValidationError as error:
        what = re.sub(r"(field |at )`(?:\$\.)?(.{1,80}).*`", r"\1\2=", str(error)).replace("`", "")
        raise UsageError(
            f"{where} cannot be: {what}; it takes {', '.join(f'{each}=' for each in _FIELDS)}"
        ) from error
    if not read.name.isprintable():
        raise UsageError(f"{where} needs a name of printable characters")
    if (read.key is None) == (read.sha256 is None):
        raise UsageError(f"{where} needs either key or sha256")
    digest = (read.sha256 or _plain_key(read.key, where).digest).lower()
    reqs, tokens = read.max_num_queued_reqs, read.max_num_queued_tokens
    return Key(
        name=read.name,
        digest=digest,
        max_num_queued_reqs=reqs,
        max_num_queued_tokens=tokens,
        admin=read.admin,
    )


def _plain_key(key: Any, source: str) -> Key:
    """Returns a key that was given without a name. It is named by its digest, so that it keeps its
    files and batches when other keys are added or removed. source: where the key was given, for the
    error. Raises UsageError if the key is not printable ASCII, since it is sent in a header."""
    if (
        not isinstance(key, str)
        or not 0 < len(key) <= LONGEST
        or not key.isascii()
        or not key.isprintable()
    ):
        raise UsageError(
            f"an API key must be 1 to {LONGEST} printable ASCII characters: check {source}",
            param="api_key",
        )
    if key != key.strip():
        raise UsageError(f"an API key begins or ends with a space: check {source}", param="api_key")
    digest = hashlib.sha256(key.encode()).hexdigest()
    return Key(name=f"key-{digest[:NAMED_BY]}", digest=digest, admin=True)
