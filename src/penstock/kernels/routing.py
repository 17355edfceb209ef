"""Routing: the rules by which a router's scores choose experts and weight their outputs. Knows
numbers alone; no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Rules of a router, which gives a token a score for each expert. The token's `top_k` experts
    are chosen by an expert's value, and the values of the chosen experts become the weights of
    their outputs.

    sigmoid: True: an expert's value is the sigmoid of its score; False: the softmax over all
    scores. groups: number of equal groups of experts; 1: no groups. A token uses experts of
    `kept_groups` groups only: those with the largest sum of their two best values if `paired`
    (DeepSeek-V3, arXiv:2412.19437), else those with the largest value (DeepSeek-V2). renormalise:
    True divides a token's weights by max(their sum, `least`) + `added`. scale: factor of the
    weights, applied last."""

    top_k: int
    renormalise: bool
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    paired: bool = True
    least: float = 0.0
    added: float = 0.0
    scale: float = 1.0
