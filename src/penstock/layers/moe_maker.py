"""Makes mixtures of experts from checkpoint tensors. Experts are stored one by one or all in one
tensor. Knows no model."""

from __future__ import annotations

import torch

from penstock.errors import UsageError
from penstock.kernels.expert_matrix import FOURS, Gate
from penstock.kernels.routing import Routing
from penstock.layers.maker import Maker
from penstock.layers.moe import Moe, SharedExpert, Stacked
from penstock.parallel.sharded_weight import Part, Weight
from penstock.quant.scheme import PLAIN, ForExperts
from penstock.quant.whole_experts import down_of, gate_up_of


def make_moe(
    make: Maker,
    at: str,
    hidden: int,
    middle: int,
    experts: int,
    routing: Routing,
    *,
    router: str = "gate",
    names: tuple[str, str, str] | None = None,
    correction: Part | None = None,
    shared: SharedExpert | None = None,
    score_cap: float | None = None,
    gate: Gate = "silu",
    latent: tuple[str, int, str] | None = None,
    answer_scale: str | None = None,
) -> Moe:
    """Makes a mixture of experts; every rank holds a share of each expert.

    at: prefix of `router` and `.experts`. hidden: hidden size. middle: inner size of an expert.
    names: an expert's names of gate, up and down; None: those of an MLP. correction: the checkpoint
    tensor for `Experts.correction`. score_cap: see Moe. gate: see Experts. latent: for experts with
    a narrower input: (name of the product before them, width of their input, name of the product
    after them), names after `at`. answer_scale: name of the tensor for `Experts.answer_scale`."""
    opened, up, down_of = names or ("gate_proj", "up_proj", "down_proj")
    each = [f"{at}.experts.{number}" for number in range(experts)]
    shares, share = make.layout.share(middle, f"the inner size of {at}.experts")
    first = [f"{name}.{n}" for name in each for n in ((up,) if gate == "none" else (opened, up))]
    around, width = None, hidden
    if latent is not None:
        width = latent[1]
        around = (
            make.linear(f"{at}.{latent[0]}", width, hidden),
            make.linear(f"{at}.{latent[2]}", hidden, width),
        )
    gate_up = [Part(name, (middle, width), 0, shares, share) for name in first]
    down = [Part(f"{name}.{down_of}", (width, middle), 1, shares, share) for name in each]
    return Moe(
        make.linear(f"{at}.{router}", experts, hidden),
        _stacked(make, gate_up, experts),
        _stacked(make, down, experts),
        routing,
        None if make.layout.size == 1 else make.layout,
        correction=(
            None
            if correction is None
            else Weight([correction], torch.float32, make.device, shape=(experts,))
        ),
        shared=shared,
        score_cap=score_cap,
        gate=gate,
        latent=around,
        answer_scale=(
            None
            if answer_scale is None
            else Weight([Part(answer_scale, (experts,))], torch.float32, make.device)
        ),
    )


def make_shared_expert(
    make: Maker,
    at: str,
    hidden: int,
    middle: int,
    *,
    gate: str | None = None,
    scale: float = 1.0,
    fused: bool = False,
    gated: bool = True,
) -> SharedExpert:
    """Makes a shared expert. at: prefix of `.gate_proj`, `.up_proj` and `.down_proj`, or of a fused
    MLP's names. gate: name of the product whose sigmoid multiplies the output; None: no gate.
    scale: factor of the output. fused: see Maker.mlp. gated: False makes a `relu2_mlp`."""
    opened = (
        None
        if gate is None
        else Weight([Part(f"{gate}.weight", (1, hidden))], make.dtype, make.device)
    )
    if not gated:
        return SharedExpert(make.relu2_mlp(at, hidden, middle, in_parts=True), opened, scale)
    return SharedExpert(make.mlp(at, hidden, middle, fused=fused, in_parts=True), opened, scale)


def make_whole_moe(
    make: Maker,
    at: str,
    hidden: int,
    middle: int,
    experts: int,
    routing: Routing,
    *,
    clamp: tuple[float, float],
    four: bool,
) -> Moe:
    """Makes a mixture of experts that a checkpoint stores all in one tensor, with biases (gpt-oss).
    at: prefix of `.router` and `.experts`. clamp: see Experts. four: True if the checkpoint stores
    them in MXFP4."""
    name = f"{at}.experts"
    if make.scheme_of(name) is not PLAIN:
        raise UsageError(
            f"{name} are served as the checkpoint has them, in mxfp4 or wide: leave"
            " --quantization out, or take such a checkpoint",
            param="quantization",
        )
    cut = make.layout.near_share(middle // FOURS, f"the inner size of {name} in groups of {FOURS}")
    sizes = (name, experts, middle, hidden, cut, make.dtype, make.device)
    router = make.linear(f"{at}.router", experts, hidden, bias=True)
    summed = None if make.layout.size == 1 else make.layout
    return Moe(
        router,
        gate_up_of(*sizes, four=four),
        down_of(*sizes, four=four),
        routing,
        summed,
        clamp,
    )


def _stacked(make: Maker, parts: list[Part], experts: int) -> Stacked:
    scheme = make.scheme_for(parts)
    assert isinstance(scheme, ForExperts), "every scheme gives experts their numbers"
    return Stacked(scheme.weights(parts, make.dtype, make.device), scheme, experts)
