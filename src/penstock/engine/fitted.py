"""Fitted: a folder's artifact as it is opened here: which of its choices are taken, what differs
from where it was built, its files verified beside the loading. docs/design/artifact.md has the
table of what differs and what is done.

    a knob          the user's, where it is named; else the artifact's, where its choices hold here;
    else the default
    a file          kernels' binaries are verified before they are loaded, all else while the
    weights load
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.artifact.checksums import verify_files
from penstock.artifact.manifest import KERNELS, MANIFEST, BuiltOn, Manifest, Value, find_manifest
from penstock.config import Config
from penstock.errors import CheckpointError, UsageError
from penstock.kernels.tunables import known

if TYPE_CHECKING:
    from penstock.execute.runner import TorchRunner

# Never an artifact's to say: which model, how to open it, and what would make a longer request
# fail.
NOT_ITS_OWN = frozenset(
    {
        "model",
        "revision",
        "device",
        "load_format",
        "sealed",
        "tokenizer",
        "chat_template",
        "skip_tokenizer_init",
        "max_model_len",
        "kv_cache_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """An artifact, held against this machine and what the user named."""

    folder: Path
    manifest: Manifest
    config: Config  # the user's knobs, and the artifact's where the user named none
    taken: list[str]  # knobs that are the artifact's
    holds: bool  # whether its choices hold here: knobs and tunables
    notes: list[str]  # what differs from where it was built, and what is done about it: a line each


def fit(config: Config, folder: Path) -> Fitted | None:
    """Returns None for a folder that is no artifact. CheckpointError for an unfinished or
    unreadable one, UsageError for `sealed` without one."""
    manifest = find_manifest(folder)
    if manifest is None:
        if config.model.sealed:
            raise UsageError(
                f"sealed is for artifacts, and {folder} is none: make one by penstock build, or"
                " leave --sealed out",
                param="sealed",
            )
        return None
    if config.model.lora is not None:
        rule = (
            f"{folder} is an artifact, whose weights are settled: build it with --lora, or leave"
            " lora out"
        )
        raise UsageError(rule, param="lora")
    from penstock.execute.built_on import built_on
    from penstock.execute.open_runner import find_device

    here = built_on(find_device(config.model.device))
    then = manifest.built_on
    holds = (then.device == "cpu", then.capability) == (here.device == "cpu", here.capability)
    notes = differences(folder, manifest, here)
    _check_ranks(config, manifest, folder)
    fitted, taken, more = _with_choices(config, manifest if holds else None, folder)
    fitted.parallel.tensor_parallel_size = _ranks_of(manifest)
    fitted.kv_scales = manifest.kv_scales
    fitted.plain_graphs = not any(work.shares for work in manifest.built_for)
    return Fitted(folder, manifest, fitted, taken, holds, notes + more)


def open_fitted(fitted: Fitted, open: Callable[[Config, Path], TorchRunner]) -> TorchRunner:
    """Opens the artifact's model while its files are verified. CheckpointError for a file that
    isn't as it was built; EngineError where it is sealed and a kernel would have to be compiled."""
    folder, files = fitted.folder, fitted.manifest.files
    kernels = {name: told for name, told in files.items() if name.startswith(f"{KERNELS}/")}
    if (folder / KERNELS).is_dir():
        verify_files(folder, kernels)
        _refuse_strangers(folder, kernels.keys())
    from penstock.execute.open_runner import find_ops

    binaries = find_ops(fitted.config).binaries
    let_go: Callable[[], object] = (
        partial(binaries.close, folder / KERNELS) if binaries is not None else lambda: None
    )
    with ThreadPoolExecutor(1, "penstock-verify") as beside:
        checking = beside.submit(
            verify_files, folder, {n: told for n, told in files.items() if n not in kernels}
        )
        try:
            if binaries is not None:
                binaries.open(folder / KERNELS, sealed=fitted.config.model.sealed)
            runner = open(fitted.config, folder)
        except BaseException as error:
            let_go()
            if isinstance(error, CheckpointError):
                checking.result()  # a file that isn't as it was built is why
            raise
        runner.at_close = let_go
        try:
            checking.result()
        except BaseException:
            runner.close()
            raise
    return runner


def differences(folder: Path, manifest: Manifest, here: BuiltOn) -> list[str]:
    """Returns what differs between where an artifact was built and here, a line each with what is
    done about it."""
    then, notes = manifest.built_on, []
    retune = f"penstock build --retune {folder} makes them for this machine"
    if (then.device == "cpu") != (here.device == "cpu") or then.capability != here.capability:
        notes.append(
            f"built on {_named(then)}, opened on {_named(here)}: its choices are left out; {retune}"
        )
    elif _chip(then) != _chip(here):
        notes.append(
            f"built on {_chip(then)}, opened on {_chip(here)}: its choices are taken as they are;"
            f" {retune}"
        )
    gpu = here.device != "cpu"
    versions = [("penstock", manifest.penstock, __version__), ("triton", then.triton, here.triton)]
    compiled = "kernels that are others by it are compiled anew, which --sealed refuses"
    notes += [
        f"built with {n} {a}, opened with {b}: {compiled}"
        for n, a, b in versions
        if gpu and _other(a, b)
    ]
    timed = [
        ("torch", then.torch, here.torch),
        ("CUDA", then.cuda, here.cuda),
        ("driver", then.driver, here.driver),
    ]
    notes += [
        f"built with {n} {a}, opened with {b}: its choices are taken as they are"
        for n, a, b in timed
        if _other(a, b)
    ]
    if (
        gpu
        and any(name.startswith(f"{KERNELS}/") for name in manifest.files)
        and not (folder / KERNELS).is_dir()
    ):
        notes.append(
            f"its folder {KERNELS} is not there: kernels are compiled anew, which --sealed refuses"
        )
    return notes


def _with_choices(
    config: Config, manifest: Manifest | None, folder: Path
) -> tuple[Config, list[str], list[str]]:
    """The user's config with the manifest's knobs, where they were left alone -> it, which they
    are, and notes."""
    fitted, told, notes = Config.of(**config.told()), config.told(), list[str]()
    if manifest is not None:
        fitted.tuned = known(manifest.tunables)
        strange = manifest.tunables.keys() - fitted.tuned.keys()
        notes += [
            f"it sets {name} of kernels to what this penstock doesn't know: left out"
            for name in sorted(strange)
        ]
    fitted.named, taken, places = config.named, dict[str, Value](), fitted.places()
    for name, value in (manifest.engine if manifest is not None else {}).items():
        if name not in places:
            notes.append(f"it sets {name}, which this penstock doesn't know: left out")
        elif name not in told and name not in NOT_ITS_OWN:
            taken[name] = value
    rows, tokens = (
        taken.get(name, getattr(places[name], name))
        for name in ("max_num_seqs", "max_num_batched_tokens")
    )
    if isinstance(rows, int) and isinstance(tokens, int) and tokens < rows:
        lost = "max_num_seqs" if "max_num_seqs" in taken else "max_num_batched_tokens"
        taken.pop(lost, None)
        notes.append(f"its {lost} goes ill with what was named: left to the engine")
    for name, value in taken.items():
        setattr(places[name], name, value)
    try:
        fitted.check()
    except UsageError as error:
        raise CheckpointError(f"{folder / MANIFEST}: engine: {error}") from error
    return fitted, list(taken), notes


def ranks_of(config: Config) -> int:
    """Returns how many ranks a model is opened on: an artifact says so. CheckpointError for an
    unfinished one."""
    folder = Path(config.model.model).expanduser()
    manifest = find_manifest(folder) if folder.is_dir() else None
    return config.parallel.tensor_parallel_size if manifest is None else _ranks_of(manifest)


def _ranks_of(manifest: Manifest) -> int:
    """How many ranks an artifact is for."""
    found = manifest.engine.get("tensor_parallel_size", 1)
    return found if isinstance(found, int) else 1


def _check_ranks(config: Config, manifest: Manifest, folder: Path) -> None:
    """Raises UsageError where the user names another number of ranks than the artifact was built
    for."""
    ranks, built = config.parallel.tensor_parallel_size, _ranks_of(manifest)
    if "tensor_parallel_size" in config.named and ranks != built:
        raise UsageError(
            f"artifact {folder} is built for tensor_parallel_size {built}, not {ranks}: leave the"
            f" option out, or make another by penstock build --tensor-parallel-size {ranks}",
            param="tensor_parallel_size",
        )


def _refuse_strangers(folder: Path, listed: Collection[str]) -> None:
    """Raises CheckpointError where kernels' binaries are there that the manifest has no checksum
    of."""
    there = {
        path.relative_to(folder).as_posix()
        for path in (folder / KERNELS).rglob("*")
        if not path.is_dir()
    }
    if strange := sorted(there - set(listed)):
        raise CheckpointError(
            f"{folder / strange[0]} is not in the artifact's manifest: remove it, or build again"
        )


def _other(then: str | None, here: str | None) -> bool:
    """Whether two versions differ, as far as both are known."""
    return then != here and None not in (then, here)


def _chip(machine: BuiltOn) -> str:
    return machine.processor if machine.device == "cpu" else machine.device


def _named(machine: BuiltOn) -> str:
    if machine.capability is None:
        return "a CPU"
    return f"{machine.device} (compute capability {machine.capability[0]}.{machine.capability[1]})"
