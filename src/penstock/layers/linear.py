"""Linear: a matrix product with an optional bias. The caller chooses the scheme (quantization) and
which checkpoint tensors are fused into the matrix.

With several ranks a matrix is split over them by rows (each rank computes some outputs) or by
columns (each rank reads some inputs, and the ranks add their results)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.ops import Ops
from penstock.parallel.layout import Layout
from penstock.parallel.sharded_weight import Weight
from penstock.quant.fp8 import fp8_copy, multiplies_fp8
from penstock.quant.scheme import PLAIN, Product, Scheme


class Linear:
    """A product: x [T, in] -> [T, out].

    summed: for a matrix split over ranks by columns, the layout whose ranks add their results."""

    def __init__(
        self,
        loaded: dict[str, Weight],
        bias: Weight | None = None,
        *,
        scheme: Scheme = PLAIN,
        summed: Layout | None = None,
    ) -> None:
        self.loaded, self.bias, self.scheme, self._summed = loaded, bias, scheme, summed
        self.product: Product | None = None  # the matrix multiplication, chosen by prepare()

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
        """Returns act(gate) * up [T, out / 2] for a matrix with the gate's rows, then up's, or None
        if no fused operation is faster than two."""
        assert self.product is not None, "a linear is prepared before it is used"
        if self.product.gated is None or self.bias is not None or not isinstance(x, Tensor):
            return None
        return self.product.gated(x, self.product.matrix, activation)

    def form(self, rows: int) -> Form:
        """Returns the representation of its input that the product needs for this many rows: wide,
        eight-bit, pair or fixed point (kernels/fp8_rows.py)."""
        assert self.product is not None, "a linear is prepared before it is used"
        return self.product.form(rows)

    def weights(self) -> Iterator[Weight]:
        yield from self.loaded.values()
        if self.bias is not None:
            yield self.bias

    def prepare(self, ops: Ops) -> None:
        """Arranges the matrix for its operation; call it once, after the weights are loaded."""
        self.product = self.scheme.prepare(ops, self.loaded)

    def copied_bytes(self, ops: Ops | None) -> int:
        """Bytes of `fp8_copy`'s numbers and scales; 0: it makes no copy. ops None: those of a GPU
        that multiplies fp8."""
        matrix = self.loaded["weight"] if self.scheme is PLAIN else None
        if matrix is None or matrix.dtype.itemsize != 2 or (ops and not multiplies_fp8(ops)):
            return 0
        return matrix.numbers + 4 * matrix.shape[0]

    def fp8_copy(self, ops: Ops) -> Linear:
        """Returns a product with an fp8 copy of a matrix that is stored in 16 bits, for numbers
        that need not be exact. Returns itself where that is no faster. Call it after the weights
        are loaded, before `prepare`."""
        if not self.copied_bytes(ops):
            return self
        copy = Linear({}, self.bias, summed=self._summed)
        copy.product = fp8_copy(ops, self.loaded["weight"].value)
        return copy

    def reorder(self, rows: Tensor) -> None:
        """Permutes the matrix's rows, after loading and before prepare: new row n is old row
        rows[n]."""
        for weight in self.weights():
            weight.reorder(rows.to(weight.value.device))

    @property
    def is_summed(self) -> bool:
        """True if the ranks add their results after the product."""
        return self._summed is not None

    @property
    def numbers(self) -> int:
        """Number of parameters of the matrix on this rank, without the bias."""
        return self.loaded["weight"].numbers
