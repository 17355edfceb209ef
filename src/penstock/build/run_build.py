"""`penstock build`: runs the stages of a build in order. Stages that an earlier run has finished
are skipped.

    fetch -> work -> weights -> tune -> compile -> check -> pack

On a GPU with 8-bit KV kernels, tuning begins with a quality check of 8-bit keys and values, so that
no time is spent on values that would be rejected later.

Joins the stages; each has its own file. Stages that open an engine run in their own processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock import __version__
from penstock.artifact.checksums import verify_files
from penstock.artifact.describe import UNTIMED, describe, describe_decision, describe_work
from penstock.artifact.manifest import (
    KERNELS,
    BuiltOn,
    Decision,
    FileSums,
    Manifest,
    Quality,
    Value,
    read_manifest,
    write_manifest,
)
from penstock.build.build_state import BuildState, Result
from penstock.build.choose_weights import check_scheme, choose_weights
from penstock.build.decide import NOT_REACHED
from penstock.build.make_weights import make_weights
from penstock.build.options import BuildOptions, WorkShape
from penstock.build.pack import sum_folder
from penstock.build.round_weights import ROUNDED
from penstock.build.source import SourceModel, check_room, check_unchanged, fetch
from penstock.build.stage_process import run_apart
from penstock.build.tune import DRAFTS, Tuned
from penstock.build.work_sample import WorkRow, WorkSample, rows_work, shape_work, spread
from penstock.errors import CheckpointError, UsageError
from penstock.execute.built_on import built_on
from penstock.execute.kv_dtype import reads_eight_bits
from penstock.execute.open_runner import find_device, find_ops
from penstock.models.generation_config import read_generation_defaults
from penstock.models.read_config import read_model_config
from penstock.status_line import duration, size_of
from penstock.text.tokenizer import Tokenizer

Defaults = Mapping[str, float | int]
# Rows: number of rows, and a function that takes the model's sampling defaults and yields the rows
Rows = tuple[int, Callable[[Defaults], Iterator[WorkRow]]]
ReadRows = Callable[[Path], Rows]  # reads a workload file and checks its rows
# default limits of the quality check: mean KL in nats per token
USUAL_KL = {
    "fp8": 0.02,
    "int8": 0.02,
    "int4": 0.15,
    "nvfp4": 0.15,
    "none": 0.02,
}
STAGES = ("fetch", "work", "weights", "tune", "compile", "check", "pack")


def run_build(options: BuildOptions, read_rows: ReadRows) -> Manifest:
    """Builds `options.out`, or continues it, prints the result and returns the manifest.

    KeyboardInterrupt passes through, with a message how to continue.
    """
    before = None
    if options.retune:
        options, before = _again(options)
    machine = built_on(find_device(options.config().model.device))
    asked = {"penstock": __version__, "device": machine.device, **options.asked()}
    try:
        with BuildState(Path(options.out), asked, retune=options.retune) as state:
            sitting = _Build(options, read_rows, state)
            manifest = sitting.build(machine) if before is None else sitting.retune(machine, before)
            state.finish()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"stopped; the same command goes on in {options.out} where it was"
        ) from stop
    print(f"{describe(Path(options.out), manifest)}\n\npenstock serve {options.out}")
    return manifest


class _Build:
    """One run of `penstock build`, stage by stage."""

    def __init__(self, options: BuildOptions, read_rows: ReadRows, state: BuildState) -> None:
        self._options, self._read_rows, self._state = options, read_rows, state
        self._told: Result = msgspec.to_builtins(options)

    def build(self, machine: BuiltOn) -> Manifest:
        """Runs the stages that have no stored result. Returns the manifest."""
        rows = None
        if self._options.workload is not None and self._state.known("work") is None:
            # read rows before long work: broken rows are reported by number
            rows = self._read_rows(Path(self._options.workload))
        source = msgspec.convert(self._stage("fetch", self._fetch), SourceModel)
        check_unchanged(source)
        if self._state.known("weights") is None:
            check_scheme(self._options, source)
            check_room(self._options, source)
        works = self._stage("work", lambda: self._works(Path(source.folder), rows))["works"]
        weights = msgspec.convert(
            self._stage("weights", lambda: self._weights(source, works)), Decision
        )
        files = self._files()
        tuned, decided = self._fit(
            works, coarse_kv=self._coarse_kv(source, works, str(weights.chosen))
        )
        quality, kv_scales = self._check(source, works, str(weights.chosen), decided)
        return self._pack(
            Manifest(
                penstock=__version__,
                model=self._options.model,
                revision=source.revision,
                source=source.sums,
                built_on=machine,
                decisions=[weights, *tuned.decisions],
                quality=quality,
                kv_scales=kv_scales,
                files=files,
                **decided,
                **self._timed(tuned),
            )
        )

    def retune(self, machine: BuiltOn, before: Manifest) -> Manifest:
        """Tunes the option values of a built engine again; its weights stay the same."""
        out = Path(self._options.out)
        kept_files = {
            name: told for name, told in before.files.items() if not name.startswith(f"{KERNELS}/")
        }
        verify_files(out, kept_files)
        rows = (
            None
            if self._options.workload is None
            else self._read_rows(Path(self._options.workload))
        )
        works = self._stage("work", lambda: self._works(out, rows))["works"]
        tuned, decided = self._fit(works, before)
        kept = [each for each in before.decisions if each.name == "quantization"]
        return self._pack(
            replace(
                before,
                penstock=__version__,
                built_on=machine,
                decisions=[*kept, *tuned.decisions],
                files=kept_files,
                **decided,
                **self._timed(tuned),
            )
        )

    def _coarse_kv(self, source: SourceModel, works: list[Result], kind: str) -> str | None:
        """Returns the reason why keys and values stay unquantized, if 8-bit ones fail the quality
        check. Returns None if they may be tried, or if the user chose the dtype."""
        config = self._options.config()
        device = find_device(config.model.device)
        if "kv_cache_dtype" in self._options.named or device.type == "cpu":
            return None
        if not self._options.tune_minutes or not reads_eight_bits(device, find_ops(config)):
            return None
        decided: Result = {"engine": {**self._kept(), "kv_cache_dtype": "fp8"}, "tunables": {}}
        off = self._state.stage("kv", lambda: self._score("tune", source, works, decided))[
            "kl_mean"
        ]
        return (
            f"fp8 would be KL {off:.3g} off, and {self._bound(kind):g} is the bound"
            if off > self._bound(kind)
            else None
        )

    def _bound(self, kind: str) -> float:
        return USUAL_KL[kind] if self._options.max_kl is None else self._options.max_kl

    def _fit(
        self, works: list[Result], before: Manifest | None = None, coarse_kv: str | None = None
    ) -> tuple[Tuned, Result]:
        """Tunes the option values, and compiles kernels for the chosen ones. before: for a retune,
        the built engine's manifest, whose values stay where time runs out."""
        tuned = msgspec.convert(self._stage("tune", lambda: self._tune(works, coarse_kv)), Tuned)
        tuned = tuned if before is None else _kept_where_untimed(tuned, before)
        decided: Result = {"engine": {**self._kept(), **tuned.engine}, "tunables": tuned.tunables}
        self._stage("compile", lambda: self._compile(decided, works))
        return tuned, decided

    def _timed(self, tuned: Tuned) -> dict[str, Any]:
        """Returns the manifest's fields about timings, without the decisions."""
        return {
            "built_for": [work.facts() for work in tuned.works],
            "objective": self._options.objective or "throughput",
            "price": self._options.price,
            "step_seconds": tuned.step_seconds,
            "expected": tuned.expected,
        }

    def _files(self) -> dict[str, FileSums]:
        """Returns the checksums of the model's files, taken when they were first written. Raises
        CheckpointError if a file no longer matches."""
        before = self._state.known("files")
        out = Path(self._options.out)
        files = msgspec.convert(
            self._state.stage("files", lambda: msgspec.to_builtins(sum_folder(out))),
            dict[str, FileSums],
        )
        if before is not None:
            try:
                verify_files(out, files)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{str(error).partition(': ')[0]}: begin anew behind rm -r {out}"
                ) from error
        return files

    def _pack(self, manifest: Manifest) -> Manifest:
        """Adds the kernels' checksums to those of the model in `manifest.files`, and writes the
        manifest."""
        self._say("pack", "checksums and the manifest")
        out = Path(self._options.out)
        found = sum_folder(out, manifest.files)
        strange = [name for name in found if not name.startswith(f"{KERNELS}/")]
        if strange:
            raise UsageError(
                f"{out / strange[0]} was put there by something else: move it away, and build on"
            )
        whole = replace(manifest, files=found | manifest.files)
        write_manifest(Path(self._options.out), whole)
        return whole

    def _stage(self, name: str, make: Callable[[], Result]) -> Result:
        """Runs a stage as BuildState.stage does;
        prints a line if it took long or was done before."""
        if self._state.known(name) is not None:
            self._say(name, "done before")
            return self._state.stage(name, make)
        begun = time.monotonic()
        result = self._state.stage(name, make)
        if (took := time.monotonic() - begun) > 1:
            self._say(name, f"took {duration(took)}")
        return result

    def _say(self, stage: str, line: str) -> None:
        place = STAGES.index(stage) + 1
        print(f"penstock: {place}/{len(STAGES)} {stage}: {line}", file=sys.stderr, flush=True)

    # --- the stages of a build

    def _fetch(self) -> Result:
        self._say("fetch", self._options.model)
        source = fetch(self._options)
        size = size_of(sum(file.bytes for file in source.files.values()))
        at = f", revision {source.revision}" if source.revision else ""
        self._say("fetch", f"{len(source.files)} files, {size}{at}")
        found: Result = msgspec.to_builtins(source)
        return found

    def _works(self, folder: Path, rows: Rows | None) -> Result:
        config = read_model_config(folder)
        context = min(config.context, self._options.knobs.get("max_model_len") or config.context)
        if rows is None:
            shapes = [WorkShape.parse(each) for each in self._options.told_work]
            works = [shape_work(shape, config, context) for shape in shapes]
        else:
            count, of = rows
            if not count:
                raise UsageError(
                    f"{self._options.workload} has no rows: give some of the work", param="workload"
                )
            some = spread(of(read_generation_defaults(folder).sampling), count)
            tokenizer = Tokenizer.load(folder, vocab_size=config.vocab_size)
            most = self._options.knobs.get("max_num_seqs")
            works = [rows_work(str(self._options.workload), some, tokenizer, context, most)]
        for work in works:
            self._say("work", describe_work(work.facts()))
        return {"works": msgspec.to_builtins(works)}

    def _weights(self, source: SourceModel, works: list[Result]) -> Result:
        decision = choose_weights(self._options, source, msgspec.convert(works, list[WorkSample]))
        self._options.check_made(str(decision.chosen))
        if self._options.quantize_lm_head:
            decision = replace(decision, note=f"{decision.note}; the head too")
        self._say("weights", describe_decision(decision))
        rounded = None
        if decision.chosen == "int4":
            job = {"options": self._told, "folder": source.folder, "works": works}
            found = self._state.stage("round", lambda: run_apart("round_weights", job))
            self._say(
                "weights",
                f"{found['matrices']} matrices rounded by {found['tokens']:,} tokens of such texts",
            )
            rounded = self._state.folder / ROUNDED
        make_weights(
            self._options,
            source,
            str(decision.chosen),
            lambda line: self._say("weights", line),
            rounded,
        )
        told: Result = msgspec.to_builtins(decision)
        return told

    def _tune(self, works: list[Result], coarse_kv: str | None) -> Result:
        minutes = self._options.tune_minutes
        self._say(
            "tune",
            (
                f"{minutes:g} minute{'s' * (minutes != 1)}, and to the end of what is being timed"
                if minutes
                else UNTIMED
            ),
        )
        return run_apart("tune", {"options": self._told, "works": works, "coarse_kv": coarse_kv})

    def _compile(self, decided: Result, works: list[Result]) -> Result:
        if find_device(self._options.config().model.device).type == "cpu":
            self._say("compile", "nothing to do on a CPU: its kernels are torch's own")
            return {"kernels": 0}
        found = run_apart("compile_kernels", {"options": self._told, "works": works, **decided})
        self._say("compile", f"{found['kernels']} kernels")
        return found

    def _check(
        self, source: SourceModel, works: list[Result], kind: str, decided: Result
    ) -> tuple[Quality, Any]:
        """Returns the built model's quality and its scales of K and V. Raises CheckpointError if
        the mean KL is above the limit."""
        scored = dict(self._stage("check", lambda: self._score("check", source, works, decided)))
        kv_scales = scored.pop("kv_scales")
        bound = self._bound(kind)
        costs = self._state.known("costly") or {}
        quality = Quality(**scored, bound=bound, by_matrix=costs, kept_wide=self._options.keep_wide)
        self._say(
            "check",
            f"KL {quality.kl_mean:.2g} (bound {bound:g}), the same token at"
            f" {quality.agreement:.2%}",
        )
        if quality.kl_mean <= bound:
            return quality, kv_scales
        way_out = (
            f"raise the bound by --max-kl {quality.kl_mean * 1.05:.2g}, which goes on from here"
        )
        if kind != "none":
            self._say("check", "past the bound: looking for what costs most")
            job = {"options": self._told, "folder": source.folder}
            costs = self._state.stage("costly", lambda: run_apart("find_costly", job))
            way_out = f"{_keep_wide(costs)}, or {way_out}"
        if decided["engine"].get("mamba_ssm_cache_dtype", "auto") != "auto":
            way_out = f"leave --mamba-ssm-cache-dtype out in an --out of its own, or {way_out}"
        if decided["engine"].get("kv_cache_dtype") == "fp8":
            way_out = (
                "keep keys and values wide by --kv-cache-dtype bfloat16 in an --out of its own, or"
                f" {way_out}"
            )
        raise CheckpointError(
            f"the built model is too far from {self._options.model}: KL {quality.kl_mean:.3g} nats"
            f" a token, and {bound:g} is the bound: {way_out}"
        )

    def _score(
        self, stage: str, source: SourceModel, works: list[Result], decided: Result
    ) -> Result:
        self._say(stage, "the unbuilt model, then the built one, on the same texts")
        job = {"options": self._told, "folder": source.folder, "works": works}
        self._state.stage("reference", lambda: run_apart("score_source", job))
        return run_apart("score_built", {"options": self._told, **decided})

    def _kept(self) -> dict[str, Value]:
        """Returns the user's options that the manifest stores; `device` is left out, since
        `built_on` describes it."""
        return {name: value for name, value in self._options.named.items() if name != "device"}


def _kept_where_untimed(tuned: Tuned, before: Manifest) -> Tuned:
    """Returns the tuning result, with the earlier manifest's values for options that there was no
    time to tune."""
    held = {each.name: each for each in before.decisions if each.chosen != each.default}
    untimed = {
        each.name for each in tuned.decisions if each.note == NOT_REACHED and each.name in held
    }
    if not untimed:
        return tuned
    note = "as it was: not reached in the time for tuning"
    return replace(
        tuned,
        decisions=[
            replace(held[each.name], note=note) if each.name in untimed else each
            for each in tuned.decisions
        ],
        engine={**{n: v for n, v in before.engine.items() if n in untimed}, **tuned.engine},
        tunables={**{n: v for n, v in before.tunables.items() if n in untimed}, **tuned.tunables},
    )


def _keep_wide(costs: Mapping[str, float]) -> str:
    """Returns a text that names the matrices with the largest KL, and the flags that keep them
    unquantized."""
    said = ", ".join(f"{name} {cost:.2g}" for name, cost in costs.items())
    flags = " ".join(f"--keep-wide {name}" for name in costs)
    return (
        f"those that cost most, alone, are {said}: keep them wide by {flags} in an --out of its own"
    )


def _again(options: BuildOptions) -> tuple[BuildOptions, Manifest]:
    """Returns the options and the manifest of a retune: the built engine's options, overridden by
    the user's."""
    manifest = read_manifest(Path(options.model))
    decided = {decision.name for decision in manifest.decisions}
    # The KV cache's dtype was chosen by the quality check and stays.
    told = {
        n: value
        for n, value in manifest.engine.items()
        if n not in decided or n == "kv_cache_dtype"
    }
    # how many drafts a row may have is decided again
    drafts = {each.name: each.default for each in manifest.decisions if each.name == DRAFTS}
    shapes = options.shapes or [
        WorkShape(each.prompt_tokens, each.output_tokens, each.concurrency).told
        for each in manifest.built_for
    ]
    return (
        replace(
            options,
            shapes=[] if options.workload is not None else shapes,
            objective=options.objective or manifest.objective,
            price=manifest.price if options.price is None else options.price,
            knobs={**told, **drafts, **options.knobs},
        ),
        manifest,
    )
