"""Routing: how a router's scores become experts and weights. Knows numbers alone; no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Rules that choose a token's `top_k` experts by its scores, one per expert, and weigh their
    outputs.

    sigmoid: an expert's worth is the sigmoid of its score; else the softmax over all. groups:
    number of equal groups of experts, of which a token uses `kept_groups`: those with the largest
    sum of their two best (DeepSeek-V3, arXiv:2412.19437), or if not `paired` with the largest best
    (DeepSeek-V2); 1: no groups. renormalise: divide a token's weights by their sum, which is at
    least `least`, plus `added`. scale: final factor of weights."""

    top_k: int
    renormalise: bool
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    paired: bool = True
    least: float = 0.0
    added: float = 0.0
    scale: float = 1.0
