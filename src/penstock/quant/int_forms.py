"""Integer matrices of checkpoints, in four packings. Each is loaded into the layout of
kernels/int_matrix.py. N: outputs, K: inputs, G: scale groups along K. A word is an int32 that packs
eight 4-bit numbers from the lowest bits up (with 8 bits: four numbers).

  awq      qweight [K, N / 8] words of eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7;
           qzeros [G, N / 8], packed like qweight; scales [G, N]
  gptq     qweight [K / 8, N] words of eight inputs (8 bits: [K / 4, N]);
           qzeros [G, N / 8] words of eight outputs, each the zero point minus one (gptq_v2: the
           zero point); scales [G, N]; g_idx [K], each input's group
  packed   weight_packed [N, K / 8] words of eight inputs (8 bits: [N, K / 4]), to which 8 (128) was
           added; weight_zero_point [N / 8, G] words of eight outputs, 8 (128) added as well;
           weight_scale [N, G]; weight_shape [2]
  plain    weight [N, K] int8; weight_scale [N, G] or [1]; weight_zero_point of the same shape

Sources: AutoAWQ's WQLinear_GEMM, AutoGPTQ's QuantLinear, GPTQModel's second format,
compressed-tensors' pack_to_int32. A checkpoint tensor is first unpacked as a whole and then split
for tensor parallel ranks, so a split never goes through a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.errors import CheckpointError, UsageError
from penstock.kernels.int_matrix import SPAN, pack_four
from penstock.parallel.sharded_weight import FLOATS, Arranged, Expected, Part, Weight
from penstock.quant.beside import no_zeros, read_past
from penstock.quant.stored_quantization import StoredForm

WORDS = frozenset({"I32"})
# position of each of outputs 0 to 7 in an AWQ word; position 0 is the lowest four bits
AWQ_ORDER = (
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
)
SCALES = (1e-5, 2e-5)  # range of random scales for dummy weights
# function: checkpoint tensor, Part of the array made from it -> unsigned numbers
Unpack = Callable[[Tensor, Part], Tensor]


# --- shapes and tensor parallel splits


def at(part: Part, suffix: str, shape: tuple[int, ...]) -> Part:
    """Returns the Part of one of a matrix's checkpoint tensors, which every rank reads whole. part:
    the matrix. suffix: of the tensor's name. shape: of the tensor."""
    return Part(f"{part.name}.{suffix}", shape)


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Returns the shape in bytes of a matrix [out, in] with `bits` bits per number: [out, in * bits
    / 8]."""
    return (shape[0], shape[1] * bits // 8)


def array(part: Part, shape: tuple[int, ...]) -> Part:
    """Returns the Part of an array that is made from a matrix's checkpoint tensor. shape: [out,
    columns]. The array is split among ranks like the matrix. If the matrix is split by inputs and
    the array has a single column, every rank holds the whole array."""
    if part.cut == 1 and shape[1] == 1:
        return Part(part.name, shape)
    return part.over(part.name, shape)


def cut_groups(part: Part, group: int, instead: str = "the model's unquantized checkpoint") -> int:
    """Returns the number of scale groups of a row that this rank holds. part: the matrix. group:
    inputs of a group. Raises UsageError if the tensor parallel split would go through a group.
    instead: the checkpoint that the error advises to use."""
    into = part.shape[1]
    if part.cut != 1 or group == into:
        return into // group
    if into % (part.shares * group):
        raise UsageError(
            f"{part.name} has {into // group} groups of {group} inputs, which {part.shares} ranks"
            f" cannot divide: take fewer, or {instead}",
            param="tensor_parallel_size",
        )
    return into // part.shares // group


def check_form(part: Part, form: StoredForm) -> None:
    """Raises an error unless the matrix's sizes are multiples of a scale group and of the numbers
    in an int32 word, and its tensor parallel split goes between groups."""
    out, into = part.shape
    group = form.group or into
    per_word = 32 // form.bits
    if into % group or (form.bits == 4 and group % SPAN):
        raise CheckpointError(
            f"{part.name} has {into} inputs, in groups of {group}: read are groups that divide"
            " them, and of four bits multiples of 32: take another quantization of this model"
        )
    if form.packing in ("awq", "gptq", "gptq_v2") and (out % per_word or into % per_word):
        raise CheckpointError(
            f"{part.name} has {out} outputs and {into} inputs, and a word of {form.packing} holds"
            f" {per_word} of them: take another quantization of this model"
        )
    cut_groups(part, group)
    if part.cut == 1 and form.bits == 4 and into % (part.shares * SPAN):
        raise UsageError(
            f"{part.name} has {into} inputs in spans of 32, which {part.shares} ranks cannot divide"
        )


# --- int32 words and the numbers packed in them


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpacks words [rows, n], int32 or bytes, to unsigned numbers of `bits` bits, uint8 [rows,
    numbers]. The first number is in the lowest bits."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _laid_out(numbers: Tensor, bits: int) -> Tensor:
    """Packs unsigned numbers [N, K] uint8 of `bits` bits into the layout of
    kernels/int_matrix.py."""
    if bits == 4:
        return pack_four(numbers.contiguous())
    return (numbers ^ 0x80).view(torch.int8)  # maps 0 to 255 to -128 to 127


def _middle(bits: int) -> int:
    """Returns the unsigned number that represents 0 in symmetric quantization: 8 or 128."""
    return 1 << (bits - 1)


def _numbers(
    form: StoredForm,
    parts: Sequence[Part],
    stored: list[Part],
    device: torch.device,
    unpack: Unpack,
) -> Arranged:
    """Returns the Weight that loads a matrix's integers. parts: the matrices. stored: the Parts of
    their checkpoint tensors. unpack: function from a checkpoint tensor to unsigned numbers [N, K].
    """
    arrays = [array(part, packed_shape(part.shape, form.bits)) for part in parts]
    dtype = torch.int8 if form.bits == 8 else torch.uint8
    return Arranged(
        stored,
        arrays,
        dtype,
        device,
        stored=WORDS,
        counts=8 // form.bits,
        arrange=lambda words, array: _laid_out(unpack(words, array), form.bits),
    )


def _groups(form: StoredForm, part: Part) -> int:
    """Returns the number of scale groups of a row of the whole matrix."""
    return part.shape[1] // (form.group or part.shape[1])


def _scales(
    form: StoredForm,
    parts: Sequence[Part],
    stored: list[Part],
    dtype: torch.dtype,
    device: torch.device,
    transposed: bool,
    kinds: frozenset[str] = FLOATS,
    drawn: tuple[float, float] = SCALES,
) -> Arranged:
    """Returns the Weight that loads a matrix's scales, [N, G] of `dtype`. stored: the Parts of the
    checkpoint tensors. transposed: True: these are [G, N]. kinds: their allowed dtypes. drawn:
    range of dummy scales."""
    arrays = [array(part, (part.shape[0], _groups(form, part))) for part in parts]

    def arrange(scales: Tensor, array: Part) -> Tensor:
        found = scales.t() if transposed else scales
        return found.reshape(-1, array.shape[1]).expand(array.shape[0], -1)

    return Arranged(stored, arrays, dtype, device, stored=kinds, arrange=arrange, drawn=drawn)


def _zeros(
    form: StoredForm,
    parts: Sequence[Part],
    stored: list[Part],
    dtype: torch.dtype,
    device: torch.device,
    zeros_of: Unpack,
) -> Arranged:
    """Returns the Weight that loads a matrix's zero points, [N, G] of `dtype`. stored: the Parts of
    the checkpoint tensors. zeros_of: function from a checkpoint tensor to unsigned zero points [N,
    G]."""
    arrays = [array(part, (part.shape[0], _groups(form, part))) for part in parts]
    below = 128 if form.bits == 8 else 0

    def arrange(words: Tensor, array: Part) -> Tensor:
        found: Tensor = zeros_of(words, array)
        return (found.int() - below).to(dtype)

    return Arranged(stored, arrays, dtype, device, stored=WORDS, arrange=arrange)


# --- the four packings


def _awq(
    form: StoredForm, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
) -> dict[str, Weight]:
    def in_order(words: Tensor, array: Part) -> Tensor:
        """Unpacks words [rows, N / 8] of eight outputs, in AWQ's order, to numbers [N, rows]."""
        numbers = unpack_words(words, 4).view(words.shape[0], -1, 8)
        return numbers[:, :, list(AWQ_ORDER)].flatten(1).t()

    groups = [_groups(form, part) for part in parts]
    each = list(zip(parts, groups, strict=True))
    weights: dict[str, Weight] = {
        "weight": _numbers(
            form,
            parts,
            [at(p, "qweight", (p.shape[1], p.shape[0] // 8)) for p in parts],
            device,
            in_order,
        ),
        "scale": _scales(
            form, parts, [at(p, "scales", (g, p.shape[0])) for p, g in each], dtype, device, True
        ),
    }
    if form.zeros:
        stored = [at(p, "qzeros", (g, p.shape[0] // 8)) for p, g in each]
        weights["zero"] = _zeros(form, parts, stored, dtype, device, in_order)
    return weights


def _gptq(
    form: StoredForm, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
) -> dict[str, Weight]:
    per_word, added = 32 // form.bits, 1 if form.packing == "gptq" else 0

    def zeros_of(words: Tensor, array: Part | None = None) -> Tensor:
        """Unpacks words [G, N / 8] to zero points [N, G]. They are int32, since a stored four-bit
        zero point plus one may be 16."""
        return unpack_words(words, form.bits).t().int() + added

    def trivial(order: Tensor, part: Part) -> bool:
        size = form.group or part.shape[0]
        return torch.equal(order, torch.arange(part.shape[0], dtype=order.dtype) // size)

    each = [(part, _groups(form, part)) for part in parts]
    qweight = [at(p, "qweight", (p.shape[1] // per_word, p.shape[0])) for p in parts]
    qzeros = [at(p, "qzeros", (g, p.shape[0] // per_word)) for p, g in each]
    weights: dict[str, Weight] = {
        "weight": _numbers(
            form, parts, qweight, device, lambda words, _: unpack_words(words.t(), form.bits)
        ),
        "scale": _scales(
            form, parts, [at(p, "scales", (g, p.shape[0])) for p, g in each], dtype, device, True
        ),
        "order": Expected(
            [at(p, "g_idx", (p.shape[1],)) for p in parts],
            device,
            stored=WORDS,
            right=trivial,
            optional=True,
            wrong=(
                "has its groups in another order (act-order), not read: take a checkpoint with"
                " desc_act false"
            ),
        ),
    }
    # Early GPTQ writers store a bias of zeros for every matrix; it is checked and dropped. If the
    # model has a bias, the caller replaces this entry.
    weights["bias"] = Expected(
        [at(p, "bias", (p.shape[0],)) for p in parts],
        device,
        stored=FLOATS,
        optional=True,
        right=lambda bias, _: not bias.any(),
        wrong="is a bias, which config.json says the model hasn't",
    )
    if form.zeros:
        weights["zero"] = _zeros(form, parts, qzeros, dtype, device, zeros_of)
    else:
        weights["zeros"] = Expected(
            qzeros,
            device,
            stored=WORDS,
            right=lambda words, _: bool((zeros_of(words) == _middle(form.bits)).all()),
            wrong="has zeros that are not the middle, and config.json says sym: set sym to false",
        )
    return weights


def _packed(
    form: StoredForm, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
) -> dict[str, Weight]:
    per_word = 32 // form.bits

    def zeros_of(words: Tensor, array: Part) -> Tensor:
        """Unpacks words [ceil(N / 8), G] of eight outputs to zero points [N, G]."""
        return unpack_words(words.t(), form.bits).t()[: array.shape[0]]

    each = [(part, _groups(form, part)) for part in parts]
    packed = [at(p, "weight_packed", (p.shape[0], -(-p.shape[1] // per_word))) for p in parts]
    into = parts[0].shape[1]
    shapes = {f"{part.name}.weight_shape": list(part.shape) for part in parts}
    weights: dict[str, Weight] = {
        "weight": _numbers(
            form, parts, packed, device, lambda words, _: unpack_words(words, form.bits)[:, :into]
        ),
        "scale": _scales(
            form,
            parts,
            [at(p, "weight_scale", (p.shape[0], g)) for p, g in each],
            dtype,
            device,
            False,
        ),
        "shape": Expected(
            [at(p, "weight_shape", (2,)) for p in parts],
            device,
            stored=frozenset({"I64", "I32"}),
            right=lambda told, part: told.tolist() == shapes[part.name],
            wrong=(
                "is not the shape that config.json asks for: config.json and weights must be of one"
                " model"
            ),
        ),
    }
    if form.zeros:
        stored = [at(p, "weight_zero_point", (-(-p.shape[0] // per_word), g)) for p, g in each]
        weights["zero"] = _zeros(form, parts, stored, dtype, device, zeros_of)
    return weights | read_past(parts, device)


def _plain(
    form: StoredForm, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
) -> dict[str, Weight]:
    whole = form.scales == "tensor"
    each = [(part, _groups(form, part)) for part in parts]
    arrays = [array(part, part.shape) for part in parts]
    beside = [at(p, "weight_scale", (1,) if whole else (p.shape[0], g)) for p, g in each]
    zeros = [
        Part(scale.name.replace("weight_scale", "weight_zero_point"), scale.shape)
        for scale in beside
    ]
    weights: dict[str, Weight] = {
        "weight": Arranged(
            [at(p, "weight", p.shape) for p in parts],
            arrays,
            torch.int8,
            device,
            stored=frozenset({"I8"}),
            arrange=lambda numbers, _: numbers.to(torch.int8),
            counts=1,
            drawn=(-127.0, 127.0),
        ),
        "scale": _scales(form, parts, beside, dtype, device, False),
    }
    if form.zeros:
        whole_numbers, drawn = frozenset({"I8"}), (-8.0, 8.0)
        weights["zero"] = _scales(form, parts, zeros, dtype, device, False, whole_numbers, drawn)
    else:
        weights["zeros"] = no_zeros(zeros, device)
    return weights | read_past(parts, device)


FORMS = {"awq": _awq, "gptq": _gptq, "gptq_v2": _gptq, "packed": _packed, "plain": _plain}
