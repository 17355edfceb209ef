"""Repeated sampling over problems with checkable answers. Draws n samples of each problem, counts
the right ones and measures the speed.

samples.jsonl is a journal: it gets every sample exactly once, even if the job is killed and
continued. Sample i of a problem is the same whenever it is drawn, because its seed depends on the
run's seed and the problem's index alone. Knows the engine only as `LLM.stream`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config import Config
from penstock.demo import problems_file, shots_file
from penstock.disk import check_writable, read_plain
from penstock.errors import ContextLengthError, JournalError, UsageError
from penstock.jobs.input_rows import mix
from penstock.jobs.open_llm import JobEngine, OpenLLM, identity, open_llm
from penstock.jobs.problems import (
    Problem,
    digest,
    draw_shots,
    find_answer,
    load_problems,
    make_prompt,
)
from penstock.jobs.progress import Count, Progress
from penstock.jobs.report import print_table, write_reports
from penstock.jobs.stop_rule import StopRule
from penstock.jobs.tally import add_up, count_rows
from penstock.journal import Journal
from penstock.request import SamplingParams

if TYPE_CHECKING:
    from penstock.llm import Finished, Prompt

LARGEST_SUMMARY = 256 << 20  # most bytes of summary.json
# Fields of a line of samples.jsonl that a continued job reads, with their types.
FORM: dict[str, Any] = {
    "problem": int,
    "sample": int,
    "text": str,
    "token_count": int,
    "prompt_tokens": int,
    "finish_reason": str,
    "answer": str | None,
    "right": bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the job.

    problems, shots: files or hub datasets; without shots, the file's other problems are used.
    limit: number of problems, from the beginning of the file; None: all.
    stop_when: `right` or `agree:K` (stop_rule.py): ends a problem's remaining samples.
    sampling: for every problem; its n is used, and its seed must be None: seeds are derived from
        `seed`.
    """

    problems: str
    out: Path
    sampling: SamplingParams
    shots: str | None = None
    few_shot: int = 4
    limit: int | None = None
    seed: int = 42
    stop_when: str | None = None

    @property
    def stop_rule(self) -> StopRule | None:
        return None if self.stop_when is None else StopRule.parse(self.stop_when, self.sampling.n)

    def __post_init__(self) -> None:
        _ = self.stop_rule  # raises UsageError for an invalid rule
        for name, low, value in (
            ("few_shot", 0, self.few_shot),
            ("limit", 1, self.limit),
            ("seed", 0, self.seed),
        ):
            if value is not None and value < low:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be at least {low}, not {value}", param=name
                )


class _Earlier(msgspec.Struct):
    """The parts of an earlier run's summary.json about how its samples were drawn."""

    speed: dict[str, float | None]
    engine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """The problems to answer, and the pool of few-shot examples."""

    asked: list[Problem]
    pool: list[Problem]


def run_monkeys(
    config: Config, options: Options, build_engine: OpenLLM = open_llm
) -> dict[str, Any]:
    """Runs the whole job: draws the missing samples, prints the table, writes the files, and
    returns the summary.

    Raises UsageError for a broken problem file or too few shots, JournalError for an output that
    cannot be written or belongs to another run, CapacityError for a full disk. KeyboardInterrupt
    passes through, with a message how to continue.
    """
    work = _load(options)
    made = _make_folder(options.out)
    try:
        with Journal(options.out / "samples.jsonl", _fingerprint(config, options, work)) as journal:
            speed, errors, engine = _draw_missing(config, options, work, journal, build_engine)
            tallies, reasons = count_rows(work.asked, _rows(journal, work), errors)
            if not any(len(tally.answers) == options.sampling.n for tally in tallies):
                raise ContextLengthError(
                    f"no problem could be sampled in full: {next(iter(errors.values()))}"
                )
            early = options.stop_when is not None
            totals = add_up(tallies, reasons, options.sampling.n, options.seed, early=early)
            summary = {
                "settings": _settings(config, options),
                **totals,
                "speed": speed,
                "engine": engine,
            }
            write_reports(options.out, summary, partial(_rows, journal, work))
    except BaseException:
        if made and not any(options.out.iterdir()):
            options.out.rmdir()
        raise
    print_table(summary, options.out)
    return summary


def run_demo(config: Config, out: Path, *, n: int, limit: int) -> None:
    """Runs `penstock demo`: the job on the packaged model and problems, offline. Prints what it
    does and where the report is. Errors as in `run_monkeys`."""
    sampling = SamplingParams(n=n, temperature=0.6, max_tokens=256, stop=["Question:"])
    options = Options(
        problems=str(problems_file()),
        shots=str(shots_file()),
        out=out,
        sampling=sampling,
        limit=limit,
        seed=42,
    )
    print(
        "Penstock demo: a small model, trained on word problems, answers each of them many times."
    )
    count = min(limit, len(load_problems(options.problems, "test")))
    asked = f"{count} problem" + "s" * (count != 1)
    print(f"{asked}, {n} samples each, 4 worked examples before each; everything goes to {out}/")
    print(
        "The same on any model and file: penstock monkeys MODEL --problems FILE.jsonl --out DIR\n",
        flush=True,
    )
    run_monkeys(config, options)
    print(f"\nOpen {(out / 'report.html').resolve()} in a browser.")


def _load(options: Options) -> Work:
    problems = load_problems(options.problems, "test")
    pool = load_problems(options.shots, "train") if options.shots else problems
    work = Work(problems[: options.limit], pool)
    for problem in work.asked if options.few_shot else ():
        draw_shots(pool, problem.question, options.few_shot, options.seed, problem.index)
    return work


def _make_folder(out: Path) -> bool:
    """Makes the output folder; returns True if it is new."""
    made = not out.exists()
    try:
        out.mkdir(exist_ok=True, parents=True)
    except OSError as error:
        raise JournalError(
            f"--out {out} cannot be made ({(error.strerror or '').lower()}): name another folder"
        ) from error
    for name in ("samples.jsonl", "summary.json", "report.html", "coverage.png"):
        check_writable(out / name)
    return made


def _fingerprint(config: Config, options: Options, work: Work) -> dict[str, Any]:
    """Returns the settings that samples depend on. Settings that affect only speed (rows, memory)
    may change when a run is continued."""
    return {
        **{
            name: value
            for name, value in _settings(config, options).items()
            if name not in ("problems", "shots")
        },
        "problems": digest(work.asked),
        "shots": digest(work.pool),
    }


def _settings(config: Config, options: Options) -> dict[str, Any]:
    sampling = {
        k: v
        for k, v in asdict(options.sampling).items()
        if k != "seed" and v != getattr(SamplingParams(), k)
    }
    return {
        **identity(config),
        "problems": options.problems,
        "shots": options.shots,
        "few_shot": options.few_shot,
        "limit": options.limit,
        "seed": options.seed,
        "n": options.sampling.n,
        "temperature": options.sampling.temperature,
        "max_tokens": options.sampling.max_tokens,
        "stop": options.sampling.stop,
        **sampling,
        **({} if options.stop_when is None else {"stop_when": options.stop_when}),
    }


def _draw_missing(
    config: Config, options: Options, work: Work, journal: Journal, build_engine: OpenLLM
) -> tuple[dict[str, Any], dict[int, str], dict[str, Any]]:
    """Draws the samples that the journal lacks. Returns the speed, the problems' errors and the
    engine's stats."""
    todo = _todo(options, work, journal)
    if not todo:
        before, engine = _earlier(options.out)
        return before, {}, engine
    begin = time.monotonic()
    with build_engine(config) as llm:
        loaded = time.monotonic() - begin
        speed, errors = _draw(llm, options, work, todo, journal)
        figures = {"load_seconds": round(loaded, 3), **llm.stats()}
    return speed, errors, figures


def _rows(journal: Journal, work: Work) -> Iterator[dict[str, Any]]:
    """Yields the stored samples. Raises JournalError for a row that this job cannot have
    written."""
    asked = {problem.index for problem in work.asked}
    for row in journal.rows():
        sound = row.keys() >= FORM.keys() and all(
            isinstance(row[name], kind) for name, kind in FORM.items()
        )
        if not sound or row["problem"] not in asked:
            raise journal.foreign(row)
        yield row


def _todo(options: Options, work: Work, journal: Journal) -> dict[int, list[int]]:
    """Returns problem index -> missing samples; complete problems are left out."""
    n = options.sampling.n
    if not len(journal):
        return {problem.index: list(range(n)) for problem in work.asked}
    missing = {p.index: [s for s in range(n) if [p.index, s] not in journal] for p in work.asked}
    return {index: samples for index, samples in missing.items() if samples}


def _earlier(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the speed and engine stats of an earlier run; empty if it was stopped before it wrote
    them."""
    path = out / "summary.json"
    if not path.is_file():
        return _speed(0.0, None, Counter()), {}
    try:
        summary = msgspec.json.decode(read_plain(path, LARGEST_SUMMARY), type=_Earlier)
        if not summary.speed.keys() >= _speed(0.0, None, Counter()).keys():
            raise msgspec.ValidationError("it lacks a part of speed")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalError(
            f"{path} is no summary of a run ({error}): take it away, and it is written anew"
        ) from error
    return summary.speed, summary.engine


def _draw(
    llm: JobEngine, options: Options, work: Work, todo: dict[int, list[int]], journal: Journal
) -> tuple[dict[str, Any], dict[int, str]]:
    total = len(work.asked) * options.sampling.n
    problems = Count("problems", len(work.asked), before=len(work.asked) - len(todo))
    samples = Count("samples", total, before=total - sum(map(len, todo.values())))
    left = {index: len(missing) for index, missing in todo.items()}
    by_index = {problem.index: problem for problem in work.asked}
    made, first, errors = Counter[str](), None, dict[int, str]()
    with Progress([problems, samples], lambda: llm.generation_tokens) as progress:
        follow = partial(progress.follow, journal)
        with progress.stoppable(journal, options.out):
            prompts = _prompts(options, work, todo, _known(options, work, todo, journal), follow)
            for finished in llm.stream(prompts, after_step=follow):
                index: int = finished.key
                if finished.output is None or finished.error is not None:
                    errors[index] = finished.error or "the engine gave no reason"
                    ended = left[index]
                else:
                    first = first or round(progress.seconds, 3)
                    _keep(by_index[index], finished, journal)
                    made["samples"] += 1
                    made["output_tokens"] += len(finished.output.token_ids)
                    made["prompt_tokens"] += finished.prompt_tokens if left[index] == 1 else 0
                    # a problem that ended in an error has no samples left to wait for
                    ended = min(left[index], 1)
                left[index] -= ended
                samples.ended += ended
                problems.ended += ended > 0 and not left[index]
        speed = _speed(round(progress.seconds, 3), first, made)
    return speed, errors


def _speed(seconds: float, first: float | None, made: Counter[str]) -> dict[str, Any]:
    """Returns what this run generated, and how fast. A prompt's tokens count once per problem,
    whatever the number of samples."""
    output, prompts = made["output_tokens"], made["prompt_tokens"]
    return {
        "seconds": seconds,
        "samples": made["samples"],
        "output_tokens": output,
        "prompt_tokens": prompts,
        "first_sample_seconds": first,
        "output_tokens_per_second": round(output / (seconds or 1.0), 1),
        "total_tokens_per_second": round((output + prompts) / (seconds or 1.0), 1),
    }


def _known(
    options: Options, work: Work, todo: dict[int, list[int]], journal: Journal
) -> dict[int, list[str | None]]:
    """Returns problem index -> answers in the journal. It is empty without `--stop-when`."""
    known: dict[int, list[str | None]] = {index: [] for index in todo}
    if options.stop_when is not None and len(journal):
        for row in _rows(journal, work):
            if row["problem"] in known:
                known[row["problem"]].append(row["answer"])
    return known


def _prompts(
    options: Options,
    work: Work,
    todo: dict[int, list[int]],
    known: dict[int, list[str | None]],
    follow: Callable[[], None],
) -> Iterator[Prompt]:
    """Yields the prompts of the missing samples. known: problem index -> answers drawn before.
    follow: called for each prompt to update the progress line, because many prompts are made
    between two steps."""
    from penstock.llm import Prompt

    for problem in work.asked:
        follow()
        if problem.index not in todo:
            continue
        shots = draw_shots(
            work.pool, problem.question, options.few_shot, options.seed, problem.index
        )
        sampling = SamplingParams(
            **{**asdict(options.sampling), "seed": mix("samples", options.seed, problem.index)}
        )
        missing, rule = todo[problem.index], options.stop_rule
        yield Prompt(
            key=problem.index,
            prompt=make_prompt(problem.question, shots),
            messages=None,
            params=sampling,
            samples=None if len(missing) == sampling.n else missing,
            group_stop=None if rule is None else rule.group_stop(problem, known[problem.index]),
        )


def _keep(problem: Problem, finished: Finished, journal: Journal) -> None:
    output = finished.output
    assert output is not None
    # no answer is taken from an aborted sample
    answer = None if output.finish_reason == "abort" else find_answer(output.text)
    row = {
        "problem": problem.index,
        "sample": output.index,
        "text": output.text,
        "token_count": len(output.token_ids),
        "prompt_tokens": finished.prompt_tokens,
        "finish_reason": output.finish_reason,
        "answer": answer,
        "right": answer == problem.answer,
    }
    journal.add([problem.index, output.index], row)
