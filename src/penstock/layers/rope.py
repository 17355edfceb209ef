"""Rotary embedding tables: cosines and sines of each kind. `ops.rotary_and_store` uses them to
rotate queries and keys.

Frequencies are computed in float32 as in each method's published code, so that they agree with
`transformers` to the last bit. The table is float32 for any model dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.layers.rope_config import RopeConfig

# positions computed at once, which bounds temporary memory
AT_ONCE = 1 << 16


def rope_table(rope: RopeConfig, width: int, positions: int, device: torch.device) -> Tensor:
    """Returns cos and sin of each position and frequency: [positions, 2, width / 2] float32 on
    `device`."""
    table = torch.empty(positions, 2, width // 2, device=device)
    if device.type == "meta":
        return table
    turning = rotated(rope, width) // 2
    table[:, 0, turning:], table[:, 1, turning:] = 1.0, 0.0
    frequencies, scale = rope_frequencies(rope, 2 * turning, positions)
    for first in range(0, positions, AT_ONCE):
        part = torch.arange(first, min(first + AT_ONCE, positions), dtype=torch.float32)
        angles = torch.outer(part, frequencies)
        table[first : first + AT_ONCE, :, :turning] = torch.stack(
            (angles.cos() * scale, angles.sin() * scale), dim=1
        )
    return table


def rotated(rope: RopeConfig, width: int) -> int:
    """Returns how many numbers of a head the kernel has to rotate. Some of them may rotate by an
    angle of 0."""
    if rope.kind == "proportional":
        return width
    return 0 if rope.kind == "none" else int(width * rope.part)


def lanes(rope: RopeConfig, width: int) -> list[int] | None:
    """Returns the order of a head's numbers that kernels need: number n of the first half rotates
    with number n of the second half. None: the checkpoint's order is already so.

    If only the first `turning` numbers rotate, half of them are moved to the front of each half.
    Scores don't depend on the order, since queries and keys have the same."""
    turning = rotated(rope, width)
    if turning in (0, width) and not (turning and rope.neighbours):
        return None
    half, still = turning // 2, turning + (width - turning) // 2
    if rope.neighbours:
        return [
            *range(0, turning, 2),
            *range(turning, still),
            *range(1, turning, 2),
            *range(still, width),
        ]
    return [*range(half), *range(turning, still), *range(half, turning), *range(still, width)]


def rope_frequencies(rope: RopeConfig, width: int, positions: int = 0) -> tuple[Tensor, float]:
    """Returns the frequencies in radians per position, [width / 2] float32, and the factor of
    cosines and sines. positions: the longest context, which some kinds need."""
    steps = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    plain = 1.0 / (rope.theta**steps)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "proportional":
        turning = int(rope.part * width // 2)
        return torch.cat((plain[:turning], torch.zeros(width // 2 - turning))) / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, width, steps), _yarn_scale(rope)
    if rope.kind == "longrope":
        return _longrope(rope, steps, positions)
    # `dynamic` changes its base only beyond the config's context, which no sequence exceeds.
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Returns frequencies in which long waves are stretched by the factor, short ones are
    unchanged, and those between are interpolated (Llama 3.1's published code). plain: the
    unstretched frequencies."""
    waves = 2 * math.pi / plain
    longest_kept = rope.original_context / rope.high_freq_factor
    shortest_stretched = rope.original_context / rope.low_freq_factor
    ramp = (rope.original_context / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - ramp) * plain / rope.factor + ramp * plain
    frequencies = torch.where(waves > shortest_stretched, plain / rope.factor, plain)
    return torch.where(
        (waves >= longest_kept) & (waves <= shortest_stretched), between, frequencies
    )


def _yarn(rope: RopeConfig, width: int, steps: Tensor) -> Tensor:
    """Returns yarn's frequencies. Waves that make more than beta_fast turns in the original context
    are unchanged, those with fewer than beta_slow are stretched, and those between are
    interpolated."""
    low, high = _yarn_turns(rope, width, rope.beta_fast), _yarn_turns(rope, width, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # avoids division by zero, as in the published code
    kept = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    waves = rope.theta**steps
    return (1.0 / (rope.factor * waves)) * (1 - kept) + (1.0 / waves) * kept


def _yarn_turns(rope: RopeConfig, width: int, turns: float) -> float:
    """Returns the index, in general not whole, of the frequency that makes this many turns within
    the original context."""
    return (
        width * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
    )


def _longrope(rope: RopeConfig, steps: Tensor, positions: int) -> tuple[Tensor, float]:
    """Returns longrope's frequencies and the factor of cosines and sines. The short or long factors
    are chosen once, by the longest context `positions`, since stored keys cannot be rotated again
    when a sequence grows. vLLM does the same."""
    factors = rope.long_factors if positions > rope.original_context else rope.short_factors
    scale = rope.attention_factor
    if scale is None:
        log = math.log(rope.factor) / math.log(rope.original_context) if rope.factor > 1.0 else 0.0
        scale = math.sqrt(1 + log)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**steps), scale


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
