"""Routing: how a router's scores become experts and weights. It knows numbers alone; no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Rules by which a token's scores, one an expert, choose `top_k` of them and say what each
    answer counts.

    sigmoid: an expert's worth is the sigmoid of its score, on its own; else the softmax over all.
    groups: experts stand in so many groups of equal size, of which a token takes `kept_groups`:
    those whose two best add up to the most (DeepSeek-V3, arXiv:2412.19437), or whose best is worth
    the most where they aren't `paired` (DeepSeek-V2); 1: in none.   renormalise: a token's weights
    are divided by their sum, which is taken as `least` at least and `added` more.   scale:
    multiplies weights in the end.
    """

    top_k: int
    renormalise: bool
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    paired: bool = True
    least: float = 0.0
    added: float = 0.0
    scale: float = 1.0
