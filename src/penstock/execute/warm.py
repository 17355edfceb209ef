"""warm: runs the largest steps before the first request. All their rows are dead rows: padding
whose results are dropped.

This compiles every kernel that a step may need, and makes torch's allocator reserve the most memory
a step may hold, so that the rest can go to the KV cache. Knows a DeviceStep and limits.

With an empty cache Triton compiles for 9 s, mostly without the interpreter's lock: the sampler's
kernels, half of them, are compiled in a second thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from penstock.config import BLOCK_SIZE
from penstock.execute.device_sampler import EVERY, PLAIN
from penstock.execute.device_step import DeviceStep
from penstock.execute.limits import BatchLimits
from penstock.execute.padding import group_capacity, padded
from penstock.kernels.inputs import PrefixSight
from penstock.kernels.latent import PREFIX_ROWS
from penstock.request import MAX_LOGPROBS
from penstock.row_table import JOIN_WORDS
from penstock.schedule.step import Chunks, Int32, StepPlan, plain_step

# Tokens of steps with chunks alone, which are padded: products of different sizes use different
# tiles, norms different rows per program; also needed if fewer rows may run.
_CHUNK_TOKENS = (16, 32, 48, 64, 128, 256, 1024)
# tokens of further such steps for models with experts, whose tiles have further heights
_EXPERT_TOKENS = (512, 2048, 4096)
# number of chunks in a step: more than the chunks that delta_chunks.py handles with its kernel for
# few
_SEVERAL = 8
# least rows x KV heads at which attention with wide heads uses the larger of two tiles on H100 and
# H200 (decode.py)
_LARGE_TILES = 660
# rows: the largest step whose prefix attention uses tiles of few rows; here the kernel may divide a
# prefix into one part where it takes two at 1,024 rows, which is another kernel
_MOST_LOW = 1984


def warm(step: DeviceStep, limits: BatchLimits, grouping: bool) -> None:
    """Runs the largest steps. step: its KV cache may have few blocks, since all tokens are written
    to the scratch block; discard it afterwards.

    grouping: True if steps may have prefix groups."""
    most, binaries = limits.max_batched_tokens, step.model.ops.binaries
    # a built engine's kernels are compiled already; those of smaller steps are loaded when
    # captured or first used
    compiles = binaries is None or not binaries.folders
    _compile_bookkeeping(step)
    _compile_drafts(step, limits)
    _all_rows_ask(step)
    if compiles:
        wide = [kind for kind in step.model.kinds if kind.width > 128]
        tiles = {padded(min(limits.max_queries, _LARGE_TILES // kind.kv_heads)) for kind in wide}
        sizes = sorted({*_kinds_of_sizes(limits.max_queries), *tiles})
        _compile_small_steps(step, sizes, grouping, min(step.scorer.slice_rows, most))
    if grouping and step.launches.expands_prefixes and limits.max_queries >= PREFIX_ROWS:
        _expand_prefixes(step, padded(limits.max_queries))
    # drafts come on top of the tokens that a step may have
    beside = most - limits.max_rows + limits.max_queries - limits.max_rows
    step.step(_plan(limits.max_rows, EVERY, beside, limits, MAX_LOGPROBS))
    routed = any(block.experts for block in step.model.blocks)
    chunks = (*_CHUNK_TOKENS, *(_EXPERT_TOKENS if routed else ()))
    for tokens in sorted({min(size, most) for size in chunks}) if compiles else ():
        step.step(_plan(0, PLAIN, tokens, limits, MAX_LOGPROBS))
    if compiles and step.kv.by_slot:  # recurrent layers use other kernels for several chunks
        several = np.full(max(1, min(_SEVERAL, most // 16)), min(16, most), np.int32)
        step.step(_plan_of(0, PLAIN, several, MAX_LOGPROBS))
    step.asked.wants[:] = 0
    step.asked.logprobs[:] = -1


def _compile_bookkeeping(step: DeviceStep) -> None:
    """Compiles the kernels for joins, new blocks and copies, with indices of -1, for
    which the kernels do nothing."""
    words = -(-JOIN_WORDS // 16) * 16
    step.ops.join(torch.full((1, words), -1, dtype=torch.int32, device=step.rows.device), step.rows)
    plan = _plan(0, PLAIN, 0, BatchLimits(0, 0, 0), -1)
    plan.new_blocks, plan.moves.blocks = (
        np.full((1, 3), -1, np.int32),
        np.full((1, 2), -1, np.int32),
    )
    if step.kv.by_slot:
        plan.moves.slots = np.full((1, 2), -1, np.int32)
    step.step(plan)


def _compile_drafts(step: DeviceStep, limits: BatchLimits) -> None:
    """Compiles the kernels of a proposer. A built engine may have been built without drafts: a
    sealed one is refused here, before it is ready."""
    if step.draw.proposer is not None:
        step.staging.rows.fill_(step.max_rows)
        with torch.inference_mode():
            step.launches.take_drafts(1)
            step.draw.proposer.warm(_kinds_of_sizes(limits.queries_with_drafts))


def _compile_small_steps(step: DeviceStep, sizes: list[int], grouping: bool, scored: int) -> None:
    """Compiles the kernels of steps of all sizes. scored: most prompt tokens scored at once."""
    device = step.rows.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    hidden = torch.zeros(
        (sizes[-1], step.model.config.hidden_size), dtype=step.model.dtype, device=device
    )

    def draws() -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            for size in sizes:
                for wants in (PLAIN, EVERY):
                    step.launches.draw(size, hidden[:size], wants)
            _score_prompts(step, scored)

    # Triton's driver must be set up by one thread alone
    step.launches.forward_rows(sizes[0], False)
    with ThreadPoolExecutor(1, "penstock-warm") as beside:
        drawing = beside.submit(draws)
        if step.model.ranks > 1:  # all ranks must run collectives in the same order
            drawing.result()
        for size in sizes:
            for grouped in (False, True) if grouping and size > 1 else (False,):
                step.launches.forward_rows(size, grouped)
        if grouping and sizes[-1] > _MOST_LOW:
            step.launches.forward_rows(_MOST_LOW, True)
        drawing.result()


def _expand_prefixes(step: DeviceStep, size: int) -> None:
    """Compiles latent attention over shared prefixes in the expanded form, and takes its memory.
    size: rows of the step, all in one group over the scratch block."""
    staging, seen = step.staging, PrefixSight(BLOCK_SIZE, size * BLOCK_SIZE)
    staging.group_start.fill_(size)
    staging.group_start[0] = 0
    staging.group_length.zero_()
    staging.group_length[0] = BLOCK_SIZE
    with torch.inference_mode():
        step.launches.forward(size, group_capacity(size), expanded=seen)
    staging.group_start.zero_()
    staging.group_length.zero_()
    staging.forget()


def _score_prompts(step: DeviceStep, most: int) -> None:
    """Compiles the scoring of prompt tokens for slices of all sizes, since slices may be larger
    than the number of rows."""
    hidden = torch.zeros(
        (most, step.model.config.hidden_size), dtype=step.model.dtype, device=step.rows.device
    )
    for size in {min(kind, most) for kind in _kinds_of_sizes(most)}:
        targets = torch.zeros(size, dtype=torch.int32, device=step.rows.device)
        step.model.ops.token_logprobs(step.model.logits(hidden[:size]), targets, 1)


def _all_rows_ask(step: DeviceStep) -> None:
    step.staging.rows.fill_(step.max_rows)
    step.asked.wants[:] = EVERY
    step.asked.logprobs[:] = MAX_LOGPROBS


def _kinds_of_sizes(rows: int) -> list[int]:
    """Returns sizes with different compiled kernels: powers of two, sizes that are or aren't
    multiples of 16, and 56, between the shapes of latent attention for few and for many rows."""
    counts = {min(1 << power, rows) for power in range(rows.bit_length() + 1)} | {
        min(24, rows),
        min(56, rows),
        min(1152, rows),
    }
    return sorted({padded(count) for count in counts})


def _plan(
    rows: int, wants: int, tokens: int, limits: BatchLimits, prompt_logprobs: int
) -> StepPlan:
    """Returns a plan of `rows` rows and `tokens` chunk tokens, each chunk as long as a sequence may
    be."""
    return _plan_of(rows, wants, _sizes(tokens, limits.max_model_len - 1), prompt_logprobs)


def _plan_of(rows: int, wants: int, sizes: Int32, prompt_logprobs: int) -> StepPlan:
    chunks = _chunks(sizes, prompt_logprobs) if sizes.size else None
    return plain_step(
        0, np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32), wants, chunks=chunks
    )


def _sizes(tokens: int, longest: int) -> Int32:
    whole, rest = divmod(tokens, longest)
    return np.array([longest] * whole + [rest] * bool(rest), np.int32)


def _chunks(sizes: Int32, prompt_logprobs: int) -> Chunks:
    tokens = int(sizes.sum())
    return Chunks(
        tokens=np.zeros(tokens, np.int32),
        start=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
        context=np.zeros(sizes.size, np.int32),
        blocks=np.zeros((sizes.size, -(-int(sizes.max()) // BLOCK_SIZE)), np.int32),
        prompt_logprobs=np.full(sizes.size, prompt_logprobs, np.int32),
        next_token=np.zeros(tokens, np.int32),
    )
