"""Mixture of experts: each token goes through its k experts. There are five launches, four with few
tokens; in eight bits one or two more, which quantize rows.

  route         the router: k experts and weights of each token (`moe_route.py`)
  place         sorts pairs (token, choice) by expert; left out with few tokens (`moe_route.py`)
  gate and up   for each pair: x times its expert's gate and up matrix, and the activation
  down          for each pair: the result times its expert's down matrix
  sum           for each token: the weighted sum of its k rows

A single token takes other kernels if its weights are unquantized or float8 (`moe_one.py`), or
four-bit floats (`moe_four.py`).

A program has a tile of rows of one expert and some of the outputs, and reads the expert's weights
once for these rows. Products are computed transposed, as there are fewer rows than outputs. Float8
weights take rows in e4m3. These have one scale per row; the input of the down product has one scale
for each row and range of outputs of a gate-and-up program, or with many rows per expert one per
row, made by a launch of its own: products without scales inside are twice as fast. With up to 16
tokens rows are pairs of e4m3, which are as precise as bfloat16 (`kernels/fp8_rows.py`). A token's
result depends on how many tokens the step has, not on what they are.

T: tokens, k: experts per token, E: experts, d: hidden size, F: inner size of an expert. Knows
matrices and rows; no layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.expert_matrix import ExpertMatrix, Experts, SharedOutput
from penstock.kernels.fixed_row import FixedRow
from penstock.kernels.fp8_rows import FP8_GROUP, Form, Fp8Rows, Rows
from penstock.kernels.triton.elementwise.activation import GATES
from penstock.kernels.triton.experts.moe_four import one_token_of_four, takes_four
from penstock.kernels.triton.experts.moe_kernels import _grouped
from penstock.kernels.triton.experts.moe_one import one_token, takes_one
from penstock.kernels.triton.experts.moe_route import Routes, route
from penstock.kernels.triton.experts.moe_sum import add_up, with_shared
from penstock.kernels.triton.grid import cdiv, shared_of
from penstock.kernels.triton.linear.fp4_scales import in_pairs, in_words, short_scales
from penstock.kernels.triton.linear.fp8 import BITS, pointers, quantize_rows
from penstock.kernels.triton.linear.widen import WIDE
from penstock.kernels.triton.pdl import has_pdl

# With up to this many tokens, each pair (token, choice) is a tile of its own. An expert that two
# pairs share is then read twice.
UNSORTED = 4
MOST_PAIRED = 16  # the most tokens whose rows are pairs of e4m3
# bytes of shared memory that a bf16 program with the largest tile and four stages needs
FOUR_STAGES = 147_456


@dataclass(slots=True, frozen=True)
class Cut:
    """The division of a product of experts into programs."""

    rows: int  # rows of a program
    outputs: int  # outputs of a program: of gate, and as many of up
    inputs: int  # inputs (elements along K) that an iteration loads
    stages: int
    warps: int
    form: Form = "wide"  # representation of the input rows

    @property
    def few(self) -> int:
        """Rows of the smaller tile that is used for an expert's last rows if they fit into it; 0:
        there is no smaller tile."""
        return self.rows // 4 if self.rows >= 64 else 0


@dataclass(slots=True, frozen=True)
class Plan:
    """The division of both products of a layer into programs, for some number of tokens. sorted:
    True: rows are sorted by expert and a tile has several of them; False: a tile has one row.
    scaled_by_row: for e4m3, True: the input of down has one scale per row; False: one scale for
    each row and range of outputs of a program of `gate_up`."""

    gate_up: Cut
    down: Cut
    sorted: bool
    scaled_by_row: bool = False


@dataclass(slots=True, frozen=True)
class PreparedExperts:
    """Prepared experts of a layer, and scratch memory for their calls. Because of the scratch
    memory, calls must run one after another on one stream."""

    of: Experts
    counts: Tensor  # int32 [E]: scratch that counts an expert's rows; zeros between calls


def prepare_experts(of: Experts) -> PreparedExperts:
    """Prepares the experts of a layer for `experts`. Weights keep their layout. Scales and zero
    points of integers become float32, stored as [E, groups, N]. Scales of four-bit floats become
    int32 words, in a layout of fp4_scales.py. Both are for asynchronous copies, which take at least
    four bytes."""
    of = replace(of, gate_up=_side_by_side(of.gate_up), down=_side_by_side(of.down))
    counts = torch.zeros(of.shape[0], dtype=torch.int32, device=of.down.numbers.device)
    return PreparedExperts(of, counts)


def _side_by_side(matrix: ExpertMatrix) -> ExpertMatrix:
    """Returns a matrix with its scales in the layout that the kernels read,
    see `prepare_experts`."""
    if matrix.in_fp4:
        assert matrix.scale is not None
        whole = None if matrix.whole is None else matrix.whole.flatten()
        numbers, short, by = short_scales(
            matrix.numbers.flatten(0, 1), matrix.scale.flatten(0, 1), whole
        )
        short = short.view(matrix.scale.shape)
        words = (
            in_words(short)
            if whole is None
            else in_pairs(short, 2 * numbers.shape[1]).view(torch.int32)
        )
        return replace(
            matrix,
            numbers=numbers.view(matrix.numbers.shape),
            scale=words,
            whole=by.view(matrix.numbers.shape[:2]),
        )
    if not matrix.integers:
        return matrix
    scale, zero = (
        None if each is None else each.float().mT.contiguous().mT
        for each in (matrix.scale, matrix.zero)
    )
    return replace(matrix, scale=scale, zero=zero)


def plan_of(tokens: int, of: Experts) -> Plan:
    """Returns the division into programs for this many tokens. Tiles have somewhat more rows than
    an expert has on average."""
    if of.gate_up.integers:
        return _plan_of_integers(tokens, of)
    eight, by_group = of.gate_up.in_eight_bits, of.gate_up.by_group or of.down.by_group
    most = 4 if shared_of(of.gate_up.numbers.device) >= FOUR_STAGES else 3
    if tokens <= UNSORTED:
        inputs = 128 if by_group or of.gate_up.in_fp4 else 256
        return Plan(Cut(16, 32, inputs, most, 4), Cut(16, 32, inputs, most, 4), False)
    rows = _rows_of(tokens, of)
    warps = 8 if rows == 128 else 4
    if of.gate_up.in_fp4:  # few weights at once, so that other programs multiply while one widens
        return Plan(Cut(rows, 64, 64, 3, 4), Cut(rows, 64 if rows == 16 else 128, 64, 3, 4), True)
    if not eight:
        outputs = 128 if rows == 128 else 64
        inputs, stages = (64, most) if rows >= 64 else (128, 3)
        return Plan(
            Cut(rows, outputs, inputs, stages, warps), Cut(rows, 128, inputs, stages, warps), True
        )
    if tokens <= MOST_PAIRED:
        cut = Cut(rows, 128, 128, 3, warps, "pair")
        return Plan(cut, cut, True)
    # a scale a group makes a second sum: 128 x 128 of both don't fit into a program's registers
    down = Cut(rows, 64 if by_group and rows == 128 else 128, 128, 3, 4, "eight")
    return Plan(Cut(rows, 64, 128, 3, 4, "eight"), down, True, scaled_by_row=True)


def _rows_of(tokens: int, of: Experts) -> int:
    """Returns the rows of a tile."""
    each = tokens * of.top_k / of.shape[0]
    return 16 if each <= 12 else 32 if each <= 24 else 64 if each <= 96 else 128


def _plan_of_integers(tokens: int, of: Experts) -> Plan:
    """Returns the division into programs for integer weights. They are widened in registers, so an
    iteration must not load more than one scale group of a row."""
    first, second = (
        min(128, each.group) if each.by_group else 128 for each in (of.gate_up, of.down)
    )
    if tokens <= UNSORTED:
        return Plan(Cut(16, 32, first, 4, 4), Cut(16, 32, second, 4, 4), False)
    rows = _rows_of(tokens, of)
    warps = 8 if rows == 128 else 4
    return Plan(Cut(rows, 64, first, 3, warps), Cut(rows, 64, second, 3, warps), True)


def experts(
    x: Tensor,
    scores: Tensor,
    prepared: PreparedExperts,
    shared: SharedOutput | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """Returns for each token the weighted sum of its experts' outputs, plus the output of a shared
    expert, [T, d]. x: [T, d]. scores: outputs of the router [T, E]. plan: None: see `plan_of`."""
    of, (tokens, d) = prepared.of, x.shape
    out = torch.empty_like(x)
    if not tokens:
        return out

    def routed(rows: int) -> Routes:
        return route(scores, of.routing, prepared.counts, rows, of.correction, of.answer_scale)

    if tokens == 1 and plan is None and takes_one(of):
        # Not added in the last product, which would wait for all of the shared expert: a layer of
        # Moonlight takes 66 us on an H200, 72 so.
        return with_shared(one_token(x, routed(0), of), shared, x)
    if tokens == 1 and plan is None and takes_four(of):
        row = quantize_rows(x, "fixed")
        assert isinstance(row, FixedRow)
        return with_shared(one_token_of_four(row, routed(0), of), shared, x)
    plan = plan or plan_of(tokens, of)
    rows = _in_form(x, plan.gate_up.form)
    routes = routed(plan.gate_up.rows if plan.sorted else 0)
    middle = _gate_up(rows, of, routes, plan)
    made = torch.empty((tokens * of.top_k, d), dtype=x.dtype, device=x.device)
    _launch(middle, of.down, made, None, of, routes, plan.down, plan.gate_up.outputs, plan.sorted)
    add_up(made, routes.weights, out, prepared.counts, of, x, shared)
    return out


def _in_form(x: Tensor, form: Form) -> Rows:
    """Returns x [T, d] in the representation `form`."""
    return x if form == "wide" else quantize_rows(x, form)


def _gate_up(rows: Rows, of: Experts, routes: Routes, plan: Plan) -> Rows:
    """Returns act(gate) * up for each slot (a pair, in the order of `Routes`), [T * k, F], in the
    representation that the down product needs. In e4m3 there is a scale a row with
    `scaled_by_row`, else one for the outputs of a program."""
    inner, slots = of.shape[2], routes.chosen.numel()
    form, device = plan.down.form, routes.chosen.device
    if form == "wide" or plan.scaled_by_row:
        out = torch.empty((slots, inner), dtype=of.dtype, device=device)
        _launch(rows, of.gate_up, out, None, of, routes, plan.gate_up, 0, plan.sorted)
        return _in_form(out, form)
    numbers = torch.empty((slots, inner), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(
        (slots, cdiv(inner, plan.gate_up.outputs)), dtype=torch.float32, device=device
    )
    middle = Fp8Rows(numbers, scale, torch.empty_like(numbers) if form == "pair" else None)
    _launch(rows, of.gate_up, numbers, middle, of, routes, plan.gate_up, 0, plan.sorted)
    return middle


def _launch(
    rows: Rows,
    matrix: ExpertMatrix,
    out: Tensor,
    eight: Fp8Rows | None,
    of: Experts,
    routes: Routes,
    cut: Cut,
    groups: int,
    is_sorted: bool,
) -> None:
    """Launches one of the two products of experts. out: the output's tensor. eight: the output as
    Fp8Rows if it is in e4m3, else None. groups: for the down product, inputs that share a scale of
    an input row; 0: this is the product with gate and up. is_sorted: `Plan.sorted`."""
    k, first = (rows if isinstance(rows, Tensor) else rows.numbers).shape[1], not groups
    n = out.shape[1]
    x, low, scale = (rows, rows, rows) if isinstance(rows, Tensor) else pointers(rows)
    _, out_low, out_scale = (out, out, out) if eight is None else pointers(eight)
    by_row = isinstance(rows, Fp8Rows) and scale.shape[1] == 1
    slope, most = of.clamp or (1.0, 0.0)
    early, integers = has_pdl(x.device), matrix.integers
    more = matrix.whole if matrix.in_fp4 else matrix.zero
    _grouped[(cdiv(n, cut.outputs), routes.count)](
        x,
        low,
        scale,
        matrix.numbers.view(torch.uint8) if integers else matrix.numbers,
        scale if matrix.scale is None else matrix.scale,
        scale if more is None else more,
        scale if matrix.bias is None else matrix.bias,
        out,
        out_low,
        out_scale,
        routes.chosen if routes.pairs is None else routes.pairs,
        routes.chosen if routes.tiles is None else routes.tiles,
        routes.chosen,
        n,
        k,
        slope,
        most,
        TOP_K=of.top_k,
        HAS_BIAS=matrix.bias is not None,
        CLAMPED=of.clamp is not None,
        FIRST=first,
        GATED=GATES[of.gate] if first else 0,
        SORTED=is_sorted,
        W_SCALES=matrix.scales,
        INTEGERS=integers,
        ZEROS=matrix.zero is not None,
        X_SCALES=0 if isinstance(rows, Tensor) else 1 if by_row else 2,
        PAIRED=isinstance(rows, Fp8Rows) and rows.low is not None,
        FP8=0 if eight is None else BITS["eight" if eight.low is None else "pair"],
        WIDE=WIDE[of.dtype],
        BM=cut.rows,
        FEW=cut.few,
        BN=cut.outputs,
        BK=cut.inputs,
        WG=matrix.group if integers else FP8_GROUP,
        XG=max(groups, 1),
        EVEN_K=k % cut.inputs == 0,
        STAGES=cut.stages,
        EARLY=early,
        num_warps=cut.warps,
        launch_pdl=bool(early),
    )
