"""Makes gated delta rule layers from checkpoint tensors. Model families name and arrange the
tensors in three ways:

  split    in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d, norm, out_proj (Qwen3.5)
  by_head  in_proj_qkvz and in_proj_ba, key head by key head; the rest as split (Qwen3-Next)
  apart    q_proj, k_proj, v_proj, g_proj, b_proj, a_proj, q_conv1d, k_conv1d, v_conv1d, o_norm,
           o_proj (OLMo Hybrid)

All families have A_log and dt_bias. Key heads and value heads are divided among ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from penstock.kernels.delta_rule import DeltaHeads
from penstock.kernels.state_forms import RecurrentForm, StatePart
from penstock.layers.delta_net import MATRIX, GatedDeltaNet
from penstock.layers.maker import Maker
from penstock.layers.short_conv import WINDOW
from penstock.parallel.sharded_weight import Part, Weight

Tensors = Literal["split", "by_head", "apart"]


def make_delta_net(
    make: Maker,
    at: str,
    hidden: int,
    heads: DeltaHeads,
    taps: int,
    eps: float,
    state: torch.dtype,
    tensors: Tensors = "split",
    *,
    most_rate: float = 1.0,
) -> GatedDeltaNet:
    """Makes a layer. at: prefix of the tensors' names. hidden: hidden size. heads: heads of the
    layer, over all ranks. taps: tokens that the convolution sees. eps: of the layer's norm. state:
    dtype of the state matrices. tensors: one of the three namings above. most_rate: upper end of
    the rate b (see kernels/delta_rule.py)."""
    h, dtype, device = heads, make.dtype, make.device
    of_keys = make.layout.share(h.key_heads, f"key heads of {at}")
    of_values = make.layout.share(h.value_heads, f"value heads of {at}")
    own = replace(h, key_heads=h.key_heads // of_keys[0], value_heads=h.value_heads // of_values[0])

    def each(name: str, *shape: int) -> list[Part]:
        """Returns the Parts of q's, k's and v's tensors. name: template of their names, with {} for
        the letter."""
        sizes = (
            ("q", h.key_size, of_keys),
            ("k", h.key_size, of_keys),
            ("v", h.value_size, of_values),
        )
        return [
            Part(f"{at}.{name.format(letter)}", (size, *shape), 0, *cut)
            for letter, size, cut in sizes
        ]

    def of_value_heads(name: str, size: int) -> Part:
        return Part(f"{at}.{name}", (size, hidden), 0, *of_values)

    def by_value_head(name: str) -> Weight:
        return Weight(
            [Part(f"{at}.{name}", (h.value_heads,), 0, *of_values)], torch.float32, device
        )

    norm, out = "norm", "out_proj"
    if tensors == "apart":
        norm, out = "o_norm", "o_proj"
        into = [*each("{}_proj", hidden), of_value_heads("g_proj", h.value_size)]
        rates = [of_value_heads(f"{letter}_proj", h.value_heads) for letter in "ba"]
        convolution = each("{}_conv1d.weight", 1, taps)
    else:
        into = [
            Part.of_fused(f"{at}.in_proj_qkv", each("in_proj_qkv.{}", hidden)),
            of_value_heads("in_proj_z", h.value_size),
        ]
        rates = [of_value_heads(f"in_proj_{letter}", h.value_heads) for letter in "ba"]
        convolution = [Part.of_fused(f"{at}.conv1d.weight", each("conv1d.{}", 1, taps))]
    if tensors == "by_head":
        into = [Part(f"{at}.in_proj_qkvz", (h.channels + h.value_size, hidden), 0, *of_keys)]
        rates = [Part(f"{at}.in_proj_ba", (2 * h.value_heads, hidden), 0, *of_keys)]
    keeps = (
        StatePart(WINDOW, (taps, own.channels), dtype, beside=2 * own.value_heads),
        StatePart(MATRIX, (own.value_heads, own.key_width, own.value_width), state, sums=True),
    )
    return GatedDeltaNet(
        at,
        RecurrentForm(keeps),
        own,
        make.fused_linear(into),
        make.fused_linear(rates),
        Weight(convolution, dtype, device),
        by_value_head("A_log"),
        by_value_head("dt_bias"),
        Weight([Part(f"{at}.{norm}.weight", (h.value_width,))], dtype, device),
        eps,
        make.row_linear(f"{at}.{out}", hidden, h.value_size, h.value_heads),
        in_groups=tensors == "by_head",
        most_rate=most_rate,
    )
