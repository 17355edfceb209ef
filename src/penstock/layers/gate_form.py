"""GateForm: what opens an attention's answer.
It knows neither torch nor a config file's spelling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GateForm:
    """An attention's answer is multiplied by functions of a product of what it reads.

    name: of the product's tensor, behind the attention's name; None: each head's rows stand behind
    its rows of q. softplus: log(1 + exp) of its numbers, else their sigmoids.   a_head: one for
    each head, else one for each number.
    """

    name: str | None = None
    softplus: bool = False
    a_head: bool = False
