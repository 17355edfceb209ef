"""`penstock build`: the stages in their order, each of which is left out where an earlier sitting ended it.

    fetch -> work -> weights -> tune -> compile -> check -> pack

It joins stages; what each does stands in its own file. Stages that open an engine run in processes of their own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.artifact.manifest import Decision, Manifest, Quality, Value, write_manifest
from penstock.build.build_state import BuildState, Result
from penstock.build.choose_weights import choose_weights
from penstock.build.make_weights import make_weights
from penstock.build.options import BuildOptions, WorkShape
from penstock.build.pack import sum_folder
from penstock.build.source import SourceModel, check_room, check_unchanged, fetch
from penstock.build.stage_process import run_apart
from penstock.build.summary import summary
from penstock.build.tune import Tuned, told
from penstock.build.work_sample import WorkRow, WorkSample, rows_work, shape_work, spread
from penstock.errors import CheckpointError, UsageError
from penstock.execute.built_on import built_on
from penstock.execute.open_runner import find_device
from penstock.models.generation_config import read_generation_defaults
from penstock.models.read_config import read_model_config
from penstock.status_line import duration
from penstock.text.tokenizer import Tokenizer

# (file, the model's sampling defaults) -> its rows, checked, and how many they are
ReadRows = Callable[[Path, Mapping[str, float | int]], tuple[int, Iterator[WorkRow]]]
USUAL_KL = {"fp8": 0.02, "int8": 0.02, "int4": 0.15, "none": 0.02}  # nats a token, mean
STAGES = ("fetch", "work", "weights", "tune", "compile", "check", "pack")


def run_build(options: BuildOptions, read_rows: ReadRows, price: float | None = None) -> Manifest:
    """Builds `options.out`, or goes on with it, and prints a summary. price: dollars an hour of this machine.

    KeyboardInterrupt comes through with how to go on in it.
    """
    machine = built_on(find_device(options.config().model.device))
    asked = {"penstock": __version__, "device": machine.device, **options.asked()}
    try:
        with BuildState(Path(options.out), asked, retune=options.retune) as state:
            manifest = _Build(options, read_rows, state).run(machine)
            state.finish()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"stopped; the same command goes on in {options.out} where it was") from stop
    print(summary(manifest, options.out, price))
    return manifest


class _Build:
    """One sitting."""

    def __init__(self, options: BuildOptions, read_rows: ReadRows, state: BuildState) -> None:
        self._options, self._read_rows, self._state = options, read_rows, state
        self._told: Result = msgspec.to_builtins(options)

    def run(self, machine: Any) -> Manifest:
        source = msgspec.convert(self._stage("fetch", self._fetch), SourceModel)
        works = self._stage("work", lambda: self._work(source))["works"]
        weights = msgspec.convert(self._stage("weights", lambda: self._weights(source, works)), Decision)
        tuned = msgspec.convert(self._stage("tune", lambda: self._tune(works)), Tuned)
        self._stage("compile", lambda: self._compile(tuned.engine))
        checked = self._stage("check", lambda: self._check(source, works, str(weights.chosen), tuned.engine))
        self._say("pack", "checksums and the manifest")
        manifest = Manifest(
            penstock=__version__,
            model=self._options.model,
            revision=source.revision,
            source={name: file.sha256 for name, file in source.files.items()},
            built_on=machine,
            built_for=[work.facts() for work in tuned.works],
            objective=self._options.objective,
            engine=self._engine(tuned.engine),
            decisions=[weights, *tuned.decisions],
            quality=msgspec.convert(checked, Quality),
            step_seconds=tuned.step_seconds,
            expected=tuned.expected,
            files=sum_folder(Path(self._options.out)),
        )
        write_manifest(Path(self._options.out), manifest)
        return manifest

    def _stage(self, name: str, make: Callable[[], Result]) -> Result:
        """As BuildState's, with a line before and behind it."""
        if self._state.known(name) is not None:
            self._say(name, "done before")
        begun = time.monotonic()
        known = self._state.known(name)
        result = self._state.stage(name, make)
        if known is None and (took := time.monotonic() - begun) > 1:
            self._say(name, f"took {duration(took)}")
        if name == "fetch":
            source = msgspec.convert(result, SourceModel)
            check_unchanged(source)
            check_room(self._options, source)
        return result

    def _say(self, stage: str, line: str) -> None:
        place = STAGES.index(stage) + 1
        print(f"penstock: {place}/{len(STAGES)} {stage}: {line}", file=sys.stderr, flush=True)

    # --- the stages

    def _fetch(self) -> Result:
        self._say("fetch", self._options.model)
        source = fetch(self._options)
        size = sum(file.bytes for file in source.files.values())
        at = f", revision {source.revision}" if source.revision else ""
        self._say("fetch", f"{len(source.files)} files, {size / 1e9:.2f} GB{at}")
        found: Result = msgspec.to_builtins(source)
        return found

    def _work(self, source: SourceModel) -> Result:
        folder = Path(source.folder)
        config = read_model_config(folder)
        context = min(config.context, self._options.knobs.get("max_model_len") or config.context)
        if self._options.workload is None:
            shapes = [WorkShape.parse(each) for each in self._options.told_work]
            works = [shape_work(shape, config, context) for shape in shapes]
        else:
            defaults = read_generation_defaults(folder).sampling()
            count, rows = self._read_rows(Path(self._options.workload), defaults)
            if not count:
                raise UsageError(f"{self._options.workload} has no rows: give some of the work", param="workload")
            tokenizer = Tokenizer.load(folder, vocab_size=config.vocab_size)
            most = self._options.knobs.get("max_num_seqs")
            works = [rows_work(self._options.workload, spread(rows, count), tokenizer, context, most)]
        for work in works:
            facts = work.facts()
            self._say(
                "work",
                f"{facts.told}: {facts.prompts:,} prompts, {facts.samples:,} samples, {facts.concurrency:,} at once; "
                f"{facts.prompt_tokens:,} tokens in (longest {facts.longest_prompt:,}), {facts.output_tokens:,} out; "
                f"{facts.shared_tokens:,} shared by all",
            )
        return {"works": msgspec.to_builtins(works)}

    def _weights(self, source: SourceModel, works: list[Result]) -> Result:
        decision = choose_weights(self._options, source, msgspec.convert(works, list[WorkSample]))
        self._say("weights", told(decision))
        make_weights(self._options, source, str(decision.chosen), lambda line: self._say("weights", line))
        found: Result = msgspec.to_builtins(decision)
        return found

    def _tune(self, works: list[Result]) -> Result:
        self._say("tune", f"{self._options.tune_minutes:g} minutes at most")
        return run_apart("tune", {"options": self._told, "works": works})

    def _compile(self, engine: Mapping[str, Value]) -> Result:
        self._say("compile", "nothing to do on a CPU: its kernels are torch's own")
        return {}

    def _check(self, source: SourceModel, works: list[Result], kind: str, engine: Mapping[str, Value]) -> Result:
        bound = USUAL_KL[kind] if self._options.max_kl is None else self._options.max_kl
        self._say("check", "the unbuilt model, then the built one, on the same texts")
        run_apart("score_source", {"options": self._told, "folder": source.folder, "works": works})
        found = run_apart("score_built", {"options": self._told, "engine": self._engine(engine), "bound": bound})
        quality = msgspec.convert(found, Quality)
        self._say("check", f"KL {quality.kl_mean:.2g} (bound {bound:g}), the same token at {quality.agreement:.2%}")
        if quality.kl_mean > bound:
            raise CheckpointError(
                f"the built model is too far from {self._options.model}: KL {quality.kl_mean:.3g} nats a token, and "
                f"{bound:g} is the bound: raise it by --max-kl, or begin anew with other numbers"
            )
        return found

    def _engine(self, tuned: Mapping[str, Value]) -> dict[str, Value]:
        """The knobs of Config that the artifact holds: the user's and those that were decided."""
        kv = self._options.kv_cache_dtype
        named: dict[str, Value] = {} if kv == "auto" else {"kv_cache_dtype": kv}
        return {**named, **self._options.knobs, **tuned}
