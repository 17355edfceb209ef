"""Runs a file of prompts into a file of outputs. Files may have any size; memory use is constant.
Each id is written exactly once, even if the run is killed and continued.

    IN.jsonl --survey--> every row checked, before anything runs
    IN.jsonl --read again, lazily--> llm.stream --samples--> a row in OUT.jsonl (a journal) when its
    last sample ends

OUT's rows are {"id", "outputs": [{"text", "finish_reason", "token_count"}]} in the order of the
samples, or {"id", "error"} for a prompt that cannot be served (too long, say); a row's metadata is
copied. `-` is standard input or output. Knows the engine only as `LLM.stream`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.disk import check_writable
from penstock.errors import UsageError
from penstock.jobs.finish_output import finish_output, ledger_of
from penstock.jobs.input_rows import Id, Row, Survey, read_rows, survey
from penstock.jobs.open_llm import JobEngine, OpenLLM, identity, open_llm
from penstock.jobs.progress import Count, Progress
from penstock.jobs.standard_streams import Show, given_out, taken_in
from penstock.journal import Journal, journal_of
from penstock.request import CompletionOutput, PositionLogprobs
from penstock.status_line import duration

if TYPE_CHECKING:
    from penstock.llm import Finished, Prompt


@dataclass(slots=True)
class Tail:
    """An input row some of whose samples have not ended yet. n: number of its samples."""

    n: int
    carried: dict[str, Any]  # data of the input row that is copied to OUT
    outputs: list[CompletionOutput] = field(default_factory=list)


@dataclass(slots=True)
class RunOutcome:
    """The result of one run of the command. rows: rows in the input file. done: rows written by
    this run. failed: rows of OUT with an error, also from earlier runs."""

    rows: int
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


def run_file(
    source: Path,
    out: Path,
    config: Config,
    build_engine: OpenLLM = open_llm,
    keep: tuple[str, ...] = (),
) -> RunOutcome:
    """Runs every row of `source` that `out` does not hold yet. `-` as source: rows from standard
    input, which are kept on the disk meanwhile; `-` as out: rows to standard output as they end.
    keep: input columns that are copied to `out`.

    Raises UsageError with the row's number for a broken file, and if `out` holds only errors at the
    end; JournalError if `out` cannot be written or belongs to another run; CapacityError for a full
    disk. KeyboardInterrupt passes through, with a message how to continue.
    """
    with taken_in(source) as source, given_out(out) as (out, show):
        return _run_file(source, out, config, build_engine, keep, show)


def _run_file(
    source: Path,
    out: Path,
    config: Config,
    build_engine: OpenLLM,
    keep: tuple[str, ...],
    show: Show | None,
) -> RunOutcome:
    ledger = ledger_of(out)
    for path in {ledger, out}:
        check_writable(path)
    if out.exists() and source.is_file() and out.samefile(source):
        raise UsageError(f"{out} is the input too: name another output")
    found = survey(source, lambda rows: _say(f"checked {rows:,} rows"), keep)
    _mention_models(found, config)
    with Journal(ledger, _fingerprint(found, config, keep)) as journal:
        outcome = RunOutcome(found.rows)
        if len(journal) < found.rows:
            if len(journal):
                _say(f"{len(journal):,} of {found.rows:,} rows are done; going on")
            with build_engine(config) as llm:
                given = read_rows(source, config.model.seed, llm.facts.sampling_defaults, keep)
                _run_rows(llm, given, journal, outcome, show)
        first = _count_failed(journal, outcome)
        finish_output(ledger, out)
        _say(_closing(outcome, "standard output" if show is not None else str(out)))
        if ledger != out:
            _say(
                f"{ledger} and {journal_of(ledger).name} may be deleted: they let the same command"
                " see what is done"
            )
        # The next program of a pipeline sees rows with errors by itself; but if all rows failed,
        # the command must fail.
        if first is not None and outcome.failed == outcome.rows:
            raise UsageError(f"no row could be run; the first because {first}")
    return outcome


def _count_failed(journal: Journal, outcome: RunOutcome) -> str | None:
    """Counts the rows with an error and returns the first error. All rows of OUT count, so that the
    exit code is the same however often the run was interrupted."""
    first: str | None = None
    for row in journal.rows("error"):
        outcome.failed += 1
        first = first or row["error"]
    return first


def _fingerprint(found: Survey, config: Config, keep: tuple[str, ...]) -> dict[str, Any]:
    """Returns the settings that outputs depend on. Settings that affect only speed may change when
    a run is continued."""
    kept = {"keep": sorted(keep)} if keep else {}
    return {"input": found.fingerprint, **identity(config), "seed": config.model.seed, **kept}


def _mention_models(found: Survey, config: Config) -> None:
    others = [name for name in found.models if name != config.model.model]
    if others:
        _say(
            f"the rows name {', '.join(others)}; they run on {config.model.model}, as --model says"
        )


def _run_rows(
    llm: JobEngine, given: Iterator[Row], journal: Journal, outcome: RunOutcome, show: Show | None
) -> None:
    """Runs the rows into the journal. show: called with each finished row, if not None."""
    open_rows: dict[Id, Tail] = {}
    rows = Count("rows", outcome.rows, before=len(journal))
    with Progress([rows], lambda: llm.generation_tokens) as progress:
        follow = partial(progress.follow, journal)
        with progress.stoppable(journal, None if show is not None else journal.path):
            prompts = _counted(_prompts(given, journal, open_rows, follow), rows)
            for finished in llm.stream(prompts, after_step=follow):
                row = _take(finished, open_rows, outcome)
                if row is not None:
                    journal.add(row["id"], row)
                    if show is not None:
                        show(row)
                    rows.ended += 1
        outcome.done, outcome.seconds = rows.done, progress.seconds


def _counted(prompts: Iterator[Prompt], rows: Count) -> Iterator[Prompt]:
    """Yields the same prompts and counts each as begun once the engine has taken it."""
    for prompt in prompts:
        rows.begun += 1
        yield prompt


def _prompts(
    rows: Iterator[Row], journal: Journal, open_rows: dict[Id, Tail], follow: Callable[[], None]
) -> Iterator[Prompt]:
    """Yields the prompts of rows that the journal lacks. follow: called for each row read, because
    many are read between two steps."""
    from penstock.llm import Prompt

    for row in rows:
        follow()
        if row.id not in journal:
            open_rows[row.id] = Tail(row.params.n, row.carried)
            yield _to_prompt(row, Prompt)


def _to_prompt(row: Row, make: type[Prompt]) -> Prompt:
    return make(
        key=row.id,
        prompt=row.prompt,
        messages=row.messages,
        params=row.params,
        samples=None,
        **row.chat,
    )


def _take(
    finished: Finished, open_rows: dict[Id, Tail], outcome: RunOutcome
) -> dict[str, Any] | None:
    """Returns the row to write if this sample was its last, else None."""
    key: Id = finished.key
    if key not in open_rows:  # an error ended the row; this sample was still on its way
        return None
    if finished.output is None or finished.error is not None:
        carried = open_rows.pop(key).carried
        return {"id": key, "error": finished.error or "the engine gave no reason", **carried}
    tail = open_rows[key]
    tail.outputs.append(finished.output)
    outcome.output_tokens += len(finished.output.token_ids)
    if len(tail.outputs) < tail.n:
        return None
    del open_rows[key]
    return {
        "id": key,
        "outputs": [_output(o) for o in sorted(tail.outputs, key=lambda o: o.index)],
        **tail.carried,
    }


def _output(output: CompletionOutput) -> dict[str, Any]:
    row: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "token_count": len(output.token_ids),
    }
    if output.logprobs is not None:
        row["logprobs"] = [
            _position(token, at)
            for token, at in zip(output.token_ids, output.logprobs, strict=True)
        ]
    return row


def _position(token: int, at: PositionLogprobs) -> dict[str, Any]:
    """Returns the logprobs of one output position: the chosen token, and the most likely ones in
    order."""
    likely: list[Mapping[str, Any]] = [{"token_id": i, **asdict(entry)} for i, entry in at.items()]
    return {"token_id": token, "top": sorted(likely, key=lambda entry: -entry["logprob"])}


def _closing(outcome: RunOutcome, out: str) -> str:
    failed = f", {outcome.failed:,} of them with an error" if outcome.failed else ""
    if not outcome.done:
        return f"all {outcome.rows:,} rows are in {out}{failed}; nothing was left to do"
    speed = outcome.output_tokens / outcome.seconds if outcome.seconds else 0.0
    return (
        f"{outcome.done:,} row{'s' * (outcome.done != 1)} in {duration(outcome.seconds)},"
        f" {speed:,.0f} output tok/s; all {outcome.rows:,} are in {out}{failed}"
    )


def _say(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)
