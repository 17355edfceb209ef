"""Manifest: what stands in an artifact's `penstock.json`: what was built, of what, on what, and
every decision with what was measured for it. It is written last, so that a folder without one is no
finished build.

It knows files and numbers; no engine, no torch. docs/build.md explains each part to its readers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from penstock.config import BLOCK_SIZE
from penstock.disk import read_plain, write_whole
from penstock.errors import CheckpointError

SCHEMA = 1
MANIFEST = "penstock.json"
LARGEST = 64 << 20  # bytes of a manifest; that of a terabyte of weights has 5 MB
STATE = ".build"  # the folder of a build that is under way
USUAL_PROMPT = 128  # tokens: of prompts in a timed step, where their length isn't what is looked at
KERNELS = "kernels"  # the folder of kernels' binaries

Value = bool | int | float | str | None


def name_of(value: Value) -> str:
    """Returns how a value is called, among what was measured too."""
    return "default" if value is None else str(value)


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all parts share: fields by name, none that nobody knows."""


class BuiltOn(_Told, kw_only=True, frozen=True):
    """The machine and libraries that choices were timed with; None for what isn't there."""

    device: str  # "NVIDIA H200", "cpu"
    capability: tuple[int, int] | None = None  # compute capability of a GPU
    memory_bytes: int
    processor: str
    driver: str | None = None
    torch: str
    triton: str | None = None
    cuda: str | None = None


class BuiltFor(_Told, kw_only=True, frozen=True):
    """One work that choices were timed on. Lengths in tokens."""

    told: str  # as the user gave it
    prompts: int
    samples: int  # of all prompts together
    concurrency: int  # samples that run at once
    prompt_tokens: int  # the middle one of the sample's prompts
    longest_prompt: int
    output_tokens: int  # the middle one
    longest_output: int
    shared_tokens: int  # that all prompts begin with

    @property
    def shares(self) -> bool:
        """Whether samples share a prefix that may be attended once: of one prompt, or a block that
        all begin with."""
        return self.samples > self.prompts or self.shared_tokens >= BLOCK_SIZE


class Decision(_Told, kw_only=True, frozen=True):
    """One choice: the candidate that won, or the default where none won by more than the noise.
    measured: a candidate's name -> what each repeat of it came to, in `unit`."""

    name: str
    chosen: Value
    default: Value
    unit: str = ""
    measured: dict[str, list[float]] = {}
    won_percent: float | None = (
        None  # over the default, in the unit's good direction; None: not measured
    )
    noise_percent: float | None = None
    note: str = ""  # why it is so, where that isn't the measurement


class Quality(_Told, kw_only=True, frozen=True):
    """How far the built model is from the one it was built of, on the sample. KL in nats a token,
    from the unbuilt model's distribution to the built one's."""

    # share of positions at which the unbuilt model's likeliest token is the built one's too
    agreement: float
    kl_mean: float
    kl_worst: float
    bound: float  # of kl_mean
    tokens: int
    # a matrix's name -> kl_mean where it alone is as built; those that cost most
    by_matrix: dict[str, float] = {}
    kept_wide: list[str] = []


class TimedEngine(_Told, kw_only=True, frozen=True):
    """What the engine held whose steps were timed: what its scheduler plans by."""

    num_blocks: int  # of KV, the scratch block included
    max_rows: int
    max_model_len: int
    max_batched_tokens: int
    grouping: bool  # whether steps have prefix groups
    sharing: dict[str, float]  # SharingCosts' fields
    state_slots: int = 0  # of recurrent state; 0: no layer has any
    window: int = (
        0  # tokens that layers with windows see, where they share pages with the others; 0: none do
    )
    window_tables: int = 0  # pages that such layers take of a block, beside the first


class StepSeconds(_Told, kw_only=True, frozen=True):
    """A table by columns, an entry a timed step: seconds of a step of so many rows, each with
    `context` tokens of its own before it, and behind them `shared` tokens that each `members` of
    them have together; beside them so many prompt tokens, in prompts of `prompt_length`. With a
    `spread` the rows' contexts lie evenly from that much under `context` to that much over it. A
    column may be left out where all of it is 0.

    seconds are of steps launched one after the other, device_seconds of those what the device
    needs: less, where it waits for the host. Left out: the same."""

    rows: list[int] = []
    context: list[int] = []
    prompt_tokens: list[int] = []
    seconds: list[float] = []
    device_seconds: list[float] = []
    prompt_length: list[int] = []
    shared: list[int] = []
    members: list[int] = []
    spread: list[int] = []
    engine: TimedEngine | None = None


class ExpectedWork(_Told, kw_only=True, frozen=True):
    """What one work came to with the decisions taken: the middle of its repeats."""

    told: str
    output_tokens_per_second: float
    noise_percent: float | None  # None: one run alone
    requests_per_second: float
    request_ms: float | None = None  # of the middle request, from when all were there to its end
    share_of_limit: float | None = (
        None  # least time by the data sheet over the time taken; None: not known here
    )


class FileSums(_Told, kw_only=True, frozen=True):
    """A file's size and the SHA-256 of each piece of 16 MiB."""

    bytes: int
    pieces: list[str]


class Manifest(_Told, kw_only=True, frozen=True):
    """All of `penstock.json`."""

    schema: int = SCHEMA
    penstock: str  # version
    model: str  # as it was asked for
    revision: str | None = None
    source: dict[str, str]  # a file of the model that it was built of -> its SHA-256
    built_on: BuiltOn
    built_for: list[BuiltFor]
    objective: str = "throughput"
    price: float | None = None  # dollars an hour of the machine, where the user named it
    engine: dict[str, Value]  # a knob of Config -> what the build decided or was told
    tunables: dict[str, Value] = {}  # a kernels' number -> what was measured best
    # an attention -> of its heads' K (none: wide) and V
    kv_scales: dict[str, tuple[list[float], list[float]]] = {}
    decisions: list[Decision] = []
    quality: Quality | None = None  # None: nothing about the numbers was changed
    step_seconds: StepSeconds = StepSeconds()
    expected: list[ExpectedWork] = []
    files: dict[str, FileSums]  # relative path, with forward slashes


def find_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of an artifact; None for a folder that is none. CheckpointError for an
    unfinished or unreadable one."""
    if (folder / MANIFEST).is_file() or (folder / STATE).is_dir():
        return read_manifest(folder)
    return None


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError, one line with the way out, for a folder without a manifest that this
    version reads."""
    path = folder / MANIFEST
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise CheckpointError(f"{what}: name an artifact's folder, as penstock build makes it")
    try:
        content = read_plain(path, LARGEST)
    except FileNotFoundError as error:
        if (folder / STATE).is_dir():
            raise CheckpointError(
                f"{folder} is an unfinished build (it has no {MANIFEST}): start its penstock build"
                " again, which goes on where it stopped"
            ) from error
        raise CheckpointError(
            f"{folder} is no artifact (it has no {MANIFEST}): penstock build makes one"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): copy the artifact again"
        ) from error
    try:
        told = msgspec.json.decode(content)
        schema = told.get("schema") if isinstance(told, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is broken ({error}): copy the artifact again, or build it again"
        ) from error
    if schema != SCHEMA:
        raise CheckpointError(_other_schema(path, schema))
    try:
        manifest = msgspec.convert(told, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{path} is broken ({error}): copy the artifact again, or build it again"
        ) from error
    for name in manifest.files:
        if not _stays_inside(name):
            raise CheckpointError(
                f"{path} names a file outside its folder ({name!r}): build the artifact again"
            )
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest whole or not at all. Raises as `disk.write_whole` does."""
    write_whole(folder / MANIFEST, manifest_json(manifest).encode())


def manifest_json(manifest: Manifest) -> str:
    """Returns the manifest as a person reads it: a list of numbers or names is a line."""
    text = json.dumps(msgspec.to_builtins(manifest), indent=2, allow_nan=False)
    return (
        re.sub(r"\[\n([^\[\]{}]*)\n *\]", lambda found: f"[{' '.join(found[1].split())}]", text)
        + "\n"
    )


def _other_schema(path: Path, schema: Any) -> str:
    if not isinstance(schema, int) or isinstance(schema, bool):
        return f"{path} names no schema: it is no artifact's manifest; build the artifact again"
    if schema > SCHEMA:
        return (
            f"{path} is of schema {schema}, and this penstock reads {SCHEMA}: take a newer penstock"
        )
    return (
        f"{path} is of schema {schema}, and this penstock reads {SCHEMA}: build the artifact again"
    )


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        bool(name)
        and not path.is_absolute()
        and ".." not in path.parts
        and "\\" not in name
        and "\0" not in name
    )
