"""Checkpoint: the safetensors files of a folder. Their headers are checked before any weight is
read.

Knows names, shapes, dtypes and files; not which parameter a tensor fills. The format:
https://huggingface.co/docs/safetensors: 8 bytes length, a JSON header, then the tensors' bytes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.disk import open_plain
from penstock.errors import CheckpointError
from penstock.json_keys import read_json, shown
from penstock.models.model_config import our_name
from penstock.models.text_part import TextOfWhole
from penstock.weights.find import NO_GGUF

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "download the checkpoint again"
MAX_HEADER = 100_000_000  # most bytes of a safetensors header; the format's own limit
# dimensions of a tensor; a shape with a million of them would take hours to multiply
MOST_DIMS = 16
LONGEST_FILE = 255  # most bytes of a file's name
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a shard, as its header describes it, or a rank's share of such a tensor.

    stored: the tensor's name in the file, if different. within: index of this matrix if the file's
    tensor stacks several. start: offset of its first byte in the file. run: bytes of each
    contiguous piece of a share; stride: bytes between the starts of two pieces; both are 0 if the
    whole share is contiguous. turned: True if the matrix is stored transposed."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    run: int = 0
    stride: int = 0
    stored: str = ""
    within: tuple[int | slice, ...] = ()
    turned: bool = False

    @property
    def bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def narrow(self, dimension: int, first: int, length: int) -> Entry:
        """Returns the entry of a part of this tensor, with the arguments of `Tensor.narrow`."""
        inner = ITEM_BYTES[self.dtype] * math.prod(self.shape[dimension + 1 :])
        shape = (*self.shape[:dimension], length, *self.shape[dimension + 1 :])
        start = self.start + first * inner
        if math.prod(self.shape[:dimension]) == 1:
            return replace(self, shape=shape, start=start)
        return replace(
            self, shape=shape, start=start, run=length * inner, stride=self.shape[dimension] * inner
        )

    def places(self, at: int, count: int) -> Iterator[tuple[int, int]]:
        """Yields (offset in the file, length in bytes) of each piece that holds bytes `at` to at +
        count of the tensor."""
        if not self.run:
            yield self.start + at, count
            return
        while count:
            number, within = divmod(at, self.run)
            some = min(self.run - within, count)
            yield self.start + number * self.stride + within, some
            at, count = at + some, count - some

    def of_bytes(self, read: Tensor) -> Tensor:
        """Returns this entry's tensor as a view of its bytes. read: uint8, contiguous."""
        return read.view(self.shape[::-1]).T if self.turned else read.view(self.shape)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Returns name -> Entry of all tensors of a folder. Raises CheckpointError if a shard is
    missing, cut short or malformed."""
    entries: dict[str, Entry] = {}
    named = _shards(folder)
    for shard, expected in named.items():
        found = {entry.name: entry for entry in read_header(shard)}
        lacking = sorted(expected - found.keys())
        if lacking:
            raise CheckpointError(
                f"{shard} lacks tensor {shown(lacking[0])}, which {INDEX} says it holds: {AGAIN}"
            )
        for name, entry in found.items():
            if name in entries:
                raise CheckpointError(
                    f"tensor {shown(name)} is in {entries[name].shard} and in {shard}: {AGAIN}"
                )
            entries[name] = entry
    return entries


def of_text(entries: dict[str, Entry], part: TextOfWhole | None) -> dict[str, Entry]:
    """Returns the entries of the language model's tensors, under the names of a text-only
    checkpoint. part: the text part of a multimodal checkpoint; None: the checkpoint is text-only.
    """
    if part is None:
        return entries
    ours = {name: part.ours(name) for name in entries}
    return {
        own: replace(entries[name], name=own, stored=name)
        for name, own in ours.items()
        if own is not None
    }


def renamed(entries: dict[str, Entry], renames: Sequence[tuple[str, str]]) -> dict[str, Entry]:
    """Returns the entries under the names that the model uses. renames: pairs of (part of a
    checkpoint's name, its replacement). Raises CheckpointError if two tensors get one name."""
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        own = our_name(name, renames)
        if own in found:
            raise CheckpointError(
                f"{entry.shard} holds tensor {shown(name)}, which is there as {own!r} too: {AGAIN}"
            )
        found[own] = entry if own == name else replace(entry, name=own, stored=entry.stored or name)
    return found


# name of a stacked expert tensor -> the matrices it holds for each expert, one above the other
_STACKED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def unstacked(entries: dict[str, Entry], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Entry]:
    """Returns the entries, with stacked experts split into each expert's matrices.

    A checkpoint may stack experts as [experts, out, in] in a layer's `.experts.gate_up_proj` and
    `.experts.down_proj`. They are split if each expert's matrix is in `wanted` (name -> shape). If
    they fit only as [experts, in, out], as Qwen3-VL is published, they are transposed."""
    found = {}
    for name, entry in entries.items():
        at, _, matrix = name.rpartition(".")
        parts = _STACKED.get(matrix, ()) if len(entry.shape) == 3 else ()
        shape = wanted.get(f"{at}.{entry.shape[0] - 1}.{parts[0]}.weight") if parts else None
        if shape is None:
            found[name] = entry
            continue
        whole = (len(parts) * shape[0], shape[1])
        turned = entry.shape[1:] == whole[::-1] != whole
        size = entry.shape[2 if turned else 1] // len(parts)
        for expert in range(entry.shape[0]):
            each = replace(
                entry.narrow(0, expert, 1), shape=entry.shape[1:], stored=entry.stored or name
            )
            for number, part in enumerate(parts):
                outputs, own = (
                    slice(number * size, (number + 1) * size),
                    f"{at}.{expert}.{part}.weight",
                )
                if turned:
                    cut = each.narrow(1, outputs.start, size)
                    cut = replace(
                        cut,
                        shape=cut.shape[::-1],
                        turned=True,
                        within=(expert, slice(None), outputs),
                    )
                else:
                    cut = replace(
                        each.narrow(0, outputs.start, size), run=0, within=(expert, outputs)
                    )
                found[own] = replace(cut, name=own)
    return found


def read_tensors(entries: list[Entry]) -> Iterator[tuple[Entry, Tensor]]:
    """Yields tensors shard by shard; each is a view of the mapped file, valid until the next."""
    shards = dict.fromkeys(entry.shard for entry in entries)
    for shard in shards:
        try:
            with safe_open(shard, framework="pt", device="cpu") as file:
                for entry in entries:
                    if entry.shard == shard:
                        stored = entry.stored or entry.name
                        read = (
                            file.get_slice(stored)[entry.within]
                            if entry.within
                            else file.get_tensor(stored)
                        )
                        yield entry, read.T if entry.turned else read
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard} cannot be read ({error}): {AGAIN}") from error


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Returns the shards of a folder, each with the names of its tensors that the index file gives.
    A folder with a single shard has no index; the set of names is empty then."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: set()}
    if (folder / INDEX).is_file():
        return _indexed(folder)
    raise CheckpointError(_why_no_weights(folder))


def _indexed(folder: Path) -> dict[Path, set[str]]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(f, str) for f in weight_map.values())
    ):
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names: {AGAIN}")
    shards: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        # a longer name is refused here, since the OS raises an error on looking it up
        long = len(file.encode("utf-8", "surrogatepass")) > LONGEST_FILE
        if Path(file).name != file or not file.endswith(".safetensors") or long:
            raise CheckpointError(
                f"{index} puts tensor {shown(name)} in {shown(file)}, which is no safetensors file"
                " of its folder"
            )
        shards.setdefault(folder / file, set()).add(name)
    for shard, names in shards.items():
        if not shard.is_file():
            raise CheckpointError(
                f"{shard} is missing, and {INDEX} puts tensor {shown(min(names))} in it: {AGAIN}"
            )
    return shards


def _why_no_weights(folder: Path) -> str:
    files = sorted(p.name for p in folder.iterdir())
    pickled = [
        f
        for f in files
        if f.endswith((".bin", ".pt", ".pth", ".ckpt")) and f != "training_args.bin"
    ]
    loose = [f for f in files if f.endswith(".safetensors")]
    gguf = [f for f in files if f.endswith(".gguf")]
    if loose:
        return f"{folder} has {loose[0]} but neither {SINGLE} nor {INDEX}: {AGAIN}, index included"
    if pickled:
        return (
            f"{folder} has weights only as pickle ({pickled[0]}), which can run code when opened"
            " and is never read: take the model's safetensors, or save it once with transformers'"
            " save_pretrained"
        )
    if gguf:
        return f"{folder} has weights only as GGUF ({gguf[0]}), and {NO_GGUF}"
    return (
        f"{folder} holds no weights: give a folder with {SINGLE} (or its shards and index), or"
        " load_format='dummy'"
    )


def read_header(shard: Path) -> list[Entry]:
    """Returns the entries of one shard, each checked against the file's size."""
    try:
        with open_plain(shard) as file:
            size = os.fstat(file.fileno()).st_size
            opening = file.read(8)
            length = int.from_bytes(opening, "little")
            if opening.startswith(b"version "):
                raise CheckpointError(
                    f"{shard} is a git-lfs pointer, not the weights: run `git lfs pull` in its"
                    " folder"
                )
            if len(opening) < 8 or not 2 <= length <= MAX_HEADER or 8 + length > size:
                raise CheckpointError(
                    f"{shard} is cut short or no safetensors file ({size} bytes): {AGAIN}"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{shard} cannot be read ({error.strerror}): {AGAIN}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shard} has a broken header ({error}): {AGAIN}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{shard} has a broken header (no JSON object): {AGAIN}")
    return [
        _entry(shard, name, told, 8 + length, size)
        for name, told in header.items()
        if name != "__metadata__"
    ]


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _HeaderEntry(msgspec.Struct):
    """A tensor's entry in a shard's header."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MOST_DIMS)]
    data_offsets: tuple[_Size, _Size]


def _entry(shard: Path, name: str, told: Any, data_start: int, size: int) -> Entry:
    try:
        found = msgspec.convert(told, _HeaderEntry)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{shard} has a broken header at tensor {shown(name)}: {AGAIN}"
        ) from error
    dtype, shape, (start, end) = found.dtype, found.shape, found.data_offsets
    if data_start + end > size:
        raise CheckpointError(
            f"{shard} is cut short: tensor {shown(name)} ends {data_start + end - size} bytes past"
            f" its end: {AGAIN}"
        )
    if dtype in ITEM_BYTES and end - start != ITEM_BYTES[dtype] * math.prod(shape):
        raise CheckpointError(
            f"{shard} has a broken header: the bytes of tensor {shown(name)} don't fit its shape:"
            f" {AGAIN}"
        )
    return Entry(name, shard, dtype, shape, data_start + start)
