"""Expert weights of checkpoints that store all experts of a layer in one tensor. gpt-oss does so,
in a float dtype with the input dimension first, or in MXFP4.

  float   `gate_up_proj` [E, d, 2F], `down_proj` [E, F, d]
  MXFP4   `gate_up_proj_blocks` [E, 2F, d / 32, 16]: bytes of two numbers, the first in the low
          nibble, and `gate_up_proj_scales` [E, 2F, d / 32]: 2 ** (byte - 127); in the same way
          `down_proj_blocks` [E, d, F / 32, 16] and `down_proj_scales` [E, d, F / 32]
  both    `gate_up_proj_bias` [E, 2F], `down_proj_bias` [E, d]

E: experts, d: hidden size, F: inner size of an expert. Rows of gate and up alternate among the 2F.
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
DUMMY_SCALES = (118, 122)  # range of random scale bytes for dummy weights; e2m1 numbers reach 6
NO_NUMBER = 255

Arrange = Callable[[Tensor], Tensor]


class Rearranged(Weight):
    """A Weight made from this rank's share of one checkpoint tensor. arrange: function that
    rearranges the share's numbers."""

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
        """counts: model parameters per element of the array. drawn: range of random bytes for dummy
        weights, the end excluded; None: the array is of floats."""
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
    """MXFP4's scales. A byte b means 2 ** (b - 127); 255 means NaN and is refused (OCP Microscaling
    Formats 1.0)."""

    def are_finite(self, numbers: Tensor) -> Tensor:
        return (numbers != NO_NUMBER).all()


@dataclass(slots=True)
class WholeExperts:
    """The gate and up, or the down matrices of all experts of a layer, and their biases. adds_bias:
    False on ranks that must not add the bias, as ranks sum their outputs and one rank adds it."""

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
    """Returns the gate and up matrices [2F, d] of all experts, split by outputs among tensor
    parallel ranks. at: the tensors' name before `.gate_up_proj`. cut: (number of ranks that share
    the matrices, index of this rank). four: True if they are stored in MXFP4."""
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
    """Returns the down matrices [d, F] of all experts, split by inputs among tensor parallel ranks.
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
    """Returns x unchanged."""
    return x


def _apart(x: Tensor) -> Tensor:
    """Reorders rows of gate and up that alternate, [E, 2F, ...], to all of gate's rows followed by
    all of up's."""
    return torch.cat((x[:, ::2], x[:, 1::2]), 1)


def _halves(blocks: Tensor) -> Tensor:
    """Repacks bytes [E, rows, groups, 16] to [E, rows, groups * 16]. Each byte holds two numbers of
    a group of 32: two neighbours in the input; number n (low nibble) and number n + 16 (high
    nibble) in the result."""
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return (numbers[..., : FOURS // 2] | numbers[..., FOURS // 2 :] << 4).flatten(2)
