"""Reads Mamba2's keys of a config.json, and makes the layer. Model types have two sets of names for
these keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from penstock.json_keys import Keys
from penstock.kernels.mamba2 import Mamba2Heads
from penstock.models.model_config import ConfigDtype

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.layers.mamba2 import Mamba2

MOST_HEADS, MOST_WIDTH, MOST_TAPS = 2**14, 256, 16
# values of the key for limits of dt that mean "no limit"; transformers 5 writes the second
_NO_LIMIT = (
    [0.0, float("inf")],
    [0.0, {"__float__": "Infinity"}],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    """Sizes and switches of a model's Mamba2 layers. taps: tokens that the convolution sees.
    taps_bias, bias, out_bias: True if the convolution, the first product and the last product have
    a bias. eps: of the norm; None: no norm. state_dtype: dtype of the state matrices. columns:
    factors of z, x, B, C and dt after the first product; empty: all 1."""

    heads: Mamba2Heads
    taps: int
    taps_bias: bool
    bias: bool
    out_bias: bool
    eps: float | None
    state_dtype: ConfigDtype
    columns: tuple[float, ...] = ()

    def make(self, make: Maker, at: str, hidden: int) -> Mamba2:
        """Makes a layer. at: prefix of its tensors' names."""
        import torch

        from penstock.layers.mamba2 import make_mamba2

        state = getattr(torch, self.state_dtype)
        return make_mamba2(
            make,
            at,
            hidden,
            self.heads,
            self.taps,
            self.eps,
            state,
            bias=self.bias,
            out_bias=self.out_bias,
            taps_bias=self.taps_bias,
            columns=self.columns,
        )


def read_mamba(
    keys: Keys,
    hidden: int,
    eps: float | None,
    *,
    inner: int | None = None,
    out_bias: str | None = None,
    columns: tuple[float, ...] = (),
) -> MambaShape:
    """Reads the keys that begin with mamba_ (Granite 4 and Falcon-H1). hidden: hidden size. eps:
    see MambaShape. inner: default size of x. out_bias: key that says if the last product has a
    bias; None: it has one if the first has. columns: see MambaShape."""
    heads = keys.count("mamba_n_heads", 128, high=MOST_HEADS)
    expand, bias = keys.count("mamba_expand", 2, high=64), keys.flag("mamba_proj_bias")
    inner = keys.count("mamba_d_ssm", None if "mamba_d_ssm" in keys.rest else inner)
    inner = expand * hidden if inner is None else inner
    keys.past(mamba_d_head="auto")
    width = keys.count("mamba_d_head", inner // heads, high=MOST_WIDTH)
    if heads * width != inner:
        raise keys.fail(
            f"mamba_n_heads ({heads}) of mamba_d_head ({width}) are not the {inner} numbers of a"
            " layer"
        )
    groups, state = (
        keys.count("mamba_n_groups", 1),
        keys.count("mamba_d_state", 256, high=MOST_WIDTH),
    )
    shape = Mamba2Heads(heads, width, groups, state)
    check_groups(keys, shape)
    past_scan(keys, "mamba_chunk_size")
    return MambaShape(
        heads=shape,
        taps=keys.count("mamba_d_conv", 4, low=2, high=MOST_TAPS),
        taps_bias=keys.flag("mamba_conv_bias", True),
        bias=bias,
        out_bias=bias if out_bias is None else keys.flag(out_bias),
        eps=eps,
        state_dtype=read_state_dtype(keys, "mamba_ssm_dtype"),
        columns=columns,
    )


def past_scan(keys: Keys, chunk: str) -> None:
    """Marks keys as read that don't change results: the chunk size of transformers' scan, under the
    key `chunk`, and limits of dt that mean no limit. Other limits stay unread and are refused
    later."""
    keys.take(chunk, None)
    for limit in _NO_LIMIT:
        keys.past(time_step_limit=limit)


def read_state_dtype(keys: Keys, name: str) -> ConfigDtype:
    """Reads the dtype of state matrices; float32 by default."""
    dtype: ConfigDtype = keys.text(name, "float32")
    if dtype not in get_args(ConfigDtype):
        raise keys.fail(
            f"{name} {dtype!r} is not supported: supported are {', '.join(get_args(ConfigDtype))}"
        )
    return dtype


def check_groups(keys: Keys, heads: Mamba2Heads) -> None:
    """Raises CheckpointError if heads don't divide into groups."""
    if heads.heads % heads.groups:
        raise keys.fail(
            f"{heads.heads} heads of Mamba2 are no multiple of its {heads.groups} groups"
        )
