"""fit_kv: chooses the dtype of the KV cache. It also chooses the scales of keys and values; both
after the model is loaded and before the cache is allocated.

For eight bits, a short sample runs through the model with plain KV, and two values are measured per
layer:

    scales   largest |k| and |v| of each KV head; scaled, they reach at most half of e4m3's range
    check    change of the layer's output if only its keys are rounded; above KEY_ERROR its keys
             stay plain

Latent vectors (latent attention) are keys and values at once and have one scale: above KEY_ERROR
the layer stays plain. Knows a model and token ids; no rows, no scheduler. docs/design/eight_bits.md
says why scales are powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE, KvCacheDtype, StateDtype
from penstock.errors import CheckpointError, UsageError
from penstock.execute.kv_cache import KvCache
from penstock.kernels.fp8_rows import E4M3, E4M3_MOST, LEAST_GPU
from penstock.kernels.inputs import (
    AttentionKind,
    ChunkSight,
    PrefillInputs,
    StateInputs,
    StepInputs,
)
from penstock.kernels.layer_kv import LEAST_KV_SCALE, KvForm, LayerKv
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import LatentForm, LatentKv, PagedForm, RecurrentForm
from penstock.layers.block import Keeper, is_recurrent
from penstock.models.decoder import Decoder
from penstock.parallel.layout import ALONE, Layout

PROMPTS, TOKENS = 4, 128  # size of the built-in sample: number of prompts, tokens of each
HEADROOM = 2.0  # a scale leaves room for numbers this many times the sample's largest
KEY_ERROR = (
    # largest accepted relative change of a head's output; with normally distributed keys rounding
    # gives 0.03
    0.15
)
Given = list[Tensor | None]


@dataclass(slots=True)
class SeenKv:
    """Measurements of one layer. For latent vectors, largest and scales are [1]."""

    largest: Tensor  # [2, kv_heads] float32: largest |k| and largest |v| of each head
    # [2, kv_heads] float32: scales of k and of v, the checkpoint's or derived from `largest`
    scales: Tensor
    # |output with rounded keys - output| / |output|, the maximum over heads and over layers that
    # share this state
    key_error: float


def fit_kv(
    model: Decoder,
    asked: KvCacheDtype,
    ops: Ops,
    *,
    given: Given | None = None,
    sample: Tensor | None = None,
) -> None:
    """Sets the storage format (dtype and scales) of each layer's keys and values.

    given: each layer's scales [2, kv_heads] from its checkpoint; None: measure them. sample:
    [prompts, tokens] ids, None: the built-in one, which all ranks run together. Raises UsageError
    for a GPU without e4m3.
    """
    if asked == "auto":
        return
    paged = with_pages(model)
    if asked == "bfloat16":
        for keeper in paged:
            assert isinstance(keeper.form, KvForm | LatentForm)
            keeper.form = keeper.form.plain(torch.bfloat16)
        return
    check_eight_bits(model.device, ops)
    for keeper, layer in zip(paged, look_at_kv(model, ops, sample, given), strict=True):
        assert isinstance(keeper.form, KvForm | LatentForm)
        keeper.form = _form(keeper.form, layer)


def fit_states(model: Decoder, asked: StateDtype, drafts: int = 0) -> None:
    """Sets the layout of recurrent states before their memory is allocated: the dtype of those that
    sum over all tokens, and room for steps with up to `drafts` drafts a row. Raises UsageError if a
    dtype is asked for and the model has no sums."""
    own = [
        (keeper, form.for_drafts(drafts))
        for keeper in model.owners
        if isinstance(form := keeper.form, RecurrentForm)
    ]
    for keeper, form in own:
        keeper.form = form
    if asked == "auto":
        return
    summing = [(keeper, form) for keeper, form in own if any(part.sums for part in form.parts)]
    if not summing:
        raise UsageError(
            f"mamba_ssm_cache_dtype {asked} is for recurrent states that add up over a sequence,"
            f" and a {model.config.architecture} has none: leave it auto",
            param="mamba_ssm_cache_dtype",
        )
    for keeper, form in summing:
        keeper.form = form.summed_in(getattr(torch, asked))


def with_pages(model: Decoder) -> list[Keeper]:
    """Returns the model's layers that store keys and values of their own, in order, without a
    drafter's, which stay in the model's dtype."""
    return [
        keeper for keeper in model.owners if not is_recurrent(keeper) and not _drafts(model, keeper)
    ]


def _drafts(model: Decoder, keeper: Keeper) -> bool:
    return model.drafter is not None and any(keeper is each for each in model.drafter.keeps())


def narrowest(model: Decoder, asked: KvCacheDtype) -> list[PagedForm]:
    """Returns the smallest storage formats that `fit_kv` may choose for a model's layers, and those
    of its drafter: if 8 bits are requested, all keys and values of the model in 8 bits. Their
    scales are ones."""
    if asked == "auto":
        return model.paged_forms
    count, found = len(with_pages(model)), list[PagedForm]()
    own, rest = model.paged_forms[:count], model.paged_forms[count:]
    if asked == "bfloat16":
        return [form.plain(torch.bfloat16) for form in own] + rest
    for form in own:
        if isinstance(form, LatentForm):
            found.append(replace(form, scale=torch.ones(1)))
        else:
            assert isinstance(form, KvForm)
            found.append(replace(form, keys=E4M3, values=E4M3, scales=torch.ones(2, form.kv_heads)))
    return found + rest


def reads_eight_bits(device: torch.device, ops: Ops) -> bool:
    """Returns True if these kernels read e4m3 on this device."""
    compiled = device.type == "cuda" and ops.why["attention"][0] != "reference"
    return not compiled or torch.cuda.get_device_capability(device) >= LEAST_GPU


def check_eight_bits(device: torch.device, ops: Ops) -> None:
    """Raises UsageError if the kernels do not read e4m3 on this device."""
    if not reads_eight_bits(device, ops):
        has = torch.cuda.get_device_capability(device)
        raise UsageError(
            "kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or more (L4, L40S, H100,"
            f" H200), and this one has {has[0]}.{has[1]}: leave it auto",
            param="kv_cache_dtype",
        )


def built_in_sample(model: Decoder) -> Tensor:
    """Returns random token ids [prompts, tokens], the same at each start, beginning with the
    model's bos token if it has one."""
    config, length = model.config, min(TOKENS, model.positions)
    drawn = torch.randint(
        config.vocab_size,
        (PROMPTS, length),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.int64,
    )
    if config.bos_id is not None and config.bos_id < config.vocab_size:
        drawn[:, 0] = config.bos_id
    return drawn


@torch.inference_mode()
def look_at_kv(
    model: Decoder, ops: Ops, sample: Tensor | None = None, given: Given | None = None
) -> list[SeenKv]:
    """Runs the sample through a model with an unquantized KV cache; returns each layer's
    measurements. given: as in fit_kv. Raises CheckpointError if K or V are not finite."""
    sample = built_in_sample(model) if sample is None else sample
    prompts, tokens = sample.shape
    each = -(-tokens // BLOCK_SIZE)
    cache = KvCache(model.keepers, prompts * each + 2, model.device, slots=prompts)
    layers = [
        kv
        for each_of, views in zip(model.keepers, cache.layers, strict=True)
        for keeper, kv in zip(each_of, views, strict=True)
        if keeper.kind is not None
    ]
    blocks = torch.arange(1, prompts * each + 1, device=model.device)
    look = _Look(ops, layers, given or [None] * len(layers), blocks)
    inputs = whole_prompts(prompts, tokens, blocks.view(prompts, each))
    looking = replace(ops, attention=look.attention, latent_attention=look.latent_attention)
    model.forward(sample.to(model.device).flatten(), inputs, cache.layers, looking)
    for number, layer in enumerate(look.seen):
        if not layer.largest.isfinite().all():
            raise CheckpointError(
                f"keys or values of layer {number} are no finite numbers, for token ids drawn from"
                " the vocabulary: download the model again, or leave kv_cache_dtype auto"
            )
    return look.seen


class _Look:
    """Replacement for attention that measures each layer's stored K and V, and the outputs of the
    layers that read them. Layers must run in order."""

    def __init__(
        self, ops: Ops, layers: list[LayerKv | LatentKv], given: Given, blocks: Tensor
    ) -> None:
        self._attend, self._attend_latents = ops.attention, ops.latent_attention
        self._layers, self._given, self.blocks = iter(layers), given, blocks
        self.seen: list[SeenKv] = []
        # stored keys and values of the layers in `seen`
        self._stored: list[LayerKv | LatentKv] = []

    def attention(
        self,
        q: Tensor,
        kv: LayerKv,
        inputs: StepInputs,
        kind: AttentionKind,
        plan: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:
        source = self._source_of(kv)
        answer = self._attend(q, kv, inputs, kind, plan, sinks)
        held = kv.worth(self.blocks)
        largest = held.abs().amax((0, 3, 4)).T.contiguous()
        if source is not None:
            scales = source.scales
        else:
            given = self._given[len(self.seen)]
            scales = scales_for(largest) if given is None else given.to(q.device)
        by = scales[0, :, None, None]
        rounded = torch.zeros(
            (len(kv.storage), *held.shape[1:]), dtype=kv.keys.dtype, device=q.device
        )
        rounded[self.blocks, :, 0] = _through_e4m3(held[:, :, 0], by).to(rounded.dtype)
        rounded[self.blocks, :, 1] = held[:, :, 1].to(rounded.dtype)
        moved = self._attend(q, LayerKv.plain(rounded), inputs, kind, plan, sinks)
        self._note(kv, source, SeenKv(largest, scales, _most_moved(answer, moved, kv.kv_heads)))
        return answer

    def latent_attention(
        self,
        q: Tensor,
        up: Tensor,
        kv: LatentKv,
        inputs: StepInputs,
        kind: AttentionKind,
        plan: Any,
        asked: Tensor | None = None,
    ) -> Tensor:
        source = self._source_of(kv)
        answer = self._attend_latents(q, up, kv, inputs, kind, plan, asked)
        held = kv.vectors.index_select(0, self.blocks).float()
        largest = held.abs().amax().view(1)
        scales = scales_for(largest)
        rounded = torch.zeros_like(kv.latent)
        rounded[self.blocks, :, : kv.value_width] = _through_e4m3(held, scales).to(rounded.dtype)
        rounded[self.blocks, :, kv.value_width :] = kv.turned.index_select(0, self.blocks)
        other = LatentKv(rounded, kv.value_width)
        moved = self._attend_latents(q, up, other, inputs, kind, plan, asked)
        self._note(kv, source, SeenKv(largest, scales, _most_moved(answer, moved, kv.kv_heads)))
        return answer

    def _source_of(self, kv: LayerKv | LatentKv) -> SeenKv | None:
        """Returns the measurements of the earlier layer whose keys and values `kv` the next layer
        reads; None: that layer stores its own."""
        assert kv is next(self._layers), "layers attend in their order"
        return next(
            (seen for seen, stored in zip(self.seen, self._stored, strict=True) if stored is kv),
            None,
        )

    def _note(self, kv: LayerKv | LatentKv, source: SeenKv | None, seen: SeenKv) -> None:
        if source is not None:
            source.key_error = max(source.key_error, seen.key_error)
        else:
            self.seen.append(seen)
            self._stored.append(kv)


def scales_for(largest: Tensor) -> Tensor:
    """Returns scales of the same shape as `largest`, the largest absolute values: the least powers
    of two by which a division brings them to at most 448 / HEADROOM (448 is e4m3's largest number).
    Tiny values get LEAST_KV_SCALE: kernels mask scores by a large number, which is scaled too."""
    least = (largest * (HEADROOM / E4M3_MOST)).clamp(min=LEAST_KV_SCALE)
    return torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(least))), 1.0)


def _form(plain: KvForm | LatentForm, seen: SeenKv) -> KvForm | LatentForm:
    if isinstance(plain, LatentForm):
        return replace(plain, scale=seen.scales) if seen.key_error <= KEY_ERROR else plain
    scales, keys = seen.scales.clone(), E4M3
    if not seen.key_error <= KEY_ERROR:
        scales[0], keys = 1.0, plain.keys
    return replace(plain, keys=keys, values=E4M3, scales=scales)


def kept_form(
    plain: KvForm | LatentForm,
    scales: tuple[list[float], list[float]],
    device: torch.device,
    layout: Layout = ALONE,
) -> KvForm | LatentForm:
    """Returns the storage format of a layer's cache: in eight bits where it has scales. scales:
    those of keys and those of values, one for each KV head of the model; each rank takes those of
    its own heads. Without scales of keys only values are quantized. Latent attention has one scale,
    given as the values'; without it the layer stays unquantized."""
    of_keys, of_values = scales
    if isinstance(plain, LatentForm):
        return replace(plain, scale=torch.tensor(of_values, device=device)) if of_values else plain
    shares, share = layout.share(len(of_values), "KV heads", repeats=True)
    each = [
        torch.tensor(part or [1.0] * len(of_values)).view(shares, -1)[share]
        for part in (of_keys, of_values)
    ]
    return replace(
        plain,
        keys=E4M3 if of_keys else plain.keys,
        values=E4M3,
        scales=torch.stack(each).to(device),
    )


def told_scales(form: KvForm | LatentForm) -> tuple[list[float], list[float]]:
    """Returns the scales in a storage format, as `kept_form` takes them."""
    if isinstance(form, LatentForm):
        return [], [] if form.scale is None else form.scale.tolist()
    assert form.scales is not None
    of_keys, of_values = form.scales.tolist()
    return of_keys if form.keys == E4M3 else [], of_values


def _through_e4m3(numbers: Tensor, scale: Tensor) -> Tensor:
    return (numbers / scale).clamp_(-E4M3_MOST, E4M3_MOST).to(E4M3).float() * scale


def _most_moved(answer: Tensor, moved: Tensor, kv_heads: int) -> float:
    """Returns the largest relative distance, over KV heads, between two outputs [tokens, heads,
    head size]."""
    shape = (answer.shape[0], kv_heads, -1)
    by_head = answer.float().reshape(shape)
    off = (moved.float().reshape(shape) - by_head).pow(2).sum((0, 2))
    return float((off / by_head.pow(2).sum((0, 2)).clamp(min=1e-30)).sqrt().max())


def whole_prompts(prompts: int, tokens: int, tables: Tensor, context: int = 0) -> StepInputs:
    """Returns the inputs of a step over whole prompts of one length, or over their next tokens
    after `context` stored ones. tables: int64 [prompts, blocks]. Prompt i uses recurrent state slot
    i, in its initial state."""
    device = tables.device
    position = torch.arange(context, context + tokens, device=device)
    slots = tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    prefill = PrefillInputs(
        start=torch.arange(0, (prompts + 1) * tokens, tokens, dtype=torch.int32, device=device),
        context=torch.full((prompts,), context, dtype=torch.int32, device=device),
        block_table=tables.to(torch.int32),
        seen=ChunkSight.of(np.full(prompts, tokens), np.full(prompts, context)),
    )
    nobody = torch.zeros(0, dtype=torch.int64, device=device)
    states = StateInputs(nobody, nobody, nobody, torch.arange(prompts, device=device))
    return StepInputs(position.repeat(prompts), slots.flatten(), 0, None, prefill, states=states)
