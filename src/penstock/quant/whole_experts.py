"""Experts that a checkpoint stores all in one tensor. gpt-oss does so, in a float dtype with inputs
first, or in MXFP4.

  wide    `gate_up_proj` [E, d, 2F], `down_proj` [E, F, d]
  MXFP4   `gate_up_proj_blocks` [E, 2F, d / 32, 16]: bytes of two numbers, the lower half first, and
          `gate_up_proj_scales` [E, 2F, d / 32]: 2 ** (byte - 127); `down_proj` alike
  both    `gate_up_proj_bias` [E, 2F], `down_proj_bias` [E, d]

E experts, d hidden size, F inner size of an expert. Rows of gate and up alternate among the 2F.
Loading rearranges them to the layout of `kernels/expert_matrix.py`. Knows names and numbers; no
layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.expert_matrix import FOURS, ExpertMatrix
from penstock.parallel.sharded_weight import FLOATS, Part, Weight

BYTES = frozenset({"U8"})
DUMMY_SCALES = (118, 122)  # range of dummy scale bytes; numbers reach 6
NO_NUMBER = 255

Arrange = Callable[[Tensor], Tensor]


class Rearranged(Weight):
    """An array made from a rank's share of one checkpoint tensor by rearranging its numbers.
    arrange: function from that share to the array."""

    def __init__(
        self,
        part: Part,
        arrange: Arrange,
        dtype: torch.dtype,
        device: torch.device,
        *,
        counts: int = 1,
        drawn: tuple[int, int] | None = None,
    ) -> None:
        """counts: model parameters per element. drawn: range of dummy bytes, the end excluded."""
        made = arrange(torch.empty(part.local_shape, dtype=torch.uint8, device="meta")).shape
        stored = BYTES if dtype == torch.uint8 else FLOATS
        super().__init__([part], dtype, device, shape=tuple(made), stored=stored, counts=counts)
        self._flat_shape, self._rows = tuple(made), [made[0]]
        self._arrange, self._bytes = arrange, drawn

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        local = tensor if tuple(tensor.shape) == part.local_shape else part.local(tensor)
        place.copy_(self._arrange(local.to(place.device)))

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        for part, place in self.places():
            whole = torch.empty(part.shape, dtype=self.dtype, device=place.device)
            if self._bytes is None:
                whole.uniform_(*self._drawn, generator=generator)
            else:
                whole.random_(*self._bytes, generator=generator)
            self.fill(part, place, whole)


class Exponents(Rearranged):
    """MXFP4's scales: bytes that are exponents. The byte 255 means NaN and is refused (OCP
    Microscaling Formats 1.0)."""

    def are_finite(self, numbers: Tensor) -> Tensor:
        return (numbers != NO_NUMBER).all()


@dataclass(slots=True)
class WholeExperts:
    """One matrix of every expert, and its bias. adds_bias: True on the one rank that adds the bias,
    if ranks sum their outputs."""

    loaded: dict[str, Weight]
    adds_bias: bool = True

    def take(self) -> ExpertMatrix:
        """Returns the matrices in the layout of the expert operations. The loaded arrays are
        dropped."""
        scale = self.loaded["scale"].take() if "scale" in self.loaded else None
        bias = self.loaded["bias"].take()
        return ExpertMatrix(self.loaded["weight"].take(), scale, bias if self.adds_bias else None)


def gate_up_of(
    at: str,
    experts: int,
    inner: int,
    hidden: int,
    cut: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    four: bool,
) -> WholeExperts:
    """Returns the gate and up matrices [2F, d] of all experts; each rank has some of the 2F
    outputs. at: the name before `.gate_up_proj`. cut: (number of shares, index of this rank's
    share). four: True if they are stored in MXFP4."""
    name, rows, unit = f"{at}.gate_up_proj", 2 * inner, 2 * FOURS

    def part(suffix: str, *shape: int, along: int = 1) -> Part:
        return Part(f"{name}{suffix}", (experts, *shape), along, *cut, unit)

    if four:
        numbers = Rearranged(
            part("_blocks", rows, hidden // FOURS, FOURS // 2),
            lambda x: _apart(_halves(x)),
            torch.uint8,
            device,
            counts=2,
            drawn=(0, 256),
        )
        scale = Exponents(
            part("_scales", rows, hidden // FOURS),
            _apart,
            torch.uint8,
            device,
            counts=0,
            drawn=DUMMY_SCALES,
        )
        loaded: dict[str, Weight] = {"weight": numbers, "scale": scale}
    else:
        loaded = {
            "weight": Rearranged(
                part("", hidden, rows, along=2), lambda x: _apart(x.mT), dtype, device
            )
        }
    return WholeExperts(loaded | {"bias": Rearranged(part("_bias", rows), _apart, dtype, device)})


def down_of(
    at: str,
    experts: int,
    inner: int,
    hidden: int,
    cut: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    four: bool,
) -> WholeExperts:
    """Returns the down matrices [d, F] of all experts; each rank has some of the F inputs.
    Parameters: see gate_up_of."""
    name, groups = f"{at}.down_proj", inner // FOURS
    if four:
        blocks = Part(f"{name}_blocks", (experts, hidden, groups, FOURS // 2), 2, *cut)
        scales = Part(f"{name}_scales", (experts, hidden, groups), 2, *cut)
        loaded: dict[str, Weight] = {
            "weight": Rearranged(blocks, _halves, torch.uint8, device, counts=2, drawn=(0, 256)),
            "scale": Exponents(scales, _same, torch.uint8, device, counts=0, drawn=DUMMY_SCALES),
        }
    else:
        whole = Part(name, (experts, inner, hidden), 1, *cut, FOURS)
        loaded = {"weight": Rearranged(whole, lambda x: x.mT, dtype, device)}
    bias = Rearranged(Part(f"{name}_bias", (experts, hidden)), _same, dtype, device)
    return WholeExperts(loaded | {"bias": bias}, adds_bias=cut[1] == 0)


def _same(x: Tensor) -> Tensor:
    return x


def _apart(x: Tensor) -> Tensor:
    """Reorders alternating rows of gate and up [E, 2F, ...] to all of gate's rows, then all of
    up's."""
    return torch.cat((x[:, ::2], x[:, 1::2]), 1)


def _halves(blocks: Tensor) -> Tensor:
    """Repacks bytes [E, rows, groups, 16] to [E, rows, groups * 16]. Each byte holds two numbers of
    a group of 32: neighbours before, and numbers n (lower half) and n + 16 (upper half) afterwards.
    """
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return (numbers[..., : FOURS // 2] | numbers[..., FOURS // 2 :] << 4).flatten(2)
