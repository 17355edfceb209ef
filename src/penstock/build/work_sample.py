"""The workload that an engine is tuned for. It is given as shapes (numbers of tokens in and out),
or as a file of rows from which a sample is taken; here it is token ids, lengths and sampling
parameters.

Knows ids and SamplingParams; no engine and no files: the caller reads rows.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any, Protocol

import msgspec

from penstock.artifact.manifest import BuiltFor
from penstock.build.options import WorkShape
from penstock.errors import UsageError
from penstock.models.model_config import ModelConfig
from penstock.request import SamplingParams
from penstock.row_table import FIELDS
from penstock.sandbox.sandbox import Sandbox
from penstock.sandbox.sandbox_process import ChatJob
from penstock.schedule.check_request import check_request
from penstock.server.openai.batch_line import BadRows
from penstock.text.tokenizer import Tokenizer

MOST_PROMPTS, MOST_SAMPLES = 1024, 8192  # most prompts and samples of a workload
LONGEST_LOOK = 1024  # most tokens of an answer whose row has no max_tokens
# Sampling parameters that timed runs keep, because they affect the time of drawing a token. Others
# are dropped: answers have fixed lengths in timed runs.
DRAWN_BY = ["n", "top_k", "logprobs", "seed"]
DRAWN_BY += [column.param for column in FIELDS if column.param and column.range]


class WorkRow(Protocol):
    """A row of a user's file, as `penstock run` reads it."""

    number: int  # line number in the user's file
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    chat: dict[str, Any]


class WorkSample(msgspec.Struct, kw_only=True):
    """Requests that run together. Each list has one entry a prompt.

    sampling: SamplingParams' fields. outputs: tokens of each answer. ends: True if answers end by
    themselves, and outputs are upper bounds; False: every answer has that length. concurrency:
    samples that run at once. drawn: prompts are random ids from the vocabulary, not real text.
    """

    told: str
    prompts: list[list[int]]
    sampling: list[dict[str, Any]]
    outputs: list[int]
    concurrency: int
    ends: bool = False
    drawn: bool = False

    @property
    def samples(self) -> int:
        return sum(params.get("n", 1) for params in self.sampling)

    @property
    def tokens(self) -> int:
        """Returns the tokens of KV cache that all samples take together if none share a prompt."""
        each = zip(self.prompts, self.sampling, self.outputs, strict=True)
        return sum((len(prompt) + out + 32) * params.get("n", 1) for prompt, params, out in each)

    def facts(self) -> BuiltFor:
        """Returns the manifest's description of the workload."""
        into, out = [len(prompt) for prompt in self.prompts], self.outputs
        return BuiltFor(
            told=self.told,
            prompts=len(self.prompts),
            samples=self.samples,
            concurrency=self.concurrency,
            prompt_tokens=int(statistics.median(into)),
            longest_prompt=max(into),
            output_tokens=int(statistics.median(out)),
            longest_output=max(out),
            shared_tokens=shared_beginning(self.prompts),
        )

    def fewer(self, share: float) -> WorkSample:
        """Returns the workload with this share of its prompts, spread evenly, at least one."""
        step = max(1, round(1 / max(share, 1e-6)))
        prompts, sampling, outputs = (
            self.prompts[::step],
            self.sampling[::step],
            self.outputs[::step],
        )
        return msgspec.structs.replace(self, prompts=prompts, sampling=sampling, outputs=outputs)

    def cut(self, share: float, least: int = 8) -> WorkSample:
        """Returns the workload with answers cut to this share of their length, but at least `least`
        tokens."""
        shorter = [min(out, max(least, int(out * share))) for out in self.outputs]
        return msgspec.structs.replace(self, outputs=shorter)


def shape_work(shape: WorkShape, config: ModelConfig, context: int) -> WorkSample:
    """Returns a shape's requests: random ids from the vocabulary, the same each time. Raises
    UsageError when a request is longer than the context."""
    if shape.prompt_tokens + shape.output_tokens > context:
        raise UsageError(
            f"shape {shape.told} is longer than the context of {context} tokens: lower it"
            + ", or raise max_model_len" * (context < config.context),
            param="shape",
        )
    draw = random.Random(shape.told)
    first = [] if config.bos_id is None else [config.bos_id]
    each = shape.prompt_tokens - len(first)
    prompts = [
        first + [draw.randrange(config.vocab_size) for _ in range(each)]
        for _ in range(shape.concurrency)
    ]
    return WorkSample(
        told=shape.told,
        prompts=prompts,
        sampling=[{"seed": number} for number in range(shape.concurrency)],
        outputs=[shape.output_tokens] * shape.concurrency,
        concurrency=shape.concurrency,
        drawn=True,
    )


def rows_work(
    told: str, rows: Sequence[WorkRow], tokenizer: Tokenizer, context: int, most_rows: int | None
) -> WorkSample:
    """Returns a file's sample as ids. most_rows: the user's limit of the engine's rows, if any.
    Raises UsageError for rows that the model cannot take (longer than the context, ids outside its
    vocabulary), naming all of them.
    """
    prompts = _ids(rows, tokenizer, context)
    asked = [row.params.max_tokens or LONGEST_LOOK for row in rows]
    work = WorkSample(
        told=told,
        prompts=prompts,
        sampling=[{name: getattr(row.params, name) for name in DRAWN_BY} for row in rows],
        outputs=[min(context - len(ids), most) for ids, most in zip(prompts, asked, strict=True)],
        concurrency=0,
        ends=not all(row.params.ignore_eos for row in rows),
    )
    return msgspec.structs.replace(work, concurrency=min(work.samples, most_rows or work.samples))


def spread(rows: Iterable[WorkRow], count: int) -> list[WorkRow]:
    """Returns at most MOST_PROMPTS of `count` rows, spread evenly, with at most MOST_SAMPLES
    samples together (at least one row)."""
    step = -(-count // MOST_PROMPTS)
    some = [row for place, row in enumerate(rows) if place % step == 0]
    each = -(-sum(row.params.n for row in some) // MOST_SAMPLES)
    return some[::each]


def shared_beginning(prompts: Sequence[list[int]]) -> int:
    """Returns the length of the common prefix of all prompts, in tokens; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    # every prompt sorts between these two, so it begins with their common prefix
    low, high = min(prompts), max(prompts)
    same = (a == b for a, b in zip(low, high, strict=False))
    return next((place for place, alike in enumerate(chain(same, [False])) if not alike), 0)


def _ids(rows: Sequence[WorkRow], tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """Returns each row's prompt as ids; messages go through the model's chat template."""
    found, bad = list[list[int]](), BadRows()
    with ExitStack() as opened:
        sandbox: Sandbox | None = None
        for row in rows:
            try:
                if row.messages is not None:
                    sandbox = sandbox or opened.enter_context(
                        closing(Sandbox.open(tokenizer, context))
                    )
                    options = dict(row.chat)
                    options["template_kwargs"] = options.pop("chat_template_kwargs", None)
                    ids = sandbox.run(ChatJob(messages=row.messages, **options)).ids[0]
                else:
                    ids = (
                        tokenizer.encode(row.prompt)
                        if isinstance(row.prompt, str)
                        else list(row.prompt or ())
                    )
                span = (min(ids), max(ids)) if ids else None
                check_request(len(ids), span, row.params, context, tokenizer.vocab_size)
                found.append(ids)
            except UsageError as error:
                bad.add(row.number, f"row {row.number}: {error}")
    bad.refuse()
    return found
