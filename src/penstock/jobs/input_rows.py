"""The rows that `penstock run` reads, made into prompts and sampling parameters: our own form, with SamplingParams'
defaults ({"id", "prompt": text or ids, or "messages", and any field of SamplingParams or of a chat}), and OpenAI's
batch form, read as a server's batch reads it ({"custom_id", "method", "url", "body"}).

It knows the forms, no engine. Whatever isn't served is refused by name; rows count from 1, and are lines.
"""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.errors import UsageError
from penstock.jobs.prompts import mix
from penstock.journal import KeySet
from penstock.request import SamplingParams
from penstock.server.openai.batch_line import LineNumbers, check_id, parse_line, read_request
from penstock.server.openai.forms import ChatForm, CompletionForm
from penstock.server.openai.prompt_ids import plain_messages
from penstock.server.openai.translate import SamplingFacts
from penstock.text.chat import check_messages
from penstock.text.chat_options import OPTIONS, check_options

Id = str | int
TOLD = 20  # bad rows told in full; of those beyond, the numbers alone
LONGEST = 500  # characters of what is said of one
OWN_FIELDS = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}
# Fields of a body that a server's batch serves and a row of ours doesn't -> what it may say all the same.
UNSERVED: dict[str, Any] = {
    "echo": False,
    "prompt_logprobs": None,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "truncate_prompt_tokens": None,
    "timeout": None,
    "cache_salt": None,
    "add_special_tokens": None,
}
# What of a chat's options needs no saying.
_USUAL = {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": None}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """The sampling defaults of a model whose sizes aren't known here: what they bound, the engine looks at."""

    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    vocab_size: int = 2**31
    max_model_len: int = 2**31


NO_MODEL = ModelDefaults()


@dataclass(slots=True)
class Row:
    """One row, checked. Either prompt or messages is there. model: what a batch row names, for the record. chat: what
    it says of `text.chat_options`."""

    id: Id
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    model: str | None = None
    chat: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Survey:
    """What the first pass over a file found. fingerprint: of its bytes. models: the first few that batch rows name."""

    rows: int
    fingerprint: str
    models: list[str]


@dataclass(slots=True)
class _BadRows:
    """Rows that cannot be run. told: what is wrong with the first TOLD, and the field it is about."""

    told: list[tuple[str, str | None]] = field(default_factory=list)
    beyond: LineNumbers = field(default_factory=LineNumbers)

    def add(self, number: int, error: UsageError) -> None:
        if len(self.told) == TOLD:
            self.beyond.add(number)
            return
        message = str(error)
        self.told.append((message if len(message) <= LONGEST else message[: LONGEST - 3] + "...", error.param))

    def refuse(self) -> None:
        """Raises UsageError where there is one."""
        if not self.told:
            return
        if len(self.told) == 1:
            message, param = self.told[0]
            raise UsageError(message, param=param)
        rest = f"; and {len(self.beyond):,} more: {self.beyond}" if self.beyond else ""
        raise UsageError(
            f"{len(self.told) + len(self.beyond):,} rows are bad: mend them or take them out, none was run: "
            f"{'; '.join(message for message, _ in self.told)}{rest}"
        )


def survey(path: Path, say: Callable[[int], None]) -> Survey:
    """Checks every row of a file, in one pass and constant memory but for 16 to 32 bytes an id.

    say: told the rows checked so far, every 100,000.   Raises one UsageError with the number of every row that is
    broken, that asks for what isn't served, or whose id was there before: the first TOLD with what is wrong.
    """
    digest, seen, models, rows, bad = blake2b(digest_size=16), KeySet(), dict[str, None](), 0, _BadRows()
    for number, line in read_lines(path):
        digest.update(line)
        if not line.strip():
            continue
        rows += 1
        if rows % 100_000 == 0:
            say(rows)
        try:
            row = parse_row(line, number, seed=0)
            if not seen.add(row.id):
                raise UsageError(f"row {number}: id {row.id!r} was there before: give every row its own")
        except UsageError as error:
            bad.add(number, error)
            continue
        if row.model is not None and len(models) < 4:
            models[row.model] = None
    bad.refuse()
    return Survey(rows, digest.hexdigest(), list(models))


def read_rows(path: Path, seed: int, defaults: Mapping[str, float | int]) -> Iterator[Row]:
    """Yields the rows of a file one by one. seed: the run's; a row that brings none gets one from it and its id.
    defaults: the model's sampling defaults, for rows in OpenAI's form."""
    facts = ModelDefaults(defaults)
    for number, line in read_lines(path):
        if line.strip():
            yield parse_row(line, number, seed, facts)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1; .gz is unpacked on the way."""
    if not path.is_file():
        raise UsageError(f"no file {path}: name a file of JSON lines, plain or .gz")
    number = 0
    try:
        with cast(BinaryIO, gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")) as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except (EOFError, OSError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read after row {number} ({error}): fetch the file again") from error


def parse_row(line: bytes, number: int, seed: int, facts: SamplingFacts = NO_MODEL) -> Row:
    """Raises UsageError that begins with the row's number."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"row {number} is no JSON ({error}): mend it or take it out") from error
    try:
        if not isinstance(row, dict):
            raise UsageError("a row is a JSON object")
        if "custom_id" not in row:
            return _own_row(row, seed)
        return _batch_row(line.removeprefix(BOM_UTF8) if number == 1 else line, seed, facts)
    except UsageError as error:
        raise UsageError(f"row {number}: {error}", param=error.param) from error
    except RecursionError as error:  # of what could just be read, not all can be written into an error
        raise UsageError(f"row {number} is nested too deep: flatten it") from error


def _own_row(row: dict[str, Any], seed: int) -> Row:
    name = _id(row, "id")
    _refuse_unknown(row, OWN_FIELDS | {"id", "prompt", "messages", *OPTIONS}, "a row")
    if ("prompt" in row) == ("messages" in row):
        raise UsageError("a row has either prompt or messages")
    values = {key: row[key] for key in row if key in OWN_FIELDS}
    return Row(name, _prompt(row), _messages(row), _params(values, seed, name), chat=_chat_options(row))


def _batch_row(data: bytes, seed: int, facts: SamplingFacts) -> Row:
    line = parse_line(data)
    check_id(line.custom_id)
    form, params = read_request(line, facts, _check_served)
    if params.seed is None:
        params.seed = _seed(seed, line.custom_id)
    if isinstance(form, CompletionForm):
        return Row(line.custom_id, _prompt({"prompt": form.prompt}), None, params, form.model)
    chat = {name: given for name, usual in _USUAL.items() if (given := getattr(form, name)) != usual}
    return Row(line.custom_id, None, plain_messages(form), params, form.model, chat)


def _check_served(form: CompletionForm | ChatForm) -> None:
    """Raises UsageError for what the outputs of a row have no place for."""
    for name, harmless in UNSERVED.items():
        if getattr(form, name, harmless) != harmless:
            message = f"{name} is not served by penstock run: leave it out, or send the file by penstock batch"
            raise UsageError(message, param=name)


def _params(values: dict[str, Any], seed: int, name: Id) -> SamplingParams:
    """A row without a seed gets its own from the run's: so its samples are the same whenever they are drawn."""
    if values.get("seed") is None:
        values["seed"] = _seed(seed, name)
    try:
        return SamplingParams(**values)
    except UsageError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"a sampling parameter has a value of the wrong kind ({error})") from error


def _seed(seed: int, name: Id) -> int:
    return mix("row", seed, json.dumps(name))


def _id(row: Mapping[str, Any], field: str) -> Id:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        said = f"{field} must be a text or a whole number" if field in row else f"there is no {field}"
        raise UsageError(f'{said}: give every row its own, as {{"{field}": 1, ...}}', param=field)
    return value


def _refuse_unknown(row: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(row.keys() - known)
    if unknown:
        raise UsageError(f"{what} has no field {unknown[0]!r}; known are {', '.join(sorted(known))}", param=unknown[0])


def _prompt(row: Mapping[str, Any]) -> str | list[int] | None:
    if "prompt" not in row:
        return None
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    whole = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    if not whole or not prompt:
        raise UsageError("prompt must be one text or one list of token ids", param="prompt")
    return cast(list[int], prompt)


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    return check_messages(row["messages"]) if "messages" in row else None


def _chat_options(row: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: row[name] for name in OPTIONS if row.get(name) is not None}
    if options and "messages" not in row:
        name = next(iter(options))
        raise UsageError(f"{name} belongs to messages: leave it out beside a prompt", param=name)
    check_options(**options)
    return options
