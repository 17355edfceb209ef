"""GateForm: the gate of an attention's output. Knows neither torch nor a config file's spelling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GateForm:
    """A gate: attention's output is multiplied by a function of a product of the layer's input.

    name: the product's tensor, after the attention's name; None: each head's gate rows follow its
    rows of q. softplus: the function is log(1 + exp); else the sigmoid. a_head: one factor for each
    head; else one for each number."""

    name: str | None = None
    softplus: bool = False
    a_head: bool = False
