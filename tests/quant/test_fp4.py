"""Four-bit floats: what they are worth, bit for bit as the formulas say and as compressed-tensors
computes them; NVFP4 made of wide numbers is that library's, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor
from torch._dynamo import config as dynamo

from penstock.errors import UsageError
from penstock.kernels.choose import choose
from penstock.kernels.fp4_matrix import E2M1, scales_of, widen_fp4
from penstock.parallel.sharded_weight import Part
from penstock.quant.fp4 import LEAST_SCALE, Fp4FromFloats, MadeFp4, to_nvfp4
from penstock.quant.write_compressed import store

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
NVFP4 = QuantizationScheme(targets=["Linear"], **NVFP4A16)


@pytest.fixture(autouse=True)
def as_written() -> Iterator[None]:
    """The library compiles its rounding, which takes longer than it."""
    before, dynamo.disable = dynamo.disable, True  # type: ignore[attr-defined]
    yield
    dynamo.disable = before  # type: ignore[attr-defined]


def drawn(out: int, into: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(out, into, generator=torch.Generator().manual_seed(seed)) * 0.03).to(dtype)


def test_every_power_is_exact() -> None:
    powers = torch.arange(255, dtype=torch.uint8)
    assert scales_of(powers[None], None)[0].tolist() == [
        2.0 ** (power - 127) for power in range(255)
    ]


def test_scales_round_once_whether_the_whole_s_divides_or_multiplies() -> None:
    """For every e4m3 scale, and divisors all over float32's range whose reciprocals it has
    none of."""
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    draw = torch.Generator().manual_seed(3)
    wholes = torch.exp2(torch.rand(4000, generator=draw) * 80 - 40) * (
        1 + torch.rand(4000, generator=draw)
    )
    scale = every.expand(len(wholes), -1)
    assert torch.equal(
        scales_of(scale, wholes.double().reciprocal()), every.float() / wholes[:, None]
    )
    assert torch.equal(scales_of(scale, wholes.double()), every.float() * wholes[:, None])
    assert not torch.equal(
        every.float() * wholes.reciprocal()[:, None], every.float() / wholes[:, None]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["usual", "large", "with nothing in it", "nothing"])
def test_made_numbers_are_the_library_s_byte_for_byte(kind: str, dtype: torch.dtype) -> None:
    wide = drawn(24, 96, 1, dtype) * (500 if kind == "large" else 1)
    if kind == "with nothing in it":
        wide[0], wide[1, :40], wide[2, 5] = 0, wide[1, :40] * 1e-5, -0.0
    elif kind == "nothing":
        wide = torch.zeros_like(wide)
    groups, whole = wide.unflatten(1, (-1, 16)), generate_gparam(wide.min(), wide.max())
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), NVFP4.weights, global_scale=whole)
    library = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    theirs = library.compress(
        {"weight": wide, "weight_scale": scale, "weight_global_scale": whole}, NVFP4
    )
    ours = store(wide, "nvfp4", 0)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_each_number_is_the_nearest_and_between_two_the_even_one() -> None:
    """With a scale of 1: the largest number is 6, the whole's scale is 448, and a group's 448 of
    it."""
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([*E2M1, *halfway, -0.75])
    above, below = row.nextafter(torch.full((16,), 9.0)), row.nextafter(torch.full((16,), -9.0))
    said = []
    for each in (row, above.clamp(max=6), below):
        numbers, scale, whole = to_nvfp4(torch.cat((torch.full((1,), 6.0), each[1:]))[None])
        assert float(whole) == 448 and scale.tolist() == [[448]]
        said.append(
            [(-1 if number & 8 else 1) * E2M1[number & 7] for number in numbers[0].tolist()][1:]
        )
    assert said[0] == [*E2M1[1:], 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0]
    assert said[1] == [*E2M1[1:], 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5]
    assert said[2] == [*E2M1[1:], 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -1.0]


def test_float16_has_room_for_the_whole_s_scale() -> None:
    wide = drawn(8, 64, 5).half()
    for half, single in zip(to_nvfp4(wide), to_nvfp4(wide.float()), strict=True):
        assert torch.equal(half.float(), single.float())


@pytest.mark.parametrize("shared", [None, 0.5])
def test_made_weights_are_worth_what_the_library_says_of_the_stored(shared: float | None) -> None:
    wide = drawn(24, 96, 2)
    stored = store(wide, "nvfp4", 0, most=None if shared is None else torch.tensor(shared))
    library = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    scale = (stored["weight_scale"].float() / stored["weight_global_scale"]).repeat_interleave(
        16, 1
    )
    worth = (
        library.decompress(
            {
                "weight_packed": stored["weight_packed"],
                "weight_scale": torch.ones(24, 6).to(torch.float8_e4m3fn),
                "weight_global_scale": torch.ones(1),
            },
            NVFP4,
        )["weight"].float()
        * scale
    )
    assert (worth - wide).abs().max() < 0.3 * wide.abs().max() and (
        worth - wide
    ).abs().mean() < 0.1 * wide.abs().mean()
    if shared is None:
        made = made_of({"a": wide})
        assert torch.equal(widen_fp4(made.value, made.scale, made.whole), worth)


def made_of(
    matrices: dict[str, Tensor], share: tuple[int | None, int, int] = (None, 1, 0)
) -> MadeFp4:
    parts = [Part(name, tuple(matrix.shape), *share) for name, matrix in matrices.items()]
    weight = Fp4FromFloats().weights(parts, torch.float32, CPU)["weight"]
    assert isinstance(weight, MadeFp4)
    for (part, place), matrix in zip(list(weight.places()), matrices.values(), strict=True):
        weight.fill(part, place, matrix)
    return weight


def test_shares_of_what_is_made_are_pieces_of_the_whole() -> None:
    matrices = {"a": drawn(24, 128, 1), "b": drawn(8, 128, 2) * 3}
    whole = made_of(matrices)
    worth = widen_fp4(whole.value, whole.scale, whole.whole)
    assert whole.numbers == 32 * 128 and whole.nbytes == 32 * (64 + 8 + 8)
    rows, columns = ([made_of(matrices, (cut, 2, share)) for share in range(2)] for cut in range(2))
    by_rows = [widen_fp4(each.value, each.scale, each.whole) for each in rows]
    assert torch.equal(
        torch.cat([by_rows[0][:12], by_rows[1][:12], by_rows[0][12:], by_rows[1][12:]]), worth
    )
    by_columns = [widen_fp4(each.value, each.scale, each.whole) for each in columns]
    assert torch.equal(torch.cat(by_columns, 1), worth)
    turned = torch.arange(31, -1, -1)
    whole.reorder(turned)
    assert torch.equal(widen_fp4(whole.value, whole.scale, whole.whole), worth[turned])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_by_the_dequantised_matrix(dtype: torch.dtype) -> None:
    ops, made = choose(CPU, dtype), made_of({"a": drawn(40, 64, 4)})
    worth = widen_fp4(made.value, made.scale, made.whole)
    product = Fp4FromFloats().prepare(ops, {"weight": made})
    x, bias = drawn(3, 64, 9, dtype) * 30, drawn(1, 40, 8, dtype)[0]
    right = x.double() @ worth.to(dtype).double().T + bias.double()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    found = product.multiply(x, product.matrix, bias)
    assert (
        found.dtype == dtype
        and (found.double() - right).abs().max() < tolerance * right.abs().max()
    )


def test_weights_take_less_than_three_tenths_of_bfloat16_s() -> None:
    meta = torch.device("meta")
    made = Fp4FromFloats().weights([Part("a", (4096, 4096))], torch.bfloat16, meta)["weight"]
    assert made.nbytes / (2 * 4096 * 4096) < 0.283


def test_what_no_numbers_are_made_of_is_named() -> None:
    with pytest.raises(
        UsageError, match="a has 48 inputs, which 32 doesn't divide: NVFP4 cannot be made of it"
    ):
        made_of({"a": drawn(8, 48, 1)})
    with pytest.raises(
        UsageError, match="a has 3 groups of 32 inputs, which 2 ranks cannot divide"
    ):
        made_of({"a": drawn(8, 96, 1)}, (1, 2, 0))


def test_a_zero_scale_is_the_library_s_least() -> None:
    assert to_nvfp4(torch.zeros(1, 16))[1].tolist() == [[LEAST_SCALE]]
