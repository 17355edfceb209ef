"""Ops: the operations of a forward, as callables that layers and the runner are handed, and why
each is what it is.

It draws the contract (shapes, dtypes, who may overwrite what) and computes nothing; `choose` fills
it from the columns. T is the step's tokens (decode rows first, then chunks), d the hidden size, H
query heads, Hkv KV heads, D their width.
"""

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
    """Norms (where weights are given) and rotates q and k of a fused product, and stores k and v at
    `inputs.slots`.

    qkv `[T, (H + 2 Hkv) * D]` (`kind.keys_as_values`: `[T, (H + Hkv) * D]`), whose rows may stand
    apart, may be overwritten, and q may be a view of it. cos_sin is `[max_pos, 2, D / 2]` float32;
    the two halves of a head turn together (HF's "rotate half"). plan: what `plan` gave. kv None:
    qkv is q alone `[T, H * D]`, of a layer that reads another's K and V, and nothing is stored.
    Returns q `[T, H, D]`. What is stored in eight bits is made of what would be stored plain,
    rounding and all.
    """

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
    """Decode rows (their prefix group first, where they have one), then chunks, over the paged
    cache of one layer.

    q `[T, H, D]`; returns `[T, H, D]`. Stored numbers in eight bits are widened to q's dtype, K's
    scale goes to the scores and V's to the answer, both in float32. With a window a query at
    position p sees the keys p - window + 1 .. p, and its rows are taken alone
    (`StepInputs.decode_for`). plan: what `plan` gave. sinks [H] float32: a score of each head that
    takes part in the softmax and brings no value (arXiv:2309.17453; gpt-oss).
    """

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
    """Norms and stores the latent vectors of multi-head latent attention (arXiv:2405.04434), and
    turns queries.

    given `[T, rank + turning]`: a latent vector before its norm, and the key that all heads share,
    which turns; q `[T, H, still + turning]`, of which the last `turning` are turned in place; norm
    `[rank]`. cos_sin `[max_pos, 2, turning / 2]` float32; the two halves turn together. plan: what
    `plan` gave. At `inputs.slots` lie the normed vector, in eight bits where `kv` has a scale, and
    the turned key.
    """

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
    ) -> None: ...


class AttentionOverLatents(Protocol):
    """Decode rows (their prefix group first, where they have one), then chunks, over the latent
    vectors of one layer.

    q `[T, H, still + turning]`, turned; up `[H, still + value, rank]`: what makes a head's key, but
    for what turns, and its value of a vector's first `rank` numbers; kind.latent: the sizes.
    Returns `[T, H, value]`.

    Of two forms that differ in rounding alone rows take the absorbed one: queries are multiplied by
    the keys' part of `up`, score the vectors themselves, and what weighed vectors become comes
    behind the sum. Chunks whose tokens are enough, and who see little that isn't their own
    (`LatentSizes.expands`), take the other: keys and values are made.
    """

    def __call__(
        self,
        q: Tensor,
        up: Tensor,
        kv: LatentKv,
        inputs: StepInputs,
        kind: AttentionKind,
        plan: Any,
    ) -> Tensor: ...


class GatedConvolution(Protocol):
    """Gated causal convolution, channel by channel, over the few tokens of a window, which is moved
    on (LFM2).

    given `[T, 3c]`: what gates the values, what gates the answer, the values; weight `[c, taps]`,
    the newest token's last; bias `[c]` or None; window `[slots, taps, c]`, what each slot saw last,
    the token at position p at p % taps. `inputs.states` says which slot a row or chunk has, and
    whether a row's newest token goes into it. Returns `[T, c]`: the out gate times the convolution
    of in gate times value; that product and the convolution are rounded.
    """

    def __call__(
        self, given: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
    ) -> Tensor: ...


class DeltaRule(Protocol):
    """A layer of gated delta rule between its products (`kernels/delta_rule.py` has its lines).

    given `[T, channels + value_size]`: q, k and v before the convolution, and z; its rows may stand
    apart. rates `[T, 2 * value_heads]`: what b is made of, then what a is. window `[slots, taps,
    channels]` as for a gated convolution, matrix `[slots, value_heads, key_width, value_width]` of
    any float dtype, changed in float32. `inputs.states` says which slot a row or chunk has, and
    whether a row's newest token changes it. Returns `[T, value_size]`. q, k and v are rounded
    behind silu, the answer before and behind its norm.
    """

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
    """A layer of Mamba2 between its first product and its gate (`kernels/mamba2.py` has its lines).

    given `[T, columns]`: z, what the convolution takes, dt. window `[slots, taps, channels]` as for
    a gated convolution, matrix `[slots, heads, state_width, head_width]` of any float dtype,
    changed in float32. `inputs.states` says which slot a row or chunk has, and whether a row's
    newest token changes it. Returns `[T, size]`. x, B and C are rounded behind silu, and so is the
    answer.
    """

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
    """Raw logits `[m, vocabulary]`, tokens `[m]` -> chosen `[m]`, rank `[m]`, ids and logprobs of
    the top `[m, k]`."""

    def __call__(
        self, logits: Tensor, tokens: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


@dataclass(slots=True, frozen=True)
class OneRowOps:
    """A layer of one row that stands alone, in fewer launches. Weights are prepared ones; the same
    numbers as the operations of Ops give one after the other, within the dtype's rounding.
    `residual` None: x opens the stream."""

    # x, residual [1, d], norm's weight, eps, qkv's weight, bias, cos_sin, inputs, kv, H, Hkv, D;
    # weight and KV plain
    # -> q [1, H, D], rotated, k and v stored; the next residual
    norm_qkv: Callable[..., tuple[Tensor, Tensor]]
    # the product of qkv [1, (H + 2 Hkv) * D], cos_sin, kv, inputs, the attention's kind, its sinks
    # [H] or None, the form that is wanted of the answer, which is wide where it can't be
    rotate_and_attend: Callable[..., Rows]  # k and v stored -> [1, H * D]
    # x, residual [1, d], norm's weight, eps, gate_up's weight, form as above
    norm_gate: Callable[..., tuple[Rows, Tensor]]  # -> silu(gate) * up [1, F], the next residual


@dataclass(slots=True, frozen=True)
class Ops:
    """One callable an operation. `why` tells the column of each and the reason, for stats and
    doctor."""

    dtype: torch.dtype  # of a model's rows
    # weight [out, in] -> what `linear` takes; once, at load
    prepare_linear: Callable[[Tensor], Any]
    # x [T, in], prepared weight, bias [out] | None -> [T, out]
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    # x [T, in], prepared weight [2F, in] (the gate's rows first), "silu" or "gelu_tanh" ->
    # act(gate) * up [T, F], rounded once; None where `linear` and the gate one after the other are
    # as fast
    linear_gated: Callable[[Tensor, Any, str], Tensor | None]
    # weight [out, in] e4m3, a scale a row [out], the model's dtype -> what `linear_fp8` takes: an
    # object that says how it wants so many rows (`form`), and what the fused operations take of it
    # (`streamed`)
    prepare_linear_fp8: Callable[[Tensor, Tensor, torch.dtype], Any]
    linear_fp8: Callable[[Rows, Any, Tensor | None], Tensor]  # as linear, x in any form
    # weight [out, in] e4m3, scale [out, ceil(in / 128)] float32: one for each 128 neighbours of a
    # row (the last may be short), the model's dtype -> what `linear_fp8_groups` takes
    prepare_linear_fp8_groups: Callable[[Tensor, Tensor, torch.dtype], Any]
    linear_fp8_groups: Callable[[Tensor, Any, Tensor | None], Tensor]  # as linear
    # numbers, scales and zeros (or None) in the one layout of kernels/int_matrix.py, the model's
    # dtype -> what `linear_int` takes: an object with `form` and `streamed`, as above
    prepare_linear_int: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Any]
    linear_int: Callable[[Rows, Any, Tensor | None], Tensor]  # as linear, x as its form is
    # numbers, scales and what multiplies a row's scales (or None) in the layout of
    # kernels/fp4_matrix.py, the model's dtype -> what `linear_fp4` takes: an object with `form` and
    # `streamed`, as above
    prepare_linear_fp4: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Any]
    linear_fp4: Callable[[Rows, Any, Tensor | None], Tensor]  # as linear, x as its form is
    quantize_rows: Callable[[Tensor, Form], Fp8Rows | FixedRow]  # x [T, K]
    # x [T, d], weight [d], eps, the form wanted -> [T, d]. A float32 weight is multiplied by before
    # the answer is rounded to x's dtype.
    rms_norm: Callable[[Tensor, Tensor, float, Form], Rows]
    # x, residual (may be overwritten), weight, eps, form, the weight of a norm that x passes first
    # (None: none) -> (norm of the sum, the sum: the next residual)
    add_rms_norm: Callable[
        [Tensor, Tensor, Tensor, float, Form, Tensor | None], tuple[Rows, Tensor]
    ]
    # What layers of one kind share in a step, worked out once: inputs, kind, cos_sin, the queries'
    # dtype
    plan: Callable[[StepInputs, AttentionKind, Tensor, torch.dtype], Any]
    rotary_and_store: RotaryAndStore
    # gate_up [T, 2F] (gate first; may be overwritten), form -> [T, F]
    silu_mul: Callable[[Tensor, Form], Rows]
    gelu_mul: Callable[[Tensor, Form], Rows]  # the same with tanh's GELU
    # x [T, F], gate [T, F], whose rows may stand apart, form -> x * sigmoid(gate), rounded once
    sigmoid_mul: Callable[[Tensor, Tensor, Form], Rows]
    relu2: Callable[[Tensor, Form], Rows]  # x [T, F], form -> max(x, 0) squared, rounded once
    # a layer's experts -> what `experts` takes; once, at load
    prepare_experts: Callable[[Experts], Any]
    # x [T, d], the router's scores [T, E], prepared experts -> [T, d]: each token through the k
    # that the routing chooses (of equals the lower number), by the weights that it gives them,
    # added up in float32
    experts: Callable[[Tensor, Tensor, Any], Tensor]
    attention: Attention
    latent_store: LatentStore
    latent_attention: AttentionOverLatents
    short_conv: GatedConvolution
    delta_rule: DeltaRule
    mamba2: Mamba2Scan
    # x [T, F], gate [T, F], whose rows may stand apart, weight [F], groups, eps, form -> x *
    # silu(gate), normed in groups of F / groups neighbours and rounded, times weight; weight None:
    # x * silu(gate)
    gated_norm: Callable[[Tensor, Tensor, Tensor | None, int, float, Form], Rows]
    # out [T, d], made [T, d], x [T, d], gate [1, d] or None, scale -> out + scale * made *
    # sigmoid(x . gate), in out
    add_opened: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
    # logits (may be overwritten), cap -> cap * tanh(logits / cap)
    softcap: Callable[[Tensor, float], Tensor]
    # ids [T], table [rows, d], the token of its first row -> [T, d], 0 where a token is not in it.
    # None: all are
    embed: Callable[..., Tensor]
    copy_blocks: Callable[[list[Tensor], Tensor, Tensor], None]  # storages of KV, src [c], dst [c]
    # logits [n, vocabulary] -> tokens [n] int32; reference/sampling/sample.py
    sample: Callable[[Tensor, SamplerInputs], Tensor]
    token_logprobs: TokenLogprobs
    # These three change float32 logits in place, in some rows: reference/sampling/penalties.py.
    apply_bias: Callable[[Tensor, Tensor, Tensor, Tensor], None]  # logits, rows, ids, values [m]
    # logits, rows [m], ids [m, j], active [m]
    bar_ids: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    apply_penalties: Callable[..., None]
    one_row: OneRowOps | None = None
    binaries: Binaries | None = None  # of this process, where kernels are compiled
    why: dict[str, tuple[str, str]] = field(default_factory=dict)  # op -> (column, reason)


@dataclass(slots=True, frozen=True)
class RowOps:
    """Operations that read and write the rows' columns on the device by row id, so that nothing of
    a step depends on what the host would have to ask. `rows` is an object with the columns of
    `kernels.row_state.RowState`.
    """

    join: Callable[..., None]  # packed [k, words] (row_state.pack_joins), rows
    grow: Callable[..., None]  # new blocks [m, 3], rows
    # row_ids, queries, rows: a query whose draft is FROM_DEVICE gets its row's own, rows.drafts
    take_drafts: Callable[..., None]
    # row_ids, queries, rows, slot_token, dump block, -> token_ids, positions, slots
    prepare: Callable[..., None]
    advance: Callable[..., Tensor]  # row_ids, queries, drawn, rows, told -> told
    sample_scratch: Callable[..., Any]  # rows, vocabulary, device -> scratch of the three below
    # logits, row_ids, position, rows, slot_token, bias_ids, bias_values, masks, scratch, part
    # (VocabularyPart or None)
    adjust: Callable[..., None]
    # logits, row_ids, position, rows, scratch, tokens, filters=, adjusts=, part= -> tokens
    sample_rows: Callable[..., Tensor]
    logprobs_rows: Callable[..., None]  # logits, row_ids, rows, tokens, most, scratch, out
    block_copier: Callable[[list[Tensor]], Any]  # layers -> an object with copy(src [c], dst [c])
    # kernels are compiled for few sizes, and steps may be captured: sizes are padded to those
    compiled: bool
