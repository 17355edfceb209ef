"""Checks that an engine answers rightly: the Kullback-Leibler divergence of its top-20 logprobs
from those of `transformers` in float32, of the same checkpoint and prompts. The engine is asked
through its completions, all prompts at once, greedily; positions count up to the first token that
differs, which still has the same context. `benchmarks/reference_logprobs.py` makes the reference.
Knows OpenAI's two forms of logprobs; no engine.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import ssl
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.almanac.record import WRONG_KL, Answers
from penstock.bench.endpoint import Endpoint
from penstock.bench.write_record import line, word
from penstock.errors import EngineError, UsageError

TOP = 20
PATIENCE = 300.0  # seconds for all answers
MOST_THREADS = 64  # prompts in flight
_BY_ID = "token_id:"


class Reference(msgspec.Struct, frozen=True):
    """The content of a reference's file. top: for each prompt and each of its tokens the likeliest
    ids with their logprobs. texts: an id's text, for engines that tell no ids."""

    model: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    top: list[list[list[tuple[int, float]]]]
    texts: dict[str, str]


def read_reference(path: Path) -> tuple[Reference, str]:
    """Returns the reference and its file's checksum. Raises UsageError for another file, and for a
    reference whose answers are so flat that an engine of any answers would be right."""
    try:
        content = path.read_bytes()
        told = msgspec.json.decode(content, type=Reference)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is no reference ({error}): benchmarks/reference_logprobs.py makes one",
            param="reference",
        ) from error
    lengths = [[len(each) for each in rows] for rows in (told.tokens, told.top)]
    if not len(told.prompts) == len(told.tokens) > 0 or lengths[0] != lengths[1]:
        raise UsageError(f"{path}: prompts, tokens and top differ in length", param="reference")
    if 0 in lengths[0] or not all(top for rows in told.top for top in rows):
        raise UsageError(f"{path} has a prompt or a position without tokens", param="reference")
    if np.mean([_sureness(top) for rows in told.top for top in rows]) < 2 * WRONG_KL:
        raise UsageError(
            f"{path}: its answers are too flat to show a wrong engine: take a trained checkpoint",
            param="reference",
        )
    return told, hashlib.sha256(content).hexdigest()


def _sureness(top: list[tuple[int, float]]) -> float:
    """Returns the divergence of an engine to which all of a position's tokens are alike likely."""
    p = np.array([value for _, value in top])
    p = p - np.logaddexp.reduce(p)
    return math.log(len(p)) + float((np.exp(p) * p).sum())


def read_answers(path: Path) -> Answers:
    """Reads what `penstock bench answers` wrote. Raises UsageError for another file."""
    try:
        return Answers.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} holds no answers ({str(error).splitlines()[0]}): `penstock bench answers` makes"
            " the file",
            param="answers",
        ) from error


def measure_answers(
    target: Endpoint, reference: Reference, checksum: str, engine: str, flags: list[str]
) -> Answers:
    """Asks the engine for each prompt's continuation, and compares. Each prompt counts alike: one
    whose first token differs has a single position. Raises EngineError for an answer that has no
    logprobs, and for a failed request."""
    count = len(reference.prompts)
    with ThreadPoolExecutor(min(count, MOST_THREADS)) as pool:
        told = list(pool.map(lambda at: _answer(target, reference, at), range(count)))
    found = [list(_positions(reference, at, rows)) for at, rows in enumerate(told)]
    agree = sum(same for each in found for _, same in each) / sum(map(len, reference.tokens))
    kl = float(np.mean([np.mean([one for one, _ in each]) for each in found]))
    return Answers(
        model=word(reference.model),
        reference=checksum,
        engine=word(engine),
        flags=[line(each) for each in flags],
        prompts=count,
        positions=sum(map(len, found)),
        agree=round(agree, 6),
        kl=float(f"{kl:.4g}"),
        kl_most=float(f"{max(one for each in found for one, _ in each):.4g}"),
        wrong=kl > WRONG_KL,
    )


def _answer(target: Endpoint, reference: Reference, at: int) -> list[tuple[str, Any]]:
    """Returns each token of the answer with its likeliest tokens' logprobs, by name."""
    count = len(reference.tokens[at])
    body = {
        "model": target.model,
        "prompt": reference.prompts[at],
        "max_tokens": count,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": TOP,
        "return_tokens_as_token_ids": True,
    }
    answer = _post(target, body)
    try:
        logprobs = answer["choices"][0]["logprobs"]
        if "content" in logprobs:
            rows = logprobs["content"]
            return [
                (_name(row), {_name(each): each["logprob"] for each in row["top_logprobs"]})
                for row in rows
            ]
        return list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(
            f"{target.url} answered without logprobs of {TOP} tokens: {str(answer)[:200]}"
        ) from error


def _name(row: Mapping[str, Any]) -> str:
    return f"{_BY_ID}{row['id']}" if "id" in row else str(row["token"])


def _post(target: Endpoint, body: dict[str, Any]) -> Any:
    kind: Callable[..., http.client.HTTPConnection] = (
        http.client.HTTPSConnection if target.tls else http.client.HTTPConnection
    )
    more = {"context": ssl.create_default_context()} if target.tls else {}
    connection = kind(target.host, target.port, timeout=PATIENCE, **more)
    headers = {"content-type": "application/json"}
    headers |= {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        connection.request("POST", target.path, json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise EngineError(f"{target.url}: status {answer.status}: {content[:300]!r}")
        return json.loads(content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineError(f"{target.url} gave no answer: {error}") from error
    finally:
        connection.close()


def _positions(
    reference: Reference, at: int, rows: list[tuple[str, Any]]
) -> Iterator[tuple[float, bool]]:
    """Yields (divergence, whether the tokens are the same) up to the first other token. An answer
    that is too short is wrong at its end."""
    for place, expected in enumerate(reference.tokens[at]):
        if place >= len(rows) or not rows[place][1]:
            yield math.log(TOP), False
            return
        token, top = rows[place]
        names = {_BY_ID + str(expected), reference.texts.get(str(expected))}
        same = token in names
        yield divergence(reference.top[at][place], top, reference.texts), same
        if not same:
            return


def divergence(
    told: list[tuple[int, float]], found: Mapping[str, float | None], texts: Mapping[str, str]
) -> float:
    """Returns the Kullback-Leibler divergence, in nats, of an engine's logprobs from the
    reference's, both normalised over the reference's likeliest tokens. A token that the engine does
    not name is taken to be as likely as its least one, so that the divergence is no more than the
    true one. Of tokens with the same text only the likeliest counts, where texts are compared."""
    known = {name: value for name, value in found.items() if value is not None}
    if not known or not all(map(math.isfinite, known.values())):
        return math.log(TOP)
    least = min(known.values())
    by_id = all(name.startswith(_BY_ID) for name in known)
    ours: dict[str, float] = {}
    for token, value in told:
        ours.setdefault(f"{_BY_ID}{token}" if by_id else texts.get(str(token), ""), value)
    p = np.array(list(ours.values()))
    q = np.array([known.get(name, least) for name in ours])
    p, q = p - np.logaddexp.reduce(p), q - np.logaddexp.reduce(q)
    return max(0.0, float((np.exp(p) * (p - q)).sum()))
