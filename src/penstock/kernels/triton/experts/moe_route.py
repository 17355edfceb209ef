"""Chooses the experts of each token, and sorts rows by expert. All of it runs on the device, and
sizes depend on the number of tokens alone, so that a step can be captured as a CUDA graph.

  _route   a program per token: its k experts by the rules of a Routing, their weights, and the rank
           of its row among the rows of each expert
  _place   assigns each pair (token, choice) a slot, so that an expert's slots are adjacent, and
           divides the slots into tiles of rows of one expert

The order in which programs arrive decides a pair's slot within its expert; this doesn't change the
numbers of a row. With few tokens each pair is a tile of its own, and nothing is sorted. T: tokens,
E: experts. Knows scores and numbers of experts; no matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.routing import Routing
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import early_of, has_pdl, release, wait

# Number of pairs, and of tiles, that a program of _place handles. It depends on the rows of a tile,
# as EARLY does: so there are no more compiled kernels than heights of tiles.
PLACED = {16: 16, 32: 16, 64: 64, 128: 64}


@triton.jit
def _worth(score, most, total, SIGMOID: tl.constexpr):
    """Returns the experts' values: sigmoids of their scores (SIGMOID), or their softmax. most,
    total: the largest score, and the sum of exp(score - most)."""
    return 1.0 / (1.0 + tl.exp(-score)) if SIGMOID else tl.exp(score - most) / total


@triton.jit
def _in_groups(
    left,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PAIRED: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    """Keeps only the experts of the best groups. left: values [LANES * EACH], with EACH adjacent
    lanes per group. Returns it with -inf in all but KEPT of the GROUPS groups. A group is judged by
    its best value, or if PAIRED by the sum of its two best."""
    grid, lane, group = tl.reshape(left, (LANES, EACH)), tl.arange(0, EACH), tl.arange(0, LANES)
    both, at = tl.max(grid, 1, return_indices=True)
    if PAIRED:
        both += tl.max(tl.where(lane[None, :] == at[:, None], float("-inf"), grid), 1)
    both = tl.where(group < GROUPS, both, float("-inf"))
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.argmax(both, 0)
        kept = kept | (group == best)
        both = tl.where(group == best, float("-inf"), both)
    return tl.reshape(tl.where(kept[:, None], grid, float("-inf")), (LANES * EACH,))


@triton.jit
def _route(
    scores,
    correction,
    answer_scale,
    weights,
    chosen,
    ranks,
    counts,
    experts,
    stride,
    least,
    added,
    scale,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PAIRED: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    LANES: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    SCALED: tl.constexpr,
    RENORMALISED: tl.constexpr,
    COUNTED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Chooses K experts for one token per program. scores: [T, E]. weights, chosen, ranks: outputs
    [T, K]. counts: [E], receives the number of rows of each expert if COUNTED. PLACES, LANES: K and
    the number of experts, rounded up to powers of two. GROUP_LANES: GROUPS, rounded up to a power
    of two; each group has LANES / GROUP_LANES adjacent lanes. Other arguments: see Routing and
    Experts."""
    row = tl.program_id(0).to(tl.int64)
    lane, place = tl.arange(0, LANES), tl.arange(0, PLACES)
    EACH: tl.constexpr = LANES // GROUP_LANES  # lanes per group
    size = experts // GROUPS
    expert = lane // EACH * size + lane % EACH
    there = (lane % EACH < size) & (expert < experts)
    if CORRECTED:
        more = tl.load(correction + expert, mask=there, other=0.0)
    wait(EARLY)
    release(EARLY)
    score = tl.load(scores + row * stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    most = tl.max(score, 0)
    total = 1.0 if SIGMOID else tl.sum(tl.exp(score - most), 0)
    left = score
    if CORRECTED or GROUPS > 1:
        left = _worth(score, most, total, SIGMOID)
        if CORRECTED:
            left += more
        left = tl.where(there, left, float("-inf"))
    if GROUPS > 1:
        left = _in_groups(left, GROUPS, KEPT, PAIRED, GROUP_LANES, EACH)
    which = tl.zeros((PLACES,), tl.int32)
    for j in tl.static_range(K):
        at = tl.argmax(left, 0)
        which = tl.where(place == j, at, which)
        left = tl.where(lane == at, float("-inf"), left)
    # NaN scores may give too large an index, which is clamped to the last expert
    which = tl.minimum(which // EACH * size + which % EACH, experts - 1)
    real = place < K
    best = tl.load(scores + row * stride + which, mask=real, other=float("-inf")).to(tl.float32)
    best = tl.where(real, _worth(best, most, total, SIGMOID), 0.0)
    if RENORMALISED:
        best = best / (tl.maximum(tl.sum(best, 0), least) + added)
    if SCALED:
        best *= tl.load(answer_scale + which, mask=real, other=0.0)
    at = row * K + place
    tl.store(weights + at, best * scale, mask=real)
    tl.store(chosen + at, which, mask=place < K)
    if COUNTED:
        tl.store(
            ranks + at,
            tl.atomic_add(counts + which, 1, mask=place < K, sem="relaxed"),
            mask=place < K,
        )


@triton.jit(do_not_specialize=["pairs_in_all", "tiles_in_all"])
def _place(
    chosen,
    ranks,
    counts,
    pairs,
    tiles,
    experts,
    pairs_in_all,
    tiles_in_all,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sorts pairs by expert. Writes pairs [slots]: the pair in each slot; and tiles [tiles, 3]:
    expert, first slot, and number of rows (0: unused tile). ROWS: the most rows of a tile."""
    wait(EARLY)
    release(EARLY)
    lane = tl.arange(0, LANES)
    count = tl.load(counts + lane, mask=lane < experts, other=0)
    of_expert = (count + ROWS - 1) // ROWS  # number of tiles of each expert
    behind = tl.cumsum(of_expert, 0)
    here = tl.program_id(0) * EACH + tl.arange(0, EACH)
    there = here < pairs_in_all
    expert = tl.load(chosen + here, mask=there, other=0)
    before = tl.sum(tl.where(lane[None, :] < expert[:, None], count[None, :], 0), 1)
    slot = before + tl.load(ranks + here, mask=there, other=0)
    tl.store(pairs + slot, here, mask=there)
    owner = tl.sum((behind[None, :] <= here[:, None]).to(tl.int32), 1)
    mine = lane[None, :] == owner[:, None]
    first_tile = tl.sum(tl.where(mine, (behind - of_expert)[None, :], 0), 1)
    rows = tl.sum(tl.where(mine, count[None, :], 0), 1) - (here - first_tile) * ROWS
    first = (
        tl.sum(tl.where(lane[None, :] < owner[:, None], count[None, :], 0), 1)
        + (here - first_tile) * ROWS
    )
    exists = here < tiles_in_all
    tl.store(tiles + here * 3, tl.minimum(owner, experts - 1), mask=exists)
    tl.store(tiles + here * 3 + 1, first, mask=exists)
    tl.store(tiles + here * 3 + 2, tl.maximum(tl.minimum(rows, ROWS), 0), mask=exists)


@dataclass(slots=True, frozen=True)
class Routes:
    """The experts of T tokens, and where their rows go. Pair p is the p % k-th choice of token p //
    k. A slot is a row's place after sorting by expert."""

    weights: Tensor  # [T, k] float32
    chosen: Tensor  # [T, k] int32
    count: int  # number of tiles, unused ones included
    pairs: Tensor | None = (
        None  # [T * k] int32, the pair in each slot; None: pair p is in slot p, and is a tile
    )
    tiles: Tensor | None = None  # [count, 3] int32: expert, first slot, rows


def route(
    scores: Tensor,
    by: Routing,
    counts: Tensor,
    rows: int,
    correction: Tensor | None = None,
    answer_scale: Tensor | None = None,
) -> Routes:
    """Chooses the experts of tokens. scores: outputs of the router [T, E]. by: the rules. counts:
    scratch [E] int32, zeros; with sorting it receives each expert's number of rows. rows: the most
    rows of a tile; 0: no sorting, each pair is a tile. correction, answer_scale: [E], see
    `Experts`."""
    (tokens, experts), device, top_k = scores.shape, scores.device, by.top_k
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    chosen, ranks = (
        torch.empty((tokens, top_k), dtype=torch.int32, device=device) for _ in range(2)
    )
    early, lanes, groups = (
        early_of(device, tokens),
        next_power_of_2(experts),
        next_power_of_2(by.groups),
    )
    in_groups = groups * next_power_of_2(experts // by.groups)
    _route[(tokens,)](
        scores,
        scores if correction is None else correction,
        scores if answer_scale is None else answer_scale,
        weights,
        chosen,
        ranks,
        counts,
        experts,
        scores.stride(0),
        by.least,
        by.added,
        by.scale,
        K=top_k,
        PLACES=next_power_of_2(top_k),
        GROUPS=by.groups,
        KEPT=by.kept_groups,
        PAIRED=by.paired,
        GROUP_LANES=groups,
        LANES=in_groups,
        SIGMOID=by.sigmoid,
        CORRECTED=correction is not None,
        SCALED=answer_scale is not None,
        RENORMALISED=by.renormalise,
        COUNTED=rows > 0,
        EARLY=early,
        num_warps=1 if in_groups <= 128 else 4,
        launch_pdl=bool(early),
    )
    in_all = tokens * top_k
    if not rows:
        return Routes(weights, chosen, in_all)
    count = most_tiles(in_all, experts, rows)
    pairs = torch.empty(in_all, dtype=torch.int32, device=device)
    tiles = torch.empty((count, 3), dtype=torch.int32, device=device)
    each = PLACED[rows]
    early = has_pdl(device) * (1 if rows == 128 else 2)
    _place[(cdiv(max(in_all, count), each),)](
        chosen,
        ranks,
        counts,
        pairs,
        tiles,
        experts,
        in_all,
        count,
        ROWS=rows,
        LANES=lanes,
        EACH=each,
        EARLY=early,
        num_warps=4,
        launch_pdl=bool(early),
    )
    return Routes(weights, chosen, count, pairs, tiles)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Returns how many tiles of at most `rows` rows may be needed for this many pairs. An expert's
    last tile may have a single row."""
    return min(pairs, (pairs + experts * (rows - 1)) // rows)
