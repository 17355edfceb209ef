"""Fitted: a built engine compared with this machine. `penstock build` writes a built engine (also
called artifact): weights, and option values chosen by measurements on one machine. This file
decides which of these values apply here, lists the differences between the two machines, and
verifies the files' checksums while the weights load.

docs/design/artifact.md has the table of differences and their handling.

    a knob   the user's value, else the built engine's if its choices hold here, else the default
    a file   kernel binaries are verified before they are loaded, all others while the weights load
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
from penstock.speculative import names_count_of

if TYPE_CHECKING:
    from penstock.execute.runner import TorchRunner

# Options that a built engine never sets: which model, how to open it, limits on request length, and
# drafts: a user may want them in one run and not in the next.
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
        "speculative_config",
        "draft_from",
    }
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A built engine compared with this machine and with the user's options."""

    folder: Path
    manifest: Manifest
    config: Config  # the user's options, with the built engine's values where the user set none
    taken: list[str]  # names of options whose value is the built engine's
    holds: bool  # True if its tuned values apply to this machine
    notes: list[str]  # one line per difference from the build machine, with what is done about it


def fit(config: Config, folder: Path) -> Fitted | None:
    """Compares the built engine in `folder` with this machine. Returns None if the folder is none.
    Raises CheckpointError for an unfinished or unreadable one, UsageError if the option `sealed` is
    set and the folder is none."""
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
    """Opens the built engine's model while its files' checksums are verified. Raises
    CheckpointError for a changed file, and EngineError if the option `sealed` is set and a kernel
    would have to be compiled."""
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
                # a damaged file is the likely cause: raise its error instead
                checking.result()
            raise
        runner.at_close = let_go
        try:
            checking.result()
        except BaseException:
            runner.close()
            raise
    return runner


def differences(folder: Path, manifest: Manifest, here: BuiltOn) -> list[str]:
    """Returns one line per difference between the build machine and this one, and what is done
    about it."""
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
    """Returns (config, names, notes): the user's config with the manifest's values for options that
    the user did not set, the names of these options, and lines for the user."""
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
    # of drafts, which a user asks for at each start, their number is the built engine's
    asked, drafts = fitted.schedule.speculative_config, "speculative_config"
    chosen = None if manifest is None else manifest.engine.get(drafts)
    if asked is not None and isinstance(chosen, str) and names_count_of(asked, chosen):
        taken[drafts] = chosen
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
    """Returns the number of tensor parallel ranks for a model: the built engine's, if the folder is
    one, else the config's. Raises CheckpointError for an unfinished built engine."""
    folder = Path(config.model.model).expanduser()
    manifest = find_manifest(folder) if folder.is_dir() else None
    return config.parallel.tensor_parallel_size if manifest is None else _ranks_of(manifest)


def _ranks_of(manifest: Manifest) -> int:
    """Returns the number of ranks a built engine is made for."""
    found = manifest.engine.get("tensor_parallel_size", 1)
    return found if isinstance(found, int) else 1


def _check_ranks(config: Config, manifest: Manifest, folder: Path) -> None:
    """Raises UsageError if the user asks for another number of ranks than the built engine is made
    for."""
    ranks, built = config.parallel.tensor_parallel_size, _ranks_of(manifest)
    if "tensor_parallel_size" in config.named and ranks != built:
        raise UsageError(
            f"artifact {folder} is built for tensor_parallel_size {built}, not {ranks}: leave the"
            f" option out, or make another by penstock build --tensor-parallel-size {ranks}",
            param="tensor_parallel_size",
        )


def _refuse_strangers(folder: Path, listed: Collection[str]) -> None:
    """Raises CheckpointError if a kernel binary has no checksum in the manifest."""
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
    """Returns True if two versions are both known and differ."""
    return then != here and None not in (then, here)


def _chip(machine: BuiltOn) -> str:
    return machine.processor if machine.device == "cpu" else machine.device


def _named(machine: BuiltOn) -> str:
    if machine.capability is None:
        return "a CPU"
    return f"{machine.device} (compute capability {machine.capability[0]}.{machine.capability[1]})"
