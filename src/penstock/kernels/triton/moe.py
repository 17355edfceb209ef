"""Experts: each token through the few that it is sent to, in five launches (four where nothing has to be sorted).

    route, place    `moe_route.py`
    gate and up     rows of x by an expert's gate and up together, the gate applied before anything is stored
    down            what that made by the expert's second matrix, a row for each pair
    sum             a token's rows, by their weights

One token alone takes other kernels where its weights are plain or float8 (`moe_one.py`).

A program has a tile of rows of one expert and some of the outputs, and streams the expert's weights past the rows: few
as they are, those are the narrow side of the product. Float8 weights take rows in eight bits, a scale a row (of the
middle: one for as many neighbours as one program makes), up to 16 tokens as pairs, of which nothing is lost
(`kernels/fp8_rows.py`). What one token gives doesn't depend on the others. It knows matrices and rows; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.expert_matrix import ExpertMatrix, Experts
from penstock.kernels.fp8_rows import FP8_GROUP, Form, Fp8Rows, Rows
from penstock.kernels.triton.activation import GATES, gated
from penstock.kernels.triton.fp4_scales import in_pairs, in_words, short_scales
from penstock.kernels.triton.fp8 import BITS, pointers, quantize_rows, store_fp8
from penstock.kernels.triton.grid import cdiv, next_power_of_2, shared_of
from penstock.kernels.triton.moe_one import one_token, takes_one
from penstock.kernels.triton.moe_route import Routes, route
from penstock.kernels.triton.moe_steps import step, step_of_four, step_of_integers
from penstock.kernels.triton.pdl import early_of, has_pdl, release, wait
from penstock.kernels.triton.widen import FOUR, WIDE

UNSORTED = 4  # tokens up to which a pair is a tile of its own: experts that two of them share are read twice
MOST_PAIRED = 16  # tokens
FOUR_STAGES = 147_456  # bytes of shared memory that bf16's largest cut takes with so many


@triton.jit
def _scales_of_four(w_scale, expert, n, every, at, K, W_SCALES: tl.constexpr, BK: tl.constexpr):
    """What `step_of_four` takes of an expert's outputs n, of `every`, and its BK inputs from `at` on, [BN, BK / 2].
    Scales are loaded as words, and each thread takes them apart for the bytes that it widens: scales spread over bytes
    would go through shared memory as what is widened does (gpt-oss-20b, 1,000 tokens: 1,030 us, by words 784)."""
    if W_SCALES == 3:
        WORDS: tl.constexpr = BK // 64
        octet = tl.arange(0, BK // 2)[None, :]
        first = w_scale + ((expert.to(tl.int64) * tl.cdiv(K, 256) + at // 256) * every + n) * 4 + at % 256 // 64
        word = tl.load(first)[:, None]
        for other in tl.static_range(1, WORDS):
            word = tl.where(octet // 32 == other, tl.load(first + other)[:, None], word)
        scale = word >> (octet % 32 // 16 * 16)
        more_scale = scale >> 8
    else:
        word = tl.load(w_scale + (expert.to(tl.int64) * tl.cdiv(K, 128) + at // 128) * every + n)
        scale = word[:, None] >> ((at % 128 // 32 + tl.arange(0, BK // 2) // 16) * 8)[None, :]
        more_scale = scale
    return scale, more_scale


@triton.jit
def _tile(
    x, x_low, x_scale, w, w_scale, w_more, bias, out, out_low, out_scale, pairs, expert, first, rows, block, N, K,
    slope, most, TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, FIRST: tl.constexpr,
    GATED: tl.constexpr, SORTED: tl.constexpr, W_SCALES: tl.constexpr, X_SCALES: tl.constexpr, PAIRED: tl.constexpr,
    INTEGERS: tl.constexpr, ZEROS: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, WG: tl.constexpr, XG: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BM slots from `first` on, of which `rows` are the expert's, by BN of its outputs: `_grouped`'s arguments."""
    m, n, lane = tl.arange(0, BM), block * BN + tl.arange(0, BN), tl.arange(0, BK)
    real = m < rows
    slot = (first + m).to(tl.int64)
    pair = tl.load(pairs + slot, mask=real, other=0).to(tl.int64) if SORTED else slot
    source = pair // TOP_K if FIRST else slot
    matrix = expert.to(tl.int64) * (2 * N if GATED else N) + tl.minimum(n, N - 1)  # its row in all experts'
    FLOATS: tl.constexpr = W_SCALES >= 3
    HALVES: tl.constexpr = 2 if FLOATS or INTEGERS == FOUR else 1
    octet = tl.arange(0, BK // 2)
    if HALVES == 2:
        w_row, below = w + matrix[:, None] * (K // 2) + octet[None, :], tl.cast(N, tl.int64) * (K // 2)
        lane = octet // 16 * 32 + octet % 16
    else:
        w_row, below = w + matrix[:, None] * K + lane[None, :], tl.cast(N, tl.int64) * K
    x_row = source[:, None] * K + lane[None, :]
    sums, low = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    up, up_low = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    SCALED: tl.constexpr = (W_SCALES == 2) | (X_SCALES == 2)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        inside = (at + lane < K)[None, :]
        held = real[:, None] if EVEN_K else real[:, None] & inside
        if INTEGERS > 0:
            of_w = (expert.to(tl.int64) * tl.cdiv(K, WG) + at // WG) * (2 * N if GATED else N) + tl.minimum(n, N - 1)
            w_factor, up_factor = 1.0, 1.0
            if SCALED:
                w_factor = tl.load(w_scale + of_w)[:, None]
                if GATED:
                    up_factor = tl.load(w_scale + of_w + N)[:, None]
            sums = step_of_integers(
                sums, w_row + at // HALVES, w_more + of_w, x, x_row + at, inside, held, w_factor, SCALED, INTEGERS,
                ZEROS, EVEN_K,
            )  # fmt: skip
            if GATED:
                up = step_of_integers(
                    up, w_row + below + at // HALVES, w_more + of_w + N, x, x_row + at, inside, held, up_factor,
                    SCALED, INTEGERS, ZEROS, EVEN_K,
                )  # fmt: skip
        elif FLOATS:
            every, real_n = 2 * N if GATED else N, tl.minimum(n, N - 1)
            scale, more_scale = _scales_of_four(w_scale, expert, real_n, every, at, K, W_SCALES, BK)
            sums = step_of_four(sums, w_row + at // 2, scale, more_scale, x, x_row + at, inside, held, EVEN_K)
            if GATED:
                scale, more_scale = _scales_of_four(w_scale, expert, real_n + N, every, at, K, W_SCALES, BK)
                up = step_of_four(up, w_row + below + at // 2, scale, more_scale, x, x_row + at, inside, held, EVEN_K)
        else:
            factor = 1.0
            if X_SCALES == 2:
                factor = tl.load(x_scale + source * tl.cdiv(K, XG) + at // XG, mask=real, other=0.0)[None, :]
            w_factor, up_factor = factor, factor
            if W_SCALES == 2:
                of_w = w_scale + matrix * tl.cdiv(K, WG) + at // WG
                w_factor = factor * tl.load(of_w)[:, None]
                if GATED:
                    up_factor = factor * tl.load(of_w + N * tl.cdiv(K, WG))[:, None]
            sums, low = step(
                sums, low, w_row + at, x, x_low, x_row + at, inside, held, w_factor, SCALED, PAIRED, EVEN_K
            )
            if GATED:
                up, up_low = step(
                    up, up_low, w_row + below + at, x, x_low, x_row + at, inside, held, up_factor, SCALED, PAIRED,
                    EVEN_K,
                )  # fmt: skip
    if PAIRED and not SCALED:
        sums += low / 16.0
        up += up_low / 16.0
    if X_SCALES == 1:
        of_row = tl.load(x_scale + source, mask=real, other=0.0)[None, :]
        sums *= of_row
        up *= of_row
    if (W_SCALES == 1) | FLOATS:
        of_rows = w_more if FLOATS else w_scale
        sums *= tl.load(of_rows + matrix)[:, None]
        if GATED:
            up *= tl.load(of_rows + matrix + N)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + matrix).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + matrix + N).to(tl.float32)[:, None]
    there = (n < N)[None, :] & real[:, None]
    if FIRST:
        if CLAMPED:
            sums, up = tl.minimum(sums, most), tl.minimum(tl.maximum(up, -most), most) + 1.0
        positive = tl.maximum(sums, 0.0)
        value = tl.trans(gated(sums, slope, GATED) * up if GATED else positive * positive).to(WIDE)
        at_slot = slot[:, None] * N + n[None, :]
        if FP8 > 0:
            scale_at = slot[:, None] * tl.num_programs(0) + block
            store_fp8(
                tl.where(there, value, 0.0), out, out_low, out_scale, at_slot, there, scale_at, real[:, None], FP8
            )
        else:
            tl.store(out + at_slot, value, mask=there)
    else:
        tl.store(out + pair[:, None] * N + n[None, :], tl.trans(sums).to(WIDE), mask=there)


@triton.jit
def _grouped(
    x, x_low, x_scale, w, w_scale, w_more, bias, out, out_low, out_scale, pairs, tiles, chosen, N, K, slope, most,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr,
    SORTED: tl.constexpr, W_SCALES: tl.constexpr, X_SCALES: tl.constexpr, PAIRED: tl.constexpr,
    INTEGERS: tl.constexpr, ZEROS: tl.constexpr,
    FP8: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, FEW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WG: tl.constexpr, XG: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """FIRST: rows of x by token, out by slot, N of gate and up each (GATED: the kind of `activation.gated`; 0: of up
    alone); else rows of x by slot, out by pair.

    W_SCALES, X_SCALES: 0 none, 1 a row's, 2 one for WG (XG) neighbours of a row, of which BK is a part; 3, 4: weights
    in four-bit floats, with `in_pairs` (3) or `in_words` (4) of `fp4_scales.py` by experts, and w_more [experts,
    outputs], what a row is multiplied by.   INTEGERS: what a byte of them holds, 0: they are none; those have scales,
    and ZEROS perhaps (w_more), group by group: [experts, K / WG, outputs].   FEW: a tile that holds no more rows than
    so is multiplied as one of FEW, not of BM: the last of an expert's.
    """
    wait(EARLY)
    tile, block = tl.program_id(1), tl.program_id(0)
    if SORTED:
        expert, first, rows = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    else:
        expert, first, rows = tl.load(chosen + tile), tile, 1
    if rows > FEW:
        _tile(
            x, x_low, x_scale, w, w_scale, w_more, bias, out, out_low, out_scale, pairs, expert, first, rows, block, N,
            K, slope, most, TOP_K, HAS_BIAS, CLAMPED, FIRST, GATED, SORTED, W_SCALES, X_SCALES, PAIRED, INTEGERS, ZEROS,
            FP8, WIDE, BM, BN, BK, WG, XG, EVEN_K, STAGES,
        )  # fmt: skip
    elif FEW > 0:  # noqa: SIM102 - it alone is known when this is compiled
        if rows > 0:
            _tile(
                x, x_low, x_scale, w, w_scale, w_more, bias, out, out_low, out_scale, pairs, expert, first, rows, block,
                N, K, slope, most, TOP_K, HAS_BIAS, CLAMPED, FIRST, GATED, SORTED, W_SCALES, X_SCALES, PAIRED, INTEGERS,
                ZEROS, FP8, WIDE, FEW, BN, BK, WG, XG, EVEN_K, STAGES,
            )  # fmt: skip


@triton.jit
def _summed(made, weights, out, counts, experts, d, K: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up a token's rows by their weights, in order, and leaves the experts' counts at zero."""
    wait(EARLY)
    release(EARLY)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(made + (token * K + j) * d + column, mask=column < d, other=0.0).to(tl.float32)
        total += row * tl.load(weights + token * K + j)
    tl.store(out + token * d + column, total.to(out.dtype.element_ty), mask=column < d)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        for at in range(0, experts, BLOCK):
            lane = at + tl.arange(0, BLOCK)
            tl.store(counts + lane, tl.zeros((BLOCK,), tl.int32), mask=lane < experts)


@dataclass(slots=True, frozen=True)
class Cut:
    """How a product of experts is cut into programs."""

    rows: int  # of a program
    outputs: int  # of gate and of up each
    inputs: int  # at once
    stages: int
    warps: int
    form: Form = "wide"  # of the rows that it takes

    @property
    def few(self) -> int:
        """Rows up to which a tile is multiplied as one of so many; 0: none is."""
        return self.rows // 4 if self.rows >= 64 else 0


@dataclass(slots=True, frozen=True)
class Plan:
    """Both products of a layer for some number of tokens. sorted: a tile has as many rows as there are, else one."""

    gate_up: Cut
    down: Cut
    sorted: bool


@dataclass(slots=True, frozen=True)
class PreparedExperts:
    """Experts, and what their calls leave for each other: calls must follow one another on one stream."""

    of: Experts
    counts: Tensor  # int32 [E], zeros between calls


def prepare_experts(of: Experts) -> PreparedExperts:
    """Returns what `experts` takes. Numbers stay as they are; scales and zeros of integers become float32, and stand
    side by side, an expert's outputs of one group, those of four-bit floats become words: what is copied while others
    are multiplied is four bytes at least."""
    of = replace(of, gate_up=_side_by_side(of.gate_up), down=_side_by_side(of.down))
    counts = torch.zeros(of.shape[0], dtype=torch.int32, device=of.down.numbers.device)
    return PreparedExperts(of, counts)


def _side_by_side(matrix: ExpertMatrix) -> ExpertMatrix:
    if matrix.in_fp4:
        assert matrix.scale is not None
        whole = None if matrix.whole is None else matrix.whole.flatten()
        numbers, short, by = short_scales(matrix.numbers.flatten(0, 1), matrix.scale.flatten(0, 1), whole)
        short = short.view(matrix.scale.shape)
        words = in_words(short) if whole is None else in_pairs(short, 2 * numbers.shape[1]).view(torch.int32)
        return replace(
            matrix, numbers=numbers.view(matrix.numbers.shape), scale=words, whole=by.view(matrix.numbers.shape[:2])
        )
    if not matrix.integers:
        return matrix
    scale, zero = (None if each is None else each.float().mT.contiguous().mT for each in (matrix.scale, matrix.zero))
    return replace(matrix, scale=scale, zero=zero)


def plan_of(tokens: int, of: Experts) -> Plan:
    """Returns how so many tokens are multiplied: rows as many as an expert has on average, and some more."""
    if of.gate_up.integers:
        return _plan_of_integers(tokens, of)
    eight, by_group = of.gate_up.in_eight_bits, of.gate_up.by_group or of.down.by_group
    most = 4 if shared_of(of.gate_up.numbers.device) >= FOUR_STAGES else 3
    if tokens <= UNSORTED:
        inputs = 128 if by_group or of.gate_up.in_fp4 else 256
        return Plan(Cut(16, 32, inputs, most, 4), Cut(16, 32, inputs, most, 4), False)
    rows = _rows_of(tokens, of)
    warps = 8 if rows == 128 else 4
    if of.gate_up.in_fp4:  # few numbers at once: others' programs multiply while one widens
        return Plan(Cut(rows, 64, 64, 3, 4), Cut(rows, 64 if rows == 16 else 128, 64, 3, 4), True)
    if not eight:
        outputs = 128 if rows == 128 else 64
        inputs, stages = (64, most) if rows >= 64 else (128, 3)
        return Plan(Cut(rows, outputs, inputs, stages, warps), Cut(rows, 128, inputs, stages, warps), True)
    form: Form = "pair" if tokens <= MOST_PAIRED else "eight"
    down = Cut(rows, 64, 128, 4, 4, form) if rows == 128 else Cut(rows, 128, 128, 3, 4, form)
    return Plan(Cut(rows, 128, 128, 3, warps, form), down, True)


def _rows_of(tokens: int, of: Experts) -> int:
    each = tokens * of.top_k / of.shape[0]
    return 16 if each <= 12 else 32 if each <= 24 else 64 if each <= 96 else 128


def _plan_of_integers(tokens: int, of: Experts) -> Plan:
    """They are widened in registers, a stretch of one group at a time."""
    first, second = (min(128, each.group) if each.by_group else 128 for each in (of.gate_up, of.down))
    if tokens <= UNSORTED:
        return Plan(Cut(16, 32, first, 4, 4), Cut(16, 32, second, 4, 4), False)
    rows = _rows_of(tokens, of)
    warps = 8 if rows == 128 else 4
    return Plan(Cut(rows, 64, first, 3, warps), Cut(rows, 64, second, 3, warps), True)


def experts(x: Tensor, scores: Tensor, prepared: PreparedExperts, plan: Plan | None = None) -> Tensor:
    """x [T, d], the router's scores [T, E] -> sum of weight * expert(x), [T, d]."""
    of, (tokens, d) = prepared.of, x.shape
    out = torch.empty_like(x)
    if not tokens:
        return out
    if tokens == 1 and plan is None and takes_one(of):
        return one_token(x, route(scores, of.routing, prepared.counts, 0, of.correction, of.answer_scale), of)
    plan = plan or plan_of(tokens, of)
    rows = _in_form(x, plan.gate_up.form)
    in_tiles = plan.gate_up.rows if plan.sorted else 0
    routes = route(scores, of.routing, prepared.counts, in_tiles, of.correction, of.answer_scale)
    middle = _gate_up(rows, of, routes, plan)
    made = torch.empty((tokens * of.top_k, d), dtype=x.dtype, device=x.device)
    _launch(middle, of.down, made, None, of, routes, plan.down, plan.gate_up.outputs, plan.sorted)
    block = min(1024, next_power_of_2(d))
    grid = (tokens, cdiv(d, block))
    early = early_of(x.device, grid[0] * grid[1])
    _summed[grid](
        made, routes.weights, out, prepared.counts, of.shape[0], d, K=of.top_k, EARLY=early, BLOCK=block, num_warps=4,
        launch_pdl=bool(early),
    )  # fmt: skip
    return out


def _in_form(x: Tensor, form: Form) -> Rows:
    return x if form == "wide" else quantize_rows(x, form)


def _gate_up(rows: Rows, of: Experts, routes: Routes, plan: Plan) -> Rows:
    """The gated middle [slots, F] in the form that the second product takes; scales by the outputs of a program."""
    inner, slots = of.shape[2], routes.chosen.numel()
    form, device = plan.down.form, routes.chosen.device
    if form == "wide":
        out = torch.empty((slots, inner), dtype=of.dtype, device=device)
        _launch(rows, of.gate_up, out, None, of, routes, plan.gate_up, 0, plan.sorted)
        return out
    numbers = torch.empty((slots, inner), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((slots, cdiv(inner, plan.gate_up.outputs)), dtype=torch.float32, device=device)
    middle = Fp8Rows(numbers, scale, torch.empty_like(numbers) if form == "pair" else None)
    _launch(rows, of.gate_up, numbers, middle, of, routes, plan.gate_up, 0, plan.sorted)
    return middle


def _launch(
    rows: Rows, matrix: ExpertMatrix, out: Tensor, eight: Fp8Rows | None, of: Experts, routes: Routes, cut: Cut,
    groups: int, is_sorted: bool,
) -> None:  # fmt: skip
    """eight: `out` with its scales, where it is written in eight bits.   groups: neighbours of a row that share a scale
    in what the first product left; 0: this is the first."""
    k, first = (rows if isinstance(rows, Tensor) else rows.numbers).shape[1], not groups
    n = out.shape[1]
    x, low, scale = (rows, rows, rows) if isinstance(rows, Tensor) else pointers(rows)
    _, out_low, out_scale = (out, out, out) if eight is None else pointers(eight)
    by_row = isinstance(rows, Fp8Rows) and scale.shape[1] == 1
    slope, most = of.clamp or (1.0, 0.0)
    early, integers = has_pdl(x.device), matrix.integers
    more = matrix.whole if matrix.in_fp4 else matrix.zero
    _grouped[(cdiv(n, cut.outputs), routes.count)](
        x, low, scale, matrix.numbers.view(torch.uint8) if integers else matrix.numbers,
        scale if matrix.scale is None else matrix.scale, scale if more is None else more,
        scale if matrix.bias is None else matrix.bias, out, out_low, out_scale,
        routes.chosen if routes.pairs is None else routes.pairs,
        routes.chosen if routes.tiles is None else routes.tiles, routes.chosen, n, k, slope, most, TOP_K=of.top_k,
        HAS_BIAS=matrix.bias is not None, CLAMPED=of.clamp is not None, FIRST=first,
        GATED=GATES[of.gate] if first else 0, SORTED=is_sorted, W_SCALES=matrix.scales, INTEGERS=integers,
        ZEROS=matrix.zero is not None,
        X_SCALES=0 if isinstance(rows, Tensor) else 1 if by_row else 2,
        PAIRED=isinstance(rows, Fp8Rows) and rows.low is not None,
        FP8=0 if eight is None else BITS["eight" if eight.low is None else "pair"], WIDE=WIDE[of.dtype], BM=cut.rows,
        FEW=cut.few, BN=cut.outputs, BK=cut.inputs, WG=matrix.group if integers else FP8_GROUP,
        XG=max(groups, 1), EVEN_K=k % cut.inputs == 0, STAGES=cut.stages,
        EARLY=early, num_warps=cut.warps, launch_pdl=bool(early),
    )  # fmt: skip
