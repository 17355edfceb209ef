"""limits: chooses sizes that the user left open. They follow from the model, the device and its
free memory.

Knows Config, sizes and memory; allocates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from penstock.config import BLOCK_SIZE, Config
from penstock.errors import CapacityError, UsageError
from penstock.execute.padding import GRAPH_ROWS, graph_sizes
from penstock.row_table import MAX_DRAFTS
from penstock.schedule.state_slots import first_snapshot
from penstock.speculative import SpeculativeConfig

ROWS = {"cpu": 1024, "cuda": 8192}
BATCHED_TOKENS = {"cpu": 2048, "cuda": 16384}
# most queries of a step beyond its rows: with more, drafts cost as much as rows
QUERIES_WITH_DRAFTS = 512
MASK_SLOTS = 1024  # token masks on the device; 16 MB with a vocabulary of 128k tokens
CPU_SHARE = 0.25  # share of free host memory to use; other programs need some too
# approximate share of a GPU's memory for a step's temporary tensors and CUDA graphs
STEP_SHARE = 0.05
# CUDA graphs take at most 1.5 GiB, or this share of a small GPU's memory
GRAPH_BYTES, GRAPH_SHARE = 3 << 29, 0.05
# Blocks beyond the requested tokens: the scratch block, a sample's own copy of its prompt's last
# block, and its next token's block, so that a cache of max_model_len tokens can run a sequence of
# this length.
SPARE_BLOCKS = 3
# For models with recurrent state, if max_num_seqs is not given: the number of rows is
# chosen so that each has this many tokens of KV cache. With more rows they would wait for
# KV blocks, with fewer memory would stay unused. (The state of a Qwen3.5-35B takes as many
# bytes as 3,000 tokens of its KV cache.)
SLOT_TOKENS = 1024
# Slots for snapshots of prompts' states: at least one per SNAPSHOT_ROWS rows and LEAST_SNAPSHOTS;
# at most SNAPSHOTS_A_ROW per row, within SNAPSHOT_SHARE of free memory.
SNAPSHOT_ROWS, LEAST_SNAPSHOTS = 8, 4
SNAPSHOTS_A_ROW, SNAPSHOT_SHARE = 8, 0.05


@dataclass(slots=True, frozen=True)
class BatchLimits:
    """Limits of batches, decided before the weights are loaded."""

    max_rows: int
    max_batched_tokens: int
    max_model_len: int
    # number of token masks that the device holds
    mask_slots: int = field(default=MASK_SLOTS, kw_only=True)
    speculative: SpeculativeConfig | None = field(default=None, kw_only=True)
    # True: the device keeps texts of ended samples for their groups' drafts
    group_texts: bool = field(default=False, kw_only=True)

    @property
    def most_drafts(self) -> int:
        """Returns the most drafts of a row in a step, forced tokens included."""
        asked = self.speculative
        return MAX_DRAFTS if asked is None else max(MAX_DRAFTS, asked.num_speculative_tokens)

    @property
    def state_drafts(self) -> int:
        """Returns the most drafts of a row in a step of a model with recurrent state. Without
        speculative_config it is 0, so that slots are small: then no tokens are forced ahead."""
        return 0 if self.speculative is None else self.most_drafts

    @property
    def max_queries(self) -> int:
        """Returns the most queries of a step: its rows and their drafts."""
        return max(self.max_rows, self.queries_with_drafts)

    @property
    def queries_with_drafts(self) -> int:
        """Returns the most queries of a step that has drafts of speculative_config."""
        drafts = 0 if self.speculative is None else self.speculative.num_speculative_tokens
        return min(self.max_rows * (1 + drafts), QUERIES_WITH_DRAFTS, self.max_batched_tokens)


@dataclass(slots=True, frozen=True)
class Limits(BatchLimits):
    """Limits a runner is built with. num_blocks counts the scratch block. All ranks use the same
    limits (`agreed`), so that a step has one shape everywhere."""

    kv_tokens: int
    num_blocks: int
    state_slots: int = 0  # slots of recurrent state (schedule.state_slots); 0: no recurrent state
    graph_sizes: tuple[int, ...] = ()  # row counts of the steps that CUDA graphs are captured for
    plain_graphs: bool = (
        # True: capture only graphs without prefix groups and sampling options at start, the others
        # on first use. Set by a built engine whose workload shares no prefixes
        False
    )


def agreed(limits: Sequence[Limits]) -> Limits:
    """Returns limits that every rank has room for: the least of each number, and of all else the
    first rank's."""
    numbers = [each.name for each in fields(Limits) if type(getattr(limits[0], each.name)) is int]
    return replace(
        limits[0], **{name: min(getattr(each, name) for each in limits) for name in numbers}
    )


def batch_limits(config: Config, context: int, device: torch.device) -> BatchLimits:
    """Returns the limits that are known before the weights are loaded. context: the model's longest
    sequence in tokens. Raises UsageError for options that contradict each other or the model."""
    rows, tokens = config.batching.max_num_seqs, config.batching.max_num_batched_tokens
    if rows is not None and tokens is not None and tokens < rows:
        raise UsageError(
            f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({rows}), and each row needs"
            " a token of a step: raise the one or lower the other",
            param="max_num_batched_tokens",
        )
    if rows is None:
        rows = min(ROWS[device.type], tokens or ROWS[device.type])
    if tokens is None:
        tokens = max(BATCHED_TOKENS[device.type], rows)
    length = config.memory.max_model_len or context
    if length > context:
        raise UsageError(
            f"max_model_len ({length}) is above the model's context of {context}: lower it to"
            f" {context} or less",
            param="max_model_len",
        )
    return BatchLimits(
        rows,
        tokens,
        length,
        mask_slots=min(rows, MASK_SLOTS),
        speculative=config.speculative,
        group_texts=config.schedule.draft_from == "group",
    )


def with_kv(
    limits: BatchLimits,
    config: Config,
    token_bytes: int,
    device: torch.device,
    weights_to_come: int = 0,
    sharers: int = 1,
    slot_bytes: int = 0,
) -> Limits:
    """Returns the full limits, with the size of the KV cache. token_bytes: bytes of KV cache per
    token, over all layers. weights_to_come: bytes of weights not in memory yet. sharers: number of
    ranks that share this device's memory equally. slot_bytes: bytes of recurrent state per
    sequence, over all layers.

    Called once the weights are in memory and the largest step has run (`warm`), or earlier with the
    weights' size. Raises UsageError or CapacityError, each with a remedy.
    """
    longest = limits.max_model_len
    asked = config.memory.kv_cache_tokens
    free = max(0, room_of(config, device) - weights_to_come) // sharers
    slots = 0
    if slot_bytes:
        ours = int(free * _share_of(device))
        limits = _with_rows_that_fit(limits, config, slot_bytes, token_bytes, ours, device)
        slots = _slots_in(limits.max_rows, ours, slot_bytes)
        free -= slots * slot_bytes
    if asked is not None:
        tokens = asked
        if tokens < longest:
            raise UsageError(
                f"kv_cache_tokens ({tokens}) holds no sequence of max_model_len ({longest}): "
                f"raise it, or set max_model_len to {tokens} or less",
                param="kv_cache_tokens",
            )
        if tokens * token_bytes > free:
            raise CapacityError(
                f"kv_cache_tokens ({tokens}) takes {_gib(tokens * token_bytes)} and {_gib(free)} is"
                f" free on {device}: lower it to {int(free * 0.9) // token_bytes} or less",
                param="kv_cache_tokens",
            )
    else:
        tokens = _tokens_that_fit(limits, token_bytes, free, device)
    return Limits(
        limits.max_rows,
        limits.max_batched_tokens,
        longest,
        kv_tokens=tokens,
        num_blocks=-(-tokens // BLOCK_SIZE) + SPARE_BLOCKS,
        state_slots=slots,
        mask_slots=limits.mask_slots,
        speculative=limits.speculative,
        group_texts=limits.group_texts,
        graph_sizes=_graph_sizes(limits, config) if device.type == "cuda" else (),
        plain_graphs=config.plain_graphs,
    )


def _share_of(device: torch.device) -> float:
    """Returns the share of free memory to use if the user gave none."""
    return 1.0 if device.type == "cuda" else CPU_SHARE


def slots_of(rows: int) -> int:
    """Returns the number of recurrent state slots that `rows` rows need: one each, two common ones
    (state_slots.py), and the fewest snapshots."""
    return first_snapshot(rows) + max(LEAST_SNAPSHOTS, rows // SNAPSHOT_ROWS)


def _slots_in(rows: int, free: int, slot_bytes: int) -> int:
    """Returns the number of recurrent state slots for `rows` rows: as many as needed, plus as many
    snapshots as fit in a share of memory."""
    more = min(SNAPSHOTS_A_ROW * rows, int(free * SNAPSHOT_SHARE) // slot_bytes)
    return max(slots_of(rows), first_snapshot(rows) + more)


def _with_rows_that_fit(
    limits: BatchLimits,
    config: Config,
    slot_bytes: int,
    token_bytes: int,
    free: int,
    device: torch.device,
) -> BatchLimits:
    """Returns the limits, with as many rows as there is memory for their recurrent state. Raises
    CapacityError if the state of max_num_seqs rows does not fit, or, without that option, of one
    row."""

    def needed(rows: int) -> int:
        tokens = max(rows * min(limits.max_model_len, SLOT_TOKENS), limits.max_model_len)
        return _slots_in(rows, free, slot_bytes) * slot_bytes + tokens * token_bytes

    most = limits.max_rows
    while most and needed(most) > free:
        most = min(most - 1, int(most * free / needed(most)))
    rows = limits.max_rows if config.batching.max_num_seqs is not None else max(1, most)
    taken = slots_of(rows) * slot_bytes
    if taken > free:
        raise CapacityError(
            f"the recurrent state of {rows} sequences takes {_gib(taken)}, {_gib(slot_bytes)} each,"
            f" and {_gib(free)} is ours to take on {device}: "
            + (f"set max_num_seqs to {most} or less" if most else "take a larger device"),
            param="max_num_seqs",
        )
    return replace(limits, max_rows=rows, mask_slots=min(rows, limits.mask_slots))


def _graph_sizes(limits: BatchLimits, config: Config) -> tuple[int, ...]:
    most = min(limits.max_queries, GRAPH_ROWS)
    return tuple(graph_sizes(most, config.batching.max_cudagraph_capture_size or most))


def _tokens_that_fit(limits: BatchLimits, token_bytes: int, free: int, device: torch.device) -> int:
    share = _share_of(device)
    longest = limits.max_model_len
    most = limits.max_rows * -(-longest // BLOCK_SIZE) * BLOCK_SIZE
    tokens = min(most, int(free * share) // token_bytes // BLOCK_SIZE * BLOCK_SIZE)
    if tokens < BLOCK_SIZE:
        more = (
            "raise gpu_memory_utilization, or --device cpu"
            if device.type == "cuda"
            else "or take a smaller model"
        )
        raise CapacityError(
            f"no memory is left for the KV cache on {device}, of which {_gib(free_memory(device))}"
            f" is free and {_gib(free)} ours to take: end what else runs there, {more}",
            param="gpu_memory_utilization" if device.type == "cuda" else "kv_cache_tokens",
        )
    if tokens < longest:
        raise CapacityError(
            f"the KV cache of one sequence of {longest} tokens takes {_gib(longest * token_bytes)},"
            f" and {share:.0%} of the free memory of {device} is {_gib(int(free * share))}: set"
            f" max_model_len to {tokens} or less, or kv_cache_tokens to take more",
            param="max_model_len",
        )
    return tokens


def room_of(config: Config, device: torch.device) -> int:
    """Returns the bytes that this engine may still take. On CUDA it is within
    gpu_memory_utilization, less the room for CUDA graphs."""
    free = free_memory(device)
    if device.type == "cpu":
        return free
    total = int(torch.cuda.mem_get_info(device)[1])
    return free - int((1 - config.memory.gpu_memory_utilization) * total) - graph_bytes(device)


def graph_bytes(device: torch.device) -> int:
    """Returns the most bytes that CUDA graphs may take."""
    return min(GRAPH_BYTES, int(torch.cuda.mem_get_info(device)[1] * GRAPH_SHARE))


def free_memory(device: torch.device) -> int:
    """Returns the free bytes that this process could allocate."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_available(), *_cgroup_rooms()])


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # not Linux: the machine's whole memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_rooms(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Returns the bytes left under the memory limit of each cgroup above this process; [] without
    limits."""
    if not own.exists():
        return []
    rooms = []
    for line in own.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder == base.parent:
                break
            rooms += _room(folder / names[0], folder / names[1], folder / "memory.stat")
    return rooms


def _room(limit: Path, used: Path, stat: Path) -> list[int]:
    """Returns [bytes left], or [] if there is no limit. Left is the limit less used memory that the
    kernel cannot reclaim. Arguments: the cgroup's files."""
    if not (limit.exists() and used.exists()):
        return []
    text = limit.read_text().strip()
    if text == "max" or int(text) >= 1 << 60:
        return []
    cache = 0
    if stat.exists():
        counts = dict(line.split() for line in stat.read_text().splitlines())
        cache = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return [max(0, int(text) - int(used.read_text()) + cache)]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
