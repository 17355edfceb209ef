"""Ops: the operations of a forward pass, as callables. Layers and the runner use them.

This file defines their contract: shapes, dtypes, and which inputs may be overwritten. `choose`
fills in the functions of a column (a package of implementations: `reference` or `triton`). T is the
number of a step's tokens (decode queries first, then chunks), d the hidden size, H the query heads,
Hkv the KV heads, D numbers of a head. A row of the batch is one sequence. `form` is the
representation of rows for the next product (`kernels/fp8_rows.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.binaries import Binaries
from penstock.kernels.delta_rule import DeltaHeads, DeltaWeights
from penstock.kernels.expert_matrix import Experts
from penstock.kernels.fixed_row import FixedRow
from penstock.kernels.fp8_rows import Form, Fp8Rows, Rows
from penstock.kernels.inputs import AttentionKind, SamplerInputs, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.state_forms import LatentKv


class RotaryAndStore(Protocol):
    """Norms (if weights are given) and rotates q and k of a fused product, and stores k and v in
    the KV cache at `inputs.slots`. Returns q [T, H, D].

    qkv: [T, (H + 2 Hkv) * D], or with `kind.keys_as_values` [T, (H + Hkv) * D]; there may be gaps
    between its rows. It may be overwritten, and the returned q may be a view of it. cos_sin:
    [max_pos, 2, D / 2] float32; number n of a head rotates together with number n + D / 2 (Hugging
    Face's "rotate half"). plan: from `Ops.plan`. kv None: the layer reads another layer's K and V;
    then qkv is q alone [T, H * D], and nothing is stored. K and V in eight bits are made from the
    rounded numbers that a plain layout would store."""

    def __call__(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        inputs: StepInputs,
        kv: LayerKv | None,
        kind: AttentionKind,
        plan: Any,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor: ...


class Attention(Protocol):
    """Computes attention of decode queries and of chunks over one layer's paged cache. A decode
    query whose row is in a prefix group continues from the group's result (`GroupInputs`).

    q: [T, H, D]; returns [T, H, D]. K and V in eight bits are converted to q's dtype; K's scale is
    applied to scores and V's to the output, both in float32. With a window a query at position p
    sees the keys p - window + 1 .. p, and prefix groups are not used (`StepInputs.decode_for`).
    plan: from `Ops.plan`. sinks: [H] float32, a score per head that takes part in the softmax
    without a value (arXiv:2309.17453; gpt-oss)."""

    def __call__(
        self,
        q: Tensor,
        kv: LayerKv,
        inputs: StepInputs,
        kind: AttentionKind,
        plan: Any,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class LatentStore(Protocol):
    """Norms and stores the latents of multi-head latent attention (arXiv:2405.04434), and rotates
    queries. rank, turning, still: see LatentSizes.

    given: [T, rank + turning]: each token's latent before its norm, and the key that all heads
    share before its rotation. q: [T, H, still + turning], whose last `turning` numbers are rotated
    in place. norm: weight of the norm, [rank]. cos_sin: [max_pos, 2, turning / 2] float32; number n
    rotates together with number n + turning / 2. plan: from `Ops.plan`. At `inputs.slots` it stores
    the normed latent, in eight bits if `kv` has a scale, and the rotated key. up: see
    `AttentionOverLatents`. Returns queries for latents [T, H, rank], q multiplied by the keys' part
    of `up`, if it makes them in the same launch; else None, and attention makes them."""

    def __call__(
        self,
        given: Tensor,
        q: Tensor,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        inputs: StepInputs,
        kv: LatentKv,
        plan: Any,
        up: Tensor | None = None,
    ) -> Tensor | None: ...


class AttentionOverLatents(Protocol):
    """Computes attention of decode queries and of chunks over one layer's latents. A decode query
    whose row is in a prefix group continues from the group's result (`GroupInputs`). rank, turning,
    still, value: see LatentSizes (kind.latent).

    q: [T, H, still + turning], rotated. up: [H, still + value, rank]: multiplied by a latent it
    gives a head's key (its part that doesn't rotate) and value. Returns [T, H, value]. There are
    two ways to compute it, which differ only in rounding. Decode rows use the absorbed form:
    queries are multiplied by the keys' part of `up` and then by the latents; the values' part of
    `up` is applied to the weighted sum of latents. Chunks with many tokens that see few other
    tokens (`LatentSizes.expands`) use the expanded form: keys and values are made from the latents.
    asked: what `latent_store` returned for these queries."""

    def __call__(
        self,
        q: Tensor,
        up: Tensor,
        kv: LatentKv,
        inputs: StepInputs,
        kind: AttentionKind,
        plan: Any,
        asked: Tensor | None = None,
    ) -> Tensor: ...


class GatedConvolution(Protocol):
    """Computes a gated causal convolution per channel over a sequence's last `taps` inputs, and
    stores the newest inputs (LFM2). c: channels.

    given: [T, 3c]: gate of the values, gate of the output, the values. weight: [c, taps], the
    newest token's last. bias: [c] or None. window: [slots, width, c], the last inputs of each
    slot's sequence, that of position p at index p % width. width: `taps`, and twice the most drafts
    of a row more. `inputs.states` has the slot of each query and chunk, and tells which tokens
    update it. Returns [T, c]: output gate * convolution of (value gate * value). The product in
    brackets and the convolution are rounded to the model's dtype."""

    def __call__(
        self, given: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
    ) -> Tensor: ...


class DeltaRule(Protocol):
    """Computes a gated delta rule layer, except for its projections (formulas in
    `kernels/delta_rule.py`).

    given: [T, channels + value_size]: q, k and v before the convolution, and z; there may be gaps
    between rows. rates: [T, 2 * value_heads]: the formulas' `given` for the rates b, then for the
    decays a. window: [slots, width, channels], as for a gated convolution; if rows may have drafts
    [slots, width, channels + 2 * value_heads], with each token's `rates` too. matrix: [slots,
    value_heads, key_width, value_width] of any float dtype, updated in float32. Returns [T,
    value_size]. q, k and v are rounded after silu, the output before and after its norm."""

    def __call__(
        self,
        given: Tensor,
        rates: Tensor,
        heads: DeltaHeads,
        weights: DeltaWeights,
        window: Tensor,
        matrix: Tensor,
        inputs: StepInputs,
    ) -> Tensor: ...


class Mamba2Scan(Protocol):
    """Computes a Mamba2 layer between its first projection and its gate (formulas in
    `kernels/mamba2.py`).

    given: [T, columns]: z, the convolution's input, dt. window: [slots, width, channels], as for a
    gated convolution; if rows may have drafts [slots, width, channels + heads], with each token's
    dt too. matrix: [slots, heads, state_width, head_width] of any float dtype, updated in float32.
    Returns [T, size]. x, B and C are rounded after silu, and so is the output."""

    def __call__(
        self,
        given: Tensor,
        heads: Mamba2Heads,
        weights: Mamba2Weights,
        window: Tensor,
        matrix: Tensor,
        inputs: StepInputs,
    ) -> Tensor: ...


class TokenLogprobs(Protocol):
    """Returns for each of m rows the log-probability of its token [m] and the token's rank [m], and
    ids and log-probabilities of the k most likely tokens [m, k]. logits: [m, vocabulary], raw.
    tokens: [m]."""

    def __call__(
        self, logits: Tensor, tokens: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


@dataclass(slots=True, frozen=True)
class OneRowOps:
    """Fused operations for a step of one row, with fewer launches. They take prepared weights and
    compute the same as the separate operations of Ops, up to the dtype's rounding. residual None: x
    is the start of the residual stream, and nothing is added to it."""

    # (x, residual [1, d], norm's weight, eps, qkv's weight, bias, cos_sin, inputs, kv, H, Hkv, D)
    # -> (rotated q [1, H, D], next residual); stores k and v. Weight and KV are unquantized.
    norm_qkv: Callable[..., tuple[Tensor, Tensor]]
    # (output of the qkv product [1, (H + 2 Hkv) * D], cos_sin, kv, inputs, kind, sinks [H] or None,
    # form) -> attention's output. If it can't be written in `form`, it is wide.
    rotate_and_attend: Callable[..., Rows]  # [1, H * D]; stores k and v
    # (x, residual [1, d], norm's weight, eps, gate_up's weight, form as above)
    norm_gate: Callable[..., tuple[Rows, Tensor]]  # -> (silu(gate) * up [1, F], next residual)


@dataclass(slots=True, frozen=True)
class Ops:
    """One callable per operation. Comments give arguments -> result. why: operation -> (column,
    reason), for stats and `penstock doctor`."""

    dtype: torch.dtype  # dtype of the model's rows
    # weight [out, in] -> the second argument of `linear`; called once, at load
    prepare_linear: Callable[[Tensor], Any]
    # x [T, in], prepared weight, bias [out] | None -> [T, out]
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    # x [T, in], prepared weight [2F, in] (the gate's rows first), "silu" or "gelu_tanh" ->
    # act(gate) * up [T, F], rounded once; None: `linear` followed by silu_mul or gelu_mul is as
    # fast
    linear_gated: Callable[[Tensor, Any, str], Tensor | None]
    # weight [out, in] e4m3, one scale per row [out], the model's dtype -> the second argument of
    # `linear_fp8`. It has `form` (function: number of rows of x -> the representation in which the
    # product needs them) and `streamed` (argument of the fused one-row operations).
    prepare_linear_fp8: Callable[[Tensor, Tensor, torch.dtype], Any]
    linear_fp8: Callable[[Rows, Any, Tensor | None], Tensor]  # like linear; x may be quantized
    # weight [out, in] e4m3, scale [out, ceil(in / 128)] float32: one for each 128 neighbours of a
    # row (the last group may be short), the model's dtype -> the second argument of
    # `linear_fp8_groups`
    prepare_linear_fp8_groups: Callable[[Tensor, Tensor, torch.dtype], Any]
    linear_fp8_groups: Callable[[Tensor, Any, Tensor | None], Tensor]  # like linear
    # numbers, scales and zero points (or None) in the layout of kernels/int_matrix.py, the model's
    # dtype -> the second argument of `linear_int`, an object with `form` and `streamed`, see above
    prepare_linear_int: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Any]
    linear_int: Callable[[Rows, Any, Tensor | None], Tensor]  # like linear; x as `form` says
    # numbers, scales and factors of rows' scales (or None) in the layout of kernels/fp4_matrix.py,
    # the model's dtype -> the second argument of `linear_fp4`, an object with `form` and
    # `streamed`, see above
    prepare_linear_fp4: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Any]
    linear_fp4: Callable[[Rows, Any, Tensor | None], Tensor]  # like linear; x as `form` says
    quantize_rows: Callable[[Tensor, Form], Fp8Rows | FixedRow]  # x [T, K], form
    # x [T, d], weight [d], eps, form -> [T, d]. A float32 weight is applied before rounding to x's
    # dtype.
    rms_norm: Callable[[Tensor, Tensor, float, Form], Rows]
    # x, residual (may be overwritten), weight, eps, form, weight of a norm of x before the sum
    # (None: no norm) -> (norm of the sum, the sum: the next residual)
    add_rms_norm: Callable[
        [Tensor, Tensor, Tensor, float, Form, Tensor | None], tuple[Rows, Tensor]
    ]
    # x, residual (may be overwritten), weight of a norm of x before the sum, weights of the sum's
    # norms, eps -> (the norms, wide; the sum: the next residual)
    add_rms_norms: Callable[
        [Tensor, Tensor, Tensor, tuple[Tensor, ...], float], tuple[list[Tensor], Tensor]
    ]
    # stream [T, d] (may be overwritten), one or two parts (x [T, d], weight of its norm), weight of
    # a norm of the sum of two normed parts, eps, scale [1] or None -> (stream + made) * scale; made:
    # the sum's norm, or the one normed part
    add_normed: Callable[
        [Tensor, tuple[tuple[Tensor, Tensor], ...], Tensor | None, float, Tensor | None], Tensor
    ]
    # inputs, kind, cos_sin, dtype of queries -> what all layers of an AttentionKind share in a step
    plan: Callable[[StepInputs, AttentionKind, Tensor, torch.dtype], Any]
    rotary_and_store: RotaryAndStore
    # gate_up [T, 2F] (gate first; may be overwritten), form -> [T, F]
    silu_mul: Callable[[Tensor, Form], Rows]
    gelu_mul: Callable[[Tensor, Form], Rows]  # the same with the tanh approximation of GELU
    # x [T, F], gate [T, F], rows may have gaps, form -> x * sigmoid(gate), rounded once
    sigmoid_mul: Callable[[Tensor, Tensor, Form], Rows]
    relu2: Callable[[Tensor, Form], Rows]  # x [T, F], form -> max(x, 0) squared, rounded once
    # experts of a layer -> the third argument of `experts`; called once, at load
    prepare_experts: Callable[[Experts], Any]
    # Two functions, without sums over ranks -> what they return; their launches may run side by
    # side. The first is called with a function that waits for the second, and returns what it
    # returned.
    concurrent: Callable[
        [Callable[[Callable[[], Tensor]], Tensor], Callable[[], Tensor]], tuple[Tensor, Tensor]
    ]
    # x [T, d], scores of the router [T, E], prepared experts, SharedOutput or None -> [T, d]: the
    # outputs of each token's k experts (the lower number among equal scores), weighted and summed in
    # float32; rounded, then plus the shared expert's output
    experts: Callable[..., Tensor]
    attention: Attention
    latent_store: LatentStore
    latent_attention: AttentionOverLatents
    short_conv: GatedConvolution
    delta_rule: DeltaRule
    mamba2: Mamba2Scan
    # x [T, F], gate [T, F], rows may have gaps, weight [F], groups, eps, form -> x * silu(gate),
    # normed in groups of F / groups neighbours and rounded, times weight; weight None: x *
    # silu(gate)
    gated_norm: Callable[[Tensor, Tensor, Tensor | None, int, float, Form], Rows]
    # out [T, d], made [T, d], x [T, d], gate [1, d] or None, scale -> out + scale * made *
    # sigmoid(x . gate), written to out
    add_opened: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
    # logits (may be overwritten), cap -> cap * tanh(logits / cap)
    softcap: Callable[[Tensor, float], Tensor]
    # ids [T], table [rows, d], token id of its first row (None: the table has all tokens) -> [T,
    # d]; 0 for tokens outside the table
    embed: Callable[..., Tensor]
    # storage of each layer's KV, source blocks [c], target blocks [c]
    copy_blocks: Callable[[list[Tensor], Tensor, Tensor], None]
    # logits [n, vocabulary] -> tokens [n] int32; reference/sampling/sample.py
    sample: Callable[[Tensor, SamplerInputs], Tensor]
    token_logprobs: TokenLogprobs
    # The next three change some rows of float32 logits in place: reference/sampling/penalties.py.
    apply_bias: Callable[[Tensor, Tensor, Tensor, Tensor], None]  # logits; rows, ids, values [m]
    # logits, rows [m], ids [m, j], active [m]
    bar_ids: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    apply_penalties: Callable[..., None]
    one_row: OneRowOps | None = None
    binaries: Binaries | None = None  # None: no kernel has to be compiled
    why: dict[str, tuple[str, str]] = field(default_factory=dict)  # operation -> (column, reason)


@dataclass(slots=True, frozen=True)
class RowOps:
    """Operations on the per-row arrays on the device (`kernels.row_state.RowState`), which they
    index by row id. So a step needs little data from the host. Comments give arguments -> result.
    rows: the RowState."""

    join: Callable[..., None]  # packed [k, words] (row_state.pack_joins), rows: starts k rows
    grow: Callable[..., None]  # new blocks [m, 3], rows: adds blocks to rows' block tables
    # row_ids, queries, rows: replaces drafts equal to FROM_DEVICE with tokens of rows.drafts
    take_drafts: Callable[..., None]
    # row_ids, queries, rows, slot_token, dump block, and the outputs token_ids, positions, slots
    prepare: Callable[..., None]
    # row_ids, queries, sampled tokens, rows, buffer -> tokens for the host
    advance: Callable[..., Tensor]
    # row_ids, rows, slot_token, most and fewest tokens to match: writes rows.drafts
    draft_ngrams: Callable[..., None]
    # number of rows, vocabulary, device -> scratch memory of adjust, sample_rows and logprobs_rows
    sample_scratch: Callable[..., Any]
    # logits, row_ids, position, rows, slot_token, bias_ids, bias_values, masks, scratch, part
    # (VocabularyPart or None)
    adjust: Callable[..., None]
    # logits, row_ids, position, rows, scratch, tokens, filters=, adjusts=, part= -> tokens
    sample_rows: Callable[..., Tensor]
    logprobs_rows: Callable[..., None]  # logits, row_ids, rows, tokens, most, scratch, out
    # storage of each layer's KV -> an object with copy(source blocks [c], target blocks [c])
    block_copier: Callable[[list[Tensor]], Any]
    # True: kernels are compiled, and steps may be captured as graphs, so sizes are padded to a few
    compiled: bool
