"""RopeConfig: which rotary embedding, with its numbers. It knows neither torch nor a config file's
spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal[
    "default", "none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Numbers of a rotary embedding; a kind reads only those that name it.

    theta: base of the wavelengths (RoFormer, arXiv:2104.09864). factor: how much longer than in
    training texts may be (linear, llama3, yarn, proportional; dynamic: from the
        context's end on).
    original_context: positions of the training before it was stretched (llama3, yarn, longrope).
    low_freq_factor, high_freq_factor: llama3, wavelengths above original_context / low are
    stretched in full,
        those below original_context / high not at all, a ramp between them.
    attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn
    (arXiv:2309.00071). short_factors, long_factors: longrope (arXiv:2402.13753), what each wave is
    stretched by within the original context
        and beyond it; attention_factor is longrope's too.
    part: of a head's width that turns, the first so much of it. proportional (Gemma 4): the first
    so many of the pairs
        that the whole head has, at the wavelengths that they have in it.
    neighbours: each even number of a head turns with the odd one behind it; else its first half
    with its second. "none": nothing turns.
    """

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
