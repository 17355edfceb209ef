"""GateForm: the gate of an attention's output. Knows neither torch nor a config file's spelling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GateForm:
    """A gate, by which attention's output is multiplied: a function of a linear map of the layer's
    input.

    name: tensor of the linear map, after the attention's name; None: each head's gate rows follow
    its rows of q. softplus: True: the function is log(1 + exp(x)); False: the sigmoid. a_head:
    True: one factor for each head; False: one for each number."""

    name: str | None = None
    softplus: bool = False
    a_head: bool = False
