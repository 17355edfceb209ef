"""The rows that `penstock run` reads: our own form and OpenAI's batch form, made into prompts and sampling parameters.

    {"id": "a", "prompt": "..." or [ids]} or {"id": "a", "messages": [...]}, and any field of SamplingParams;
        with messages also add_generation_prompt, continue_final_message, chat_template_kwargs
    {"custom_id": "a", "method": "POST", "url": "/v1/completions" or "/v1/chat/completions", "body": {...}}

It knows the forms, no engine and no files to write. Whatever isn't served is refused by name, with the row's number;
fields of a body that ask for nothing are taken as over HTTP. Rows count from 1, and are lines. Source of the second
form: OpenAI's "Batch API" guide.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.errors import UsageError
from penstock.jobs.prompts import mix
from penstock.journal import KeySet
from penstock.request import SamplingParams
from penstock.server.openai.line_numbers import LineNumbers
from penstock.server.openai.unsupported_fields import CHAT as CHAT_FATES
from penstock.server.openai.unsupported_fields import COMPLETION as COMPLETION_FATES
from penstock.server.openai.unsupported_fields import sift
from penstock.text.chat import check_messages
from penstock.text.chat_options import OPTIONS, check_options

Id = str | int
TOLD = 20  # bad rows told in full; of those beyond, the numbers alone
LONGEST = 500  # characters of what is said of one
OWN_FIELDS = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}
BATCH_FIELDS = ("custom_id", "method", "url", "body")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHARED_BODY = OWN_FIELDS - {"detokenize"} | {"model"}
BODY_FIELDS = {
    COMPLETIONS: SHARED_BODY | {"prompt"},
    CHAT: SHARED_BODY | {"messages", "max_completion_tokens", "top_logprobs", *OPTIONS},
}
FATES = {COMPLETIONS: COMPLETION_FATES, CHAT: CHAT_FATES}


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


def read_rows(path: Path, seed: int) -> Iterator[Row]:
    """The rows of a file one by one. seed: the run's; a row that brings none gets one from it and its id."""
    for number, line in read_lines(path):
        if line.strip():
            yield parse_row(line, number, seed)


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


def parse_row(line: bytes, number: int, seed: int) -> Row:
    """Raises UsageError that begins with the row's number."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"row {number} is no JSON ({error}): mend it or take it out") from error
    try:
        if not isinstance(row, dict):
            raise UsageError("a row is a JSON object")
        return _batch_row(row, seed) if "custom_id" in row else _own_row(row, seed)
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


def _batch_row(row: dict[str, Any], seed: int) -> Row:
    name = _id(row, "custom_id")
    _refuse_unknown(row, set(BATCH_FIELDS), "a batch row")
    url, body = row.get("url"), row.get("body")
    if row.get("method") != "POST":
        raise UsageError(f"method must be POST, not {row.get('method')!r}")
    if not isinstance(url, str) or url not in BODY_FIELDS:
        raise UsageError(f"url must be {COMPLETIONS} or {CHAT}, not {url!r}")
    if not isinstance(body, dict):
        raise UsageError("body must be a JSON object")
    _refuse_unknown(dict.fromkeys(body.keys() - FATES[url].keys()), BODY_FIELDS[url], f"a body for {url}")
    body = sift(body, BODY_FIELDS[url], FATES[url])
    needed = "prompt" if url == COMPLETIONS else "messages"
    if needed not in body:
        raise UsageError(f"body has no {needed}")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise UsageError("body.model must be a text")
    values = _chat_values(body) if url == CHAT else {k: v for k, v in body.items() if k in OWN_FIELDS}
    return Row(name, _prompt(body), _messages(body), _params(values, seed, name), model or None, _chat_options(body))


def _chat_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's chat fields in our names: no max_tokens is up to the context; logprobs is a switch with top_logprobs."""
    values = {k: v for k, v in body.items() if k in OWN_FIELDS - {"logprobs"}}
    longest = body.get("max_completion_tokens")
    values["max_tokens"] = longest if longest is not None else values.get("max_tokens")
    switch, top = body.get("logprobs"), body.get("top_logprobs")
    if switch not in (None, False, True):
        raise UsageError(f"logprobs must be true or false in a chat body, not {switch!r}", param="logprobs")
    if top and not switch:
        raise UsageError("top_logprobs needs logprobs: true", param="top_logprobs")
    if switch:
        values["logprobs"] = top or 0
    return values


def _params(values: dict[str, Any], seed: int, name: Id) -> SamplingParams:
    """A row without a seed gets its own from the run's: so its samples are the same whenever they are drawn."""
    if values.get("seed") is None:
        values["seed"] = mix("row", seed, json.dumps(name))
    try:
        return SamplingParams(**values)
    except UsageError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"a sampling parameter has a value of the wrong kind ({error})") from error


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
