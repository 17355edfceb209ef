"""rated: a GPU's peak rates by its data sheet. They are the rates of its memory and matrix units;
for a GPU that is not in the table nothing is guessed.

A CPU has no entry: its rates would have to be timed at each start, which other processes would
disturb. Knows devices by their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

HALF = 2  # bytes of a bf16 or fp16 number
# torch's name of a GPU (a MIG slice has another name) -> memory bytes per second, dense bf16
# operations per second. For comparison, measured on an H200: copies reach 4.26e12 bytes per second,
# products of 8,192 rows 490e12 to 690e12 operations per second.
DATA_SHEETS = {
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),  # the SXM module
    "NVIDIA H100 PCIe": (2.0e12, 756e12),
    "NVIDIA H200": (4.8e12, 989e12),  # the SXM module
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpecs:
    """Peak rates. copy: bytes per second; flops: operations per second of dense products; item:
    bytes per number. Implements engine.roofline.Machine.
    """

    item: int
    copy: float
    flops: float

    def layer_seconds(self, tokens: NDArray[Any], numbers: int) -> NDArray[np.float64]:
        """Returns the seconds of products with matrices of `numbers` elements, for each count of
        tokens: by operations, or by one read of the matrices if longer."""
        return np.where(
            tokens > 0,
            np.maximum(2.0 * numbers * tokens / self.flops, numbers * self.item / self.copy),
            0,
        )

    def head_seconds(self, rows: NDArray[Any], numbers: int) -> NDArray[np.float64]:
        return self.layer_seconds(rows, numbers)

    @property
    def best_rate(self) -> float:
        return self.flops

    @property
    def ridge(self) -> float:
        """Tokens from which on a product takes longer to compute than its matrix to read: the
        roofline's ridge point."""
        return self.item * self.flops / (2 * self.copy)


def rated(device: torch.device, dtype: torch.dtype) -> GpuSpecs | None:
    """Returns the peak rates, or None if unknown: a CPU, another GPU, a MIG slice, or numbers of
    another size."""
    if device.type != "cuda" or dtype.itemsize != HALF:
        return None
    import torch

    found = DATA_SHEETS.get(torch.cuda.get_device_name(device))
    return None if found is None else GpuSpecs(item=dtype.itemsize, copy=found[0], flops=found[1])
