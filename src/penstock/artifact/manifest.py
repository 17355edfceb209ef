"""Manifest: the content of a built engine's `penstock.json`. It names the source model, the
machine, the workload, and every decision with its measurements. It is written last, so a folder
without one is an unfinished build.

Knows files and numbers; no engine, no torch. docs/build.md explains each part.
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
LARGEST = 64 << 20  # bytes of a manifest; a terabyte of weights needs 5 MB
STATE = ".build"  # name of the folder that holds the stage results of a running build
USUAL_PROMPT = 128  # tokens of prompts in a timed step, unless the step measures their length
KERNELS = "kernels"  # name of the folder that holds compiled kernels

Value = bool | int | float | str | None


def name_of(value: Value) -> str:
    """Returns a value's name, as it is used in keys of `Decision.measured`."""
    return "default" if value is None else str(value)


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the manifest's parts: immutable; unknown fields are refused."""


class BuiltOn(_Told, kw_only=True, frozen=True):
    """The machine and libraries on which the choices were timed; None for parts that the machine
    lacks."""

    device: str  # the device's name, such as "NVIDIA H200" or "cpu"
    capability: tuple[int, int] | None = None  # compute capability of a GPU
    memory_bytes: int
    processor: str
    driver: str | None = None
    torch: str
    triton: str | None = None
    cuda: str | None = None


class BuiltFor(_Told, kw_only=True, frozen=True):
    """One workload on which the choices were timed. Lengths are in tokens."""

    told: str  # the workload as the user wrote it
    prompts: int
    samples: int  # number of samples of all prompts together
    concurrency: int  # number of samples that run at once
    prompt_tokens: int  # median prompt length
    longest_prompt: int
    output_tokens: int  # median length of the answers
    longest_output: int
    shared_tokens: int  # length of the prefix that all prompts share

    @property
    def shares(self) -> bool:
        """Returns True if samples share a prefix that may be attended once: they are samples of one
        prompt, or all prompts share at least a block."""
        return self.samples > self.prompts or self.shared_tokens >= BLOCK_SIZE


class Decision(_Told, kw_only=True, frozen=True):
    """One choice: the candidate that won, or the default if none won by more than the noise.
    measured: a candidate's name -> the result of each repeat, in `unit`."""

    name: str
    chosen: Value
    default: Value
    unit: str = ""
    measured: dict[str, list[float]] = {}
    # percent by which the chosen value is better than the default; None: not measured
    won_percent: float | None = None
    noise_percent: float | None = None
    note: str = ""  # the reason of the choice, if it is not the measurement


class Quality(_Told, kw_only=True, frozen=True):
    """Distance of the built model from the source model, on a sample of the workload. KL
    divergences are in nats per token, from the source model's distribution to the built one's."""

    # share of positions at which both models have the same most likely token
    agreement: float
    kl_mean: float
    kl_worst: float
    bound: float  # the largest kl_mean that the build accepts
    tokens: int
    # matrix name -> kl_mean of the source model with only that matrix replaced by the built
    # one, for the matrices with the largest values
    by_matrix: dict[str, float] = {}
    kept_wide: list[str] = []


class TimedEngine(_Told, kw_only=True, frozen=True):
    """The limits of the engine whose steps were timed; a simulated scheduler plans with them."""

    num_blocks: int  # KV blocks, the scratch block included
    max_rows: int
    max_model_len: int
    max_batched_tokens: int
    grouping: bool  # True if steps may have prefix groups
    sharing: dict[str, float]  # name of a field of schedule.prefix_groups.SharingCosts -> its value
    ridge_rows: int = 0  # see SchedulerConfig
    state_slots: int = 0  # slots of recurrent state; 0: no layer has any
    # sliding window, in tokens, of layers that share pages with full-attention layers; 0: none
    window: int = 0
    window_tables: int = 0  # pages of a block that such layers take, beside the first


class StepSeconds(_Told, kw_only=True, frozen=True):
    """A table of timed steps: each field is a column with one entry per step. A step has `rows`
    rows, each with `context` tokens of its own stored; in addition every `members` rows share a
    prefix of `shared` tokens. Beside the rows it has `prompt_tokens` prompt tokens, in prompts of
    `prompt_length`. With a `spread` the rows' contexts lie evenly between context - spread and
    context + spread. A column that is all 0 may be left out.

    seconds: measured for steps launched one after the other. device_seconds: the device's own time,
    less where the device waits for the host; left out: the same.
    """

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
    """The expected result of one workload with the chosen values: medians over repeated runs."""

    told: str
    output_tokens_per_second: float
    noise_percent: float | None  # spread between the timed runs; None: there was a single run
    requests_per_second: float
    # median time of a request, counted from when all requests were submitted
    request_ms: float | None = None
    # least possible time by the GPU's data sheet, over the measured time; None: unknown
    share_of_limit: float | None = None


class FileSums(_Told, kw_only=True, frozen=True):
    """A file's size and the SHA-256 of each piece of 16 MiB."""

    bytes: int
    pieces: list[str]


class Manifest(_Told, kw_only=True, frozen=True):
    """Content of `penstock.json`: what a build chose and measured."""

    schema: int = SCHEMA
    penstock: str  # version of Penstock
    model: str  # the model as the user named it
    revision: str | None = None
    source: dict[str, str]  # file of the source model -> its SHA-256
    built_on: BuiltOn
    built_for: list[BuiltFor]
    objective: str = "throughput"
    price: float | None = None  # dollars an hour of the machine; None: not given
    engine: dict[str, Value]  # option of Config -> value, chosen by the build or the user
    tunables: dict[str, Value] = {}  # tunable of a kernel -> the best measured value
    # attention layer -> scales of its heads' keys and values; an empty list: not quantized
    kv_scales: dict[str, tuple[list[float], list[float]]] = {}
    decisions: list[Decision] = []
    # None: the weights and KV cache have the source model's number formats
    quality: Quality | None = None
    step_seconds: StepSeconds = StepSeconds()
    expected: list[ExpectedWork] = []
    files: dict[str, FileSums]  # relative path (with forward slashes) -> checksums


def find_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of a built engine; None for any other folder. Raises CheckpointError for
    an unfinished or unreadable one."""
    if (folder / MANIFEST).is_file() or (folder / STATE).is_dir():
        return read_manifest(folder)
    return None


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest. Raises CheckpointError, one line that also says what to do, for a folder
    without a manifest of this version."""
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
    """Returns the manifest as readable JSON, with each list of numbers or names on one line."""
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
