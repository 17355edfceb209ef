"""What the kernels of experts are held to, on any device: routes against a sort, answers against
fp64 of the very numbers that they are given. Import the kernels' environment first; functions
assert.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from triton_kernel_cases import drawn
from triton_kernel_cases_fp4 import stored

from penstock.kernels.expert_matrix import ExpertMatrix, Experts, Gate, SharedOutput
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.reference.experts import moe as plain
from penstock.kernels.routing import Routing
from penstock.kernels.triton.elementwise.activation import add_opened
from penstock.kernels.triton.experts import moe, moe_route
from penstock.quant.fp8 import to_fp8

KINDS = (
    "plain",
    "channel",
    "blocks",
    "four",
    "nvfp4",
    "int4",
    "int4 zeros",
    "int8",
    "int8 row zeros",
)


def check_routes(
    device: str, tokens: int, count: int, by: Routing, rows: int, corrected: bool = False
) -> None:
    """Weights and choices are the reference's; a pair has a slot, slots of an expert lie together,
    tiles hold all."""
    # so short that many are equal
    scores = drawn(tokens, count, seed=tokens, by=3.0, dtype=torch.bfloat16)
    top_k = by.top_k
    correction = drawn(1, count, seed=5)[0] if corrected else None
    weights, chosen = plain.route(scores, by, correction)
    counts = torch.zeros(count, dtype=torch.int32, device=device)
    there = None if correction is None else correction.to(device)
    got = moe_route.route(scores.to(device), by, counts, rows, there)
    assert torch.equal(got.chosen.cpu().long(), chosen)
    torch.testing.assert_close(got.weights.cpu(), weights, rtol=1e-5, atol=1e-7)
    if not rows:
        assert got.pairs is None and got.count == tokens * top_k and not counts.any()
        return
    assert got.pairs is not None and got.tiles is not None
    pairs, flat = got.pairs.cpu().long(), chosen.flatten()
    assert torch.equal(pairs.sort().values, torch.arange(tokens * top_k))
    assert torch.equal(flat[pairs], flat.sort().values)
    assert torch.equal(counts.cpu().long(), flat.bincount(minlength=count))
    held = [pairs[first : first + n] for _, first, n in got.tiles.tolist()]
    for mine, (expert, _, n) in zip(held, got.tiles.tolist(), strict=True):
        assert n <= rows and (flat[mine] == expert).all()
    assert torch.equal(torch.cat(held), pairs)


def made_experts(
    device: str,
    dtype: torch.dtype,
    kind: str,
    count: int,
    d: int,
    inner: int,
    top_k: int,
    renormalise: bool = True,
    correction: Tensor | None = None,
    gate: Gate = "silu",
    answer_scale: Tensor | None = None,
) -> tuple[Experts, Tensor, Tensor]:
    """Experts, and what both stacks are worth in fp64."""
    shapes = [((1 if gate == "none" else 2) * inner, d), (d, inner)]
    pairs = [_matrix(device, dtype, kind, count, n, k, seed) for seed, (n, k) in enumerate(shapes)]
    (gate_up, first), (down, second) = pairs
    clamp = (1.702, 1.5) if kind == "four" and gate == "silu" else None  # so low that some are cut
    routing = Routing(top_k=top_k, renormalise=renormalise)
    if correction is not None:
        routing = replace(routing, sigmoid=True, scale=2.5)
    return (
        Experts(gate_up, down, routing, dtype, clamp, correction, gate, answer_scale),
        first,
        second,
    )


def _matrix(
    device: str, dtype: torch.dtype, kind: str, count: int, n: int, k: int, seed: int
) -> tuple[ExpertMatrix, Tensor]:
    wide = drawn(count * n, k, seed=seed, by=k**-0.5)
    if kind == "plain":
        numbers = wide.to(dtype).view(count, n, k)
        return ExpertMatrix(numbers.to(device)), numbers.double()
    if kind == "channel":
        eight, scale = to_fp8(wide)
        worth = eight.double() * scale.double()
        return ExpertMatrix(
            eight.view(count, n, k).to(device), scale.view(count, n).to(device)
        ), worth.view(count, n, k)
    if kind == "four":
        rng = torch.Generator().manual_seed(seed)
        octets = torch.randint(0, 256, (count, n, k // 2), generator=rng, dtype=torch.int16).to(
            torch.uint8
        )
        scale = torch.randint(119, 124, (count, n, k // 32), generator=rng, dtype=torch.int16).to(
            torch.uint8
        )
        bias = drawn(count, n, seed=seed + 3, dtype=dtype)
        worth = torch.stack([_from_four(octets[e], scale[e]) for e in range(count)])
        return ExpertMatrix(octets.to(device), scale.to(device), bias.to(device)), worth
    if kind == "nvfp4":
        numbers, scale, whole, worth = stored(count * n, k, kind, seed)
        assert whole is not None
        by = torch.full((count * n,), 0.5, dtype=torch.float64)
        by[0] = 0.002  # no row so much larger than the others that the gate's own rounding is seen
        whole *= by
        of = ExpertMatrix(
            numbers.view(count, n, -1).to(device),
            scale.view(count, n, -1).to(device),
            whole=whole.view(count, n).to(device),
        )
        return of, (worth * by[:, None]).view(count, n, k)
    if kind.startswith("int"):
        return _integers(device, dtype, kind, count, n, k, seed)
    groups = -(-k // 128)
    scale = drawn(count * n, groups, seed=seed + 9).abs() / 300 + 1e-4
    spread = scale.repeat_interleave(128, 1)[:, :k]
    eight = (wide / spread).clamp(-448, 448).to(E4M3)
    matrix = ExpertMatrix(
        eight.view(count, n, k).to(device), scale.view(count, n, groups).to(device)
    )
    return matrix, (eight.double() * spread.double()).view(count, n, k)


def _integers(
    device: str, dtype: torch.dtype, kind: str, count: int, n: int, k: int, seed: int
) -> tuple[ExpertMatrix, Tensor]:
    """In groups of the largest of 128, 64 and 32 that divides a row, or a row a group."""
    bits, groups = int(kind[3]), 1 if "row" in kind else k // (k & -k if k & -k < 128 else 128)
    rng, least = torch.Generator().manual_seed(seed), 0 if kind[3] == "4" else -128
    numbers = torch.randint(least, least + 2**bits, (count, n, k), generator=rng)
    zero = torch.randint(least, least + 2**bits, (count, n, groups), generator=rng).to(dtype)
    scale = (
        (drawn(count * n, groups, seed=seed + 9).abs() / 2**bits + 2.0**-bits)
        .mul(k**-0.5)
        .to(dtype)
    )
    scale, nothing = scale.view(count, n, groups), 8 if bits == 4 else 0
    less = zero if "zeros" in kind else torch.full_like(zero, nothing)
    worth = (numbers.unflatten(2, (groups, -1)) - less.double()[..., None]) * scale.double()[
        ..., None
    ]
    stored = numbers.to(torch.int8)
    if bits == 4:
        halves = numbers.to(torch.uint8).view(count, n, k // 32, 2, 16)
        stored = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).flatten(2)
    beside = {"zero": zero.to(device)} if "zeros" in kind else {}
    return ExpertMatrix(stored.to(device), scale.to(device), **beside), worth.flatten(2)


def _from_four(octets: Tensor, scale: Tensor) -> Tensor:
    """A number at a time, in fp64: of 32 neighbours the first 16 are the lower halves of
    16 bytes."""
    worth = torch.zeros(octets.shape[0], octets.shape[1] * 2, dtype=torch.float64)
    for at in range(worth.shape[1]):
        group, inside = divmod(at, 32)
        code = octets[:, group * 16 + inside % 16].long() >> (4 if inside >= 16 else 0) & 15
        sign, exponent, fraction = code >> 3, code >> 1 & 3, code & 1
        size = torch.where(
            exponent == 0, fraction * 0.5, (1 + fraction * 0.5) * 2.0 ** (exponent - 1).double()
        )
        worth[:, at] = size * (1 - 2 * sign) * 2.0 ** (scale[:, group].double() - 127)
    return worth


def naive(
    x: Tensor, scores: Tensor, of: Experts, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """The answer in fp64, and the size of what was added up to it."""
    weights, chosen = plain.route(
        scores, of.routing, None if of.correction is None else of.correction.cpu()
    )
    if of.answer_scale is not None:
        weights = weights * of.answer_scale.cpu()[chosen]
    out, size = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        weight = weights[token, place].double()[:, None]
        made = x[token].double() @ gate_up[expert].mT + _bias(of.gate_up, expert)
        gate, up = made.chunk(2, 1)
        if of.gate == "none":
            middle = made.clamp(min=0).square()
        elif of.gate == "gelu_tanh":
            middle = (
                gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2 * up
            )
        elif of.clamp is None:
            middle = gate / (1 + torch.exp(-gate)) * up
        else:
            slope, most = of.clamp
            gate, up = gate.clamp(max=most), up.clamp(-most, most)
            middle = gate / (1 + torch.exp(-slope * gate)) * (up + 1)
        out[token] += weight * (middle @ down[expert].mT + _bias(of.down, expert))
        size[token] += weight * (middle.abs() @ down[expert].mT.abs())
    return out, size


def _bias(matrix: ExpertMatrix, expert: int) -> Tensor | float:
    return 0.0 if matrix.bias is None else matrix.bias[expert].double().cpu()


def check_experts(
    device: str,
    dtype: torch.dtype,
    kind: str,
    tokens: int,
    count: int,
    d: int,
    inner: int,
    top_k: int,
    plan: moe.Plan | None = None,
    scores: Tensor | None = None,
    corrected: bool = False,
    gate: Gate = "silu",
    scaled: bool = False,
) -> None:
    """The kernels' answer, and plain torch's, against fp64."""
    correction = drawn(1, count, seed=5)[0].to(device) if corrected else None
    scale = drawn(1, count, seed=6)[0].abs().to(device) if scaled else None
    of, gate_up, down = made_experts(
        device,
        dtype,
        kind,
        count,
        d,
        inner,
        top_k,
        correction=correction,
        gate=gate,
        answer_scale=scale,
    )
    x = drawn(tokens, d, seed=7, dtype=dtype)
    scores = drawn(tokens, count, seed=8, by=2.0, dtype=dtype) if scores is None else scores
    wanted, size = naive(x, scores, of, gate_up, down)
    prepared = moe.prepare_experts(of)
    used = plan or moe.plan_of(tokens, of)
    for _ in range(2):  # counts are at zero again
        got = moe.experts(x.to(device), scores.to(device), prepared, plan=plan)
        steps = {"wide": 0.0, "pair": 2.0**-7, "eight": 2.0**-3}
        lost = max(steps[used.gate_up.form], steps[used.down.form], 8 * torch.finfo(dtype).eps)
        if tokens == 1 and plan is None and of.gate_up.in_fp4:
            lost = max(lost, 2.0 ** (-11 if gate == "none" else -13))  # rows in fixed point
        assert got.dtype == dtype and not prepared.counts.any()
        assert ((got.double().cpu() - wanted).abs() <= size * lost + 1e-5).all()
    there = plain.experts(x.to(device), scores.to(device), plain.prepare_experts(of))
    assert (
        (there.double().cpu() - wanted).abs() <= size * 16 * torch.finfo(dtype).eps + 1e-5
    ).all()


def check_alone(device: str, dtype: torch.dtype, kind: str, tokens: int) -> None:
    """What a token gives doesn't depend on the others, where both have one plan."""
    of, _, _ = made_experts(device, dtype, kind, 6, 128, 64, 2)
    prepared, x, scores = (
        moe.prepare_experts(of),
        drawn(tokens, 128, seed=1, dtype=dtype),
        drawn(tokens, 6, seed=2),
    )
    plan = moe.plan_of(tokens, of)
    x, scores = x.to(device), scores.to(device)
    whole = moe.experts(x, scores, prepared, plan=plan)
    for some in (slice(0, 1), slice(tokens // 3, tokens - 1)):
        assert torch.equal(
            moe.experts(x[some].contiguous(), scores[some].contiguous(), prepared, plan=plan),
            whole[some],
        )


def check_shared(device: str, dtype: torch.dtype, kind: str, tokens: int, gated: bool) -> None:
    """A shared expert's output is added as a launch of its own adds it, bit by bit."""
    d = 288
    of, _, _ = made_experts(device, dtype, kind, 5, d, 64, 2)
    prepared = moe.prepare_experts(of)
    x, made, gate = (
        drawn(rows, d, seed=seed, dtype=dtype).to(device)
        for rows, seed in ((tokens, 1), (tokens, 2), (1, 3))
    )
    scores = drawn(tokens, 5, seed=4, dtype=dtype).to(device)
    shared = SharedOutput(lambda: made, gate if gated else None, 1.5)
    whole = moe.experts(x, scores, prepared, shared)
    alone = moe.experts(x, scores, prepared)
    assert torch.equal(whole, add_opened(alone, made, x, shared.gate, 1.5))


def crowded(tokens: int, count: int, top_k: int) -> Tensor:
    """Scores that send every token to the same experts: all others have none."""
    scores = torch.full((tokens, count), -4.0)
    scores[:, :top_k] = torch.linspace(3, 2, top_k)
    return scores


def small_plan(plan: moe.Plan, rows: int) -> moe.Plan:
    """The same with tiles of so many rows, so that an expert has several."""
    return replace(
        plan, gate_up=replace(plan.gate_up, rows=rows), down=replace(plan.down, rows=rows)
    )
