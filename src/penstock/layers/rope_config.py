"""RopeConfig: a kind of rotary embedding and its numbers. Knows neither torch nor a config file's
spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal[
    "default", "none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Numbers of a rotary embedding; a kind reads only the fields that name it below.

    theta: base of the wavelengths (RoFormer, arXiv:2104.09864). factor: longest context over the
    context in training (linear, llama3, yarn, proportional, dynamic). original_context: positions
    in training before stretching (llama3, yarn, longrope). low_freq_factor, high_freq_factor:
    llama3. Wavelengths above original_context / low are stretched in full, below original_context /
    high not at all, with a ramp between. attention_factor, beta_fast, beta_slow, mscale,
    mscale_all_dim, truncate: yarn (arXiv:2309.00071). short_factors, long_factors: longrope
    (arXiv:2402.13753), the stretch of each wave within and beyond the original context; longrope
    reads attention_factor too. part: share of a head's numbers that rotate, from the front. With
    proportional (Gemma 4): share of the head's frequencies, from the front, that rotate; they are
    those of a head that rotates whole. neighbours: True: each even number of a head rotates with
    the following odd one; False: number n of the first half rotates with number n of the second.
    kind "none": nothing rotates."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    part: float = 1.0
    neighbours: bool = False


NO_ROPE = RopeConfig(kind="none")
