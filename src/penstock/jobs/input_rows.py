"""Parses the input rows of `penstock run`. A row becomes a prompt and sampling parameters. There
are two formats. Ours has SamplingParams' defaults: {"id", "prompt": text or ids, or "messages",
"metadata", and any field of SamplingParams or of a chat}. The other is a request body of OpenAI's
API with a custom_id, read as a server reads the lines of a batch file: {"custom_id", "method",
"url", "body"}, or the body's fields beside the id: {"custom_id", "messages", ...}.

Knows the formats; no engine. Fields that cannot be served are refused by name; row numbers are line
numbers, from 1.
"""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec

from penstock.almanac.samples import needs_pyarrow
from penstock.errors import UsageError
from penstock.key_set import KeySet
from penstock.request import SamplingParams
from penstock.server.openai.batch_line import BadRows, BatchLine, check_id, parse_line, read_request
from penstock.server.openai.forms import ChatForm, CompletionForm, StopWhenForm, convert, reason_of
from penstock.server.openai.prompt_ids import plain_messages
from penstock.text.answer_pattern import AnswerPattern
from penstock.text.chat import OPTIONS, check_messages, check_options

Id = str | int
OWN_FIELDS = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs", "output_kind"}
LONGEST_ID = 1 << 20  # characters; a line of a journal has a limited length
LONGEST_CARRIED = 1 << 20  # characters of JSON of all data that a row copies to OUT
OUTS_OWN = ("id", "outputs", "error", "metadata")  # fields that a run writes in each row of OUT
TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
# The fields of our row format. SamplingParams and the chat's options check the values themselves.
OwnRow = msgspec.defstruct(
    "OwnRow",
    [
        ("id", Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_ID)] | int),
        ("prompt", str | TokenIds | None, None),
        *((name, Any, None) for name in ("messages", "metadata", *OPTIONS, *OWN_FIELDS)),
    ],
    forbid_unknown_fields=True,
)
# Fields of a request body that a server's batch accepts and `penstock run` does not -> the one
# value that is accepted.
UNSERVED: dict[str, Any] = {
    "echo": False,
    "prompt_logprobs": None,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "truncate_prompt_tokens": None,
    "timeout": None,
    "cache_salt": None,
    "add_special_tokens": None,
    "tools": None,
    "reasoning_effort": None,
}
PARQUET_ROWS = 1024  # rows of a Parquet file in memory at once
# Default values of a chat's options, which are not passed on.
_USUAL = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": None,
}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Sampling defaults for parsing rows before the model is known; the engine checks values that
    depend on the model."""

    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    vocab_size: int = 2**31
    max_model_len: int = 2**31


NO_MODEL = ModelDefaults()


@dataclass(slots=True)
class Row:
    """One checked row, with either prompt or messages. model: the model that an OpenAI row names;
    it is only reported. chat: options of `text.chat`. number: its line number. carried: metadata
    and kept columns, which are copied to OUT.
    """

    id: Id
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    model: str | None = None
    chat: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    carried: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Survey:
    """The result of the first pass over a file. fingerprint: checksum of the file's bytes. models:
    the first few model names in OpenAI rows."""

    rows: int
    fingerprint: str
    models: list[str]


def kept_columns(told: str | None) -> tuple[str, ...]:
    """Parses `--keep a,b`. Raises UsageError for a name that is one of OUT's own."""
    names = (
        tuple(dict.fromkeys(name.strip() for name in told.split(","))) if told is not None else ()
    )
    for name in names:
        if not name or name in OUTS_OWN:
            why = (
                f"{name!r} is OUT's own, and metadata is carried as it is"
                if name
                else "a name is empty"
            )
            raise UsageError(
                f"--keep takes names of IN's columns, as prompt,answer: {why}", param="keep"
            )
    return names


def survey(path: Path, say: Callable[[int], None], keep: tuple[str, ...] = ()) -> Survey:
    """Checks every row of a file in one pass and constant memory, beside 16 to 32 bytes an id.

    keep: columns that are copied to OUT. say: called with the number of checked rows, every
    100,000.

    Raises one UsageError with the number of every row that is broken, has an unserved field, or
    repeats an id.
    """
    digest, seen, models, rows = blake2b(digest_size=16), KeySet(), dict[str, None](), 0
    bad = BadRows()
    for number, line in read_lines(path):
        digest.update(line)
        if not line.strip():
            continue
        rows += 1
        if rows % 100_000 == 0:
            say(rows)
        try:
            row = parse_row(line, number, seed=0, keep=keep)
            if not seen.add(row.id):
                raise UsageError(
                    f"row {number}: id {row.id!r} was there before: give every row its own"
                )
        except UsageError as error:
            bad.add(number, str(error))
            continue
        if row.model is not None and len(models) < 4:
            models[row.model] = None
    bad.refuse()
    return Survey(rows, digest.hexdigest(), list(models))


def read_rows(
    path: Path, seed: int, defaults: Mapping[str, float | int], keep: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Yields the rows of a file one by one. seed: the run's seed; a row without a seed gets one
    derived from it and the row's id. defaults: the model's sampling defaults, for rows in OpenAI's
    format. keep: columns that are copied to OUT.
    """
    facts = ModelDefaults(defaults)
    for number, line in read_lines(path):
        if line.strip():
            yield replace(parse_row(line, number, seed, facts, keep), number=number)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) of a file, from 1; .gz is unpacked, and a row of .parquet becomes a
    line of JSON. Raises UsageError."""
    if not path.is_file():
        raise UsageError(f"no file {path}: name a file of JSON lines, plain or .gz, or .parquet")
    if path.name.endswith(".parquet"):
        yield from _parquet_lines(path)
        return
    number = 0
    try:
        with cast(
            BinaryIO, gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")
        ) as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except (EOFError, OSError, zlib.error) as error:
        raise UsageError(
            f"{path} cannot be read after row {number} ({error}): fetch the file again"
        ) from error


def _parquet_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields rows as JSON. Nulls are left out at every depth, because a Parquet file has every
    column in every row."""
    needs_pyarrow()
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(PARQUET_ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield number, json.dumps(_present(row)).encode()
    except TypeError as error:
        raise UsageError(
            f"row {number} of {path} holds what JSON has no word for ({error}): make it a text"
        ) from error
    except (ArrowException, OSError) as error:
        raise UsageError(
            f"{path} cannot be read after row {number} ({error}): fetch the file again"
        ) from error


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _present(inner) for name, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


def parse_json(line: bytes, where: str) -> Any:
    """Returns the value of a line of JSON. where: the line's name, with which the error begins.
    Raises UsageError for a line that is no UTF-8, no JSON, or has a number with thousands of
    digits."""
    try:
        return json.loads(str(line, "utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON ({error}): mend the row or take it out") from error


def parse_row(
    line: bytes, number: int, seed: int, facts: ModelDefaults = NO_MODEL, keep: tuple[str, ...] = ()
) -> Row:
    """Parses a row. Raises UsageError; its message begins with the row's number."""
    told = parse_json(line, f"row {number}")
    try:
        row = msgspec.convert(told, dict[str, Any])
        carried = _carried(row, keep)
        if "custom_id" not in row:
            made = _own_row(
                (
                    {name: row[name] for name in row if name not in keep or name in _OWN}
                    if keep
                    else row
                ),
                seed,
            )
        else:
            form = _LINE if "body" in row else _BODY
            if (left := _without(row, keep, form)) is not row:
                line = json.dumps(left).encode()
            made = _batch_row(line.removeprefix(BOM_UTF8) if number == 1 else line, seed, facts)
        made.carried = carried
        return made
    except UsageError as error:
        raise UsageError(f"row {number}: {error}", param=error.param) from error
    except msgspec.ValidationError as error:
        raise UsageError(f"row {number}: {reason_of(error)}") from error
    except RecursionError as error:
        # JSON that could be parsed may still be nested too deep to be shown in an error message
        raise UsageError(f"row {number} is nested too deep: flatten it") from error


_OWN, _LINE = frozenset(OwnRow.__struct_fields__), frozenset(BatchLine.__struct_fields__)
_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_BODY = frozenset(("custom_id", *CompletionForm.__struct_fields__, *ChatForm.__struct_fields__))


def _without(row: dict[str, Any], keep: tuple[str, ...], form: frozenset[str]) -> dict[str, Any]:
    """Returns the row without the kept columns that are no fields of its format; the row itself if
    it has none."""
    beside = {name for name in keep if name in row and name not in form}
    return {name: row[name] for name in row if name not in beside} if beside else row


def _carried(row: dict[str, Any], keep: tuple[str, ...]) -> dict[str, Any]:
    """Returns the data that is copied to OUT: the row's metadata (in an OpenAI row, the body's) and
    the kept columns. Raises UsageError if it is too long."""
    body = row.get("body")
    holder = body if "custom_id" in row and isinstance(body, dict) else row
    found = {name: row[name] for name in keep if name in row}
    if holder.get("metadata") is not None:
        found["metadata"] = holder["metadata"]
    size = len(json.dumps(found, ensure_ascii=False)) if found else 0
    if size > LONGEST_CARRIED:
        what = " and ".join(found)
        rule = (
            f"at most {LONGEST_CARRIED:,} go through to OUT: shorten it, or keep a name for it"
            " there"
        )
        raise UsageError(
            f"{what} of this row has {size:,} characters of JSON, and {rule}", param="metadata"
        )
    return found


def _own_row(row: dict[str, Any], seed: int) -> Row:
    """Parses a row in our own format. Raises UsageError, msgspec.ValidationError."""
    beside = next((name for name in row if name not in _OWN and name not in _SAMPLING), None)
    try:
        own: Any = msgspec.convert(row, OwnRow)
    except msgspec.ValidationError as error:
        if beside is None or f"unknown field `{beside}`" not in str(error):
            raise
        way = f"leave it out, or let the column through to OUT by --keep {beside[:80]}"
        raise UsageError(f"{reason_of(error)}: {way}") from error
    if (own.prompt is None) == (own.messages is None):
        raise UsageError("a row has either prompt or messages")
    chat = {name: row[name] for name in OPTIONS if row.get(name) is not None}
    if chat and own.messages is None:
        raise UsageError(f"{next(iter(chat))} belongs to messages: leave it out beside a prompt")
    check_options(**chat)
    given = {name: row[name] for name in row if name in OWN_FIELDS}
    if given.get("stop_when") is not None:
        given["stop_when"] = convert(given["stop_when"], StopWhenForm, "stop_when").made
        AnswerPattern(given["stop_when"].pattern)  # raises UsageError for an invalid pattern
    if given.get("seed") is None:
        given["seed"] = _seed(seed, own.id)
    params = SamplingParams(**given)
    messages = None if own.messages is None else check_messages(own.messages)
    return Row(own.id, own.prompt, messages, params, chat=chat)


def _batch_row(data: bytes, seed: int, facts: ModelDefaults) -> Row:
    line = parse_line(data)
    check_id(line.custom_id)
    # The row's own seed is the default of one that is not given: parameters are made once.
    usual = {"seed": _seed(seed, line.custom_id), **facts.sampling_defaults}
    form, params = read_request(line, replace(facts, sampling_defaults=usual), _check_served)
    if isinstance(form, CompletionForm):
        prompt = msgspec.convert(form.prompt, str | TokenIds)
        return Row(line.custom_id, prompt, None, params, form.model)
    chat = {
        name: given for name, usual in _USUAL.items() if (given := getattr(form, name)) != usual
    }
    return Row(line.custom_id, None, plain_messages(form), params, form.model, chat)


def _check_served(form: CompletionForm | ChatForm) -> None:
    """Raises UsageError for fields whose results OUT's rows cannot hold."""
    for name, harmless in UNSERVED.items():
        if getattr(form, name, harmless) != harmless:
            message = (
                f"{name} is not served by penstock run: leave it out, or send the file by penstock"
                " batch"
            )
            raise UsageError(message, param=name)


def _seed(seed: int, name: Id) -> int:
    """Derives a row's seed from the run's seed and the row's id, so that its samples are the same
    whenever they are drawn."""
    return mix("row", seed, json.dumps(name))


def mix(what: str, seed: int, key: object) -> int:
    """Derives a 63-bit seed from the run's seed, a purpose and a key; the same on any machine and
    version."""
    return int.from_bytes(blake2b(f"{what}/{seed}/{key}".encode(), digest_size=8).digest()) >> 1
