"""Linear: a matrix of some scheme and perhaps a bias. Which tensors are fused into one matrix is
said where it is made.

With several ranks a matrix is cut by rows (each rank has some outputs) or by columns (each has some
inputs, and the ranks add up what they have).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.ops import Ops
from penstock.parallel.layout import Layout
from penstock.parallel.sharded_weight import Weight
from penstock.quant.scheme import PLAIN, Product, Scheme


class Linear:
    """x `[T, in]` -> `[T, out]`.

    summed: the layout whose ranks add their answers, where the matrix is cut by columns.
    """

    def __init__(
        self,
        loaded: dict[str, Weight],
        bias: Weight | None = None,
        *,
        scheme: Scheme = PLAIN,
        summed: Layout | None = None,
    ) -> None:
        self.loaded, self.bias, self.scheme, self._summed = loaded, bias, scheme, summed
        self.product: Product | None = None  # after prepare()

    def __call__(self, ops: Ops, x: Rows) -> Tensor:
        product = self.product
        assert product is not None, "a linear is prepared before it is used"
        if isinstance(x, Tensor) and (form := self.form(x.shape[0])) != "wide":
            x = ops.quantize_rows(x, form)
        bias = None if self.bias is None else self.bias.value
        if self._summed is None:
            return product.multiply(x, product.matrix, bias)
        out = self._summed.all_reduce(product.multiply(x, product.matrix, None))
        return out if bias is None else out.add_(bias)

    def gated(self, x: Rows, activation: str) -> Tensor | None:
        """Returns act(gate) * up `[T, out / 2]` by a matrix of gate's rows, then up's, where one
        operation is faster than two one after the other; else None."""
        assert self.product is not None, "a linear is prepared before it is used"
        if self.product.gated is None or self.bias is not None or not isinstance(x, Tensor):
            return None
        return self.product.gated(x, self.product.matrix, activation)

    def form(self, rows: int) -> Form:
        """Returns how so many rows are wanted."""
        assert self.product is not None, "a linear is prepared before it is used"
        return self.product.form(rows)

    def weights(self) -> Iterator[Weight]:
        yield from self.loaded.values()
        if self.bias is not None:
            yield self.bias

    def prepare(self, ops: Ops) -> None:
        """Once, after the weights are filled: arranges the matrix as its operation wants it."""
        self.product = self.scheme.prepare(ops, self.loaded)

    def reorder(self, rows: Tensor) -> None:
        """Puts the matrix's rows in another order, once they are filled and before they are
        prepared: row n becomes what was row rows[n]."""
        for weight in self.weights():
            weight.reorder(rows.to(weight.value.device))

    @property
    def is_summed(self) -> bool:
        """Whether ranks add up their answers."""
        return self._summed is not None

    @property
    def numbers(self) -> int:
        """Numbers of the matrix, on this rank."""
        return self.loaded["weight"].numbers
