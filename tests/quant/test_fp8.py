"""Float8 from disk: numbers and scales are loaded through the tree, cut for ranks, and multiplied
by right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.kernels.choose import choose
from penstock.layers.linear import Linear
from penstock.layers.maker import Maker
from penstock.models.build_model import build_model
from penstock.models.decoder import Decoder
from penstock.models.read_config import model_config_of
from penstock.parallel.layout import Layout
from penstock.quant.fp8 import Fp8
from penstock.quant.scheme import Plain, Scheme
from penstock.weights.place import find_weights, load_weights

pytestmark = pytest.mark.torch

CPU, INTO = torch.device("cpu"), 48
PARTS = [("q", 32, 4), ("k", 16, 2), ("v", 16, 2)]


def quantized(out: int, by: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix [out, INTO], its e4m3 numbers, and its scales as compressed-tensors writes them."""
    matrix = (
        torch.randn(out, INTO, generator=torch.Generator().manual_seed(seed))
        * torch.arange(1, out + 1)[:, None]
    )
    most = matrix.abs().amax(1, keepdim=True) if by == "channel" else matrix.abs().max().view(1)
    scale = most / 448.0
    return matrix, (matrix / scale).to(torch.float8_e4m3fn), scale


def checkpoint(by: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors on disk by name, and what each matrix is worth in float32."""
    stored, worth = {}, {}
    for seed, (name, out, _) in enumerate(PARTS):
        _, numbers, scale = quantized(out, by, seed)
        stored |= {f"{name}.weight": numbers, f"{name}.weight_scale": scale}
        worth[name] = numbers.float() * scale
    return stored, worth


def filled(linear: Linear, stored: dict[str, Tensor]) -> Linear:
    for weight in linear.weights():
        for part, place in weight.places():
            if not weight.optional:
                weight.fill(part, place, stored[part.name])
    linear.prepare(choose(CPU, torch.float32))
    return linear


@pytest.mark.parametrize("by", ["channel", "tensor"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_fused_float8_product_is_that_of_its_numbers_times_their_scales(
    by: str, ranks: int
) -> None:
    stored, worth = checkpoint(by)
    x = torch.randn(5, INTO, generator=torch.Generator().manual_seed(9))
    scheme, whole = Fp8(by), {name: [] for name, _, _ in PARTS}
    for rank in range(ranks):
        make = Maker(torch.float32, CPU, 1, Layout(rank, ranks), lambda name: scheme)
        linear = filled(make.column_linear(PARTS, INTO), stored)
        sizes = [out // min(ranks, pieces) for _, out, pieces in PARTS]
        found = linear(choose(CPU, torch.float32), x).split(sizes, dim=1)
        for (name, _, pieces), share in zip(PARTS, found, strict=True):
            if rank % max(1, ranks // pieces) == 0:
                whole[name].append(share)
    for name, shares in whole.items():
        torch.testing.assert_close(torch.cat(shares, 1), x @ worth[name].T, rtol=1e-5, atol=1e-3)


def test_matrices_that_are_multiplied_together_have_one_scheme() -> None:
    schemes: dict[str, Scheme] = {"q": Fp8(), "k": Plain(), "v": Plain()}
    with pytest.raises(CheckpointError, match="must have one scheme"):
        Maker(torch.float32, CPU, 1, scheme_of=schemes.__getitem__).column_linear(PARTS, INTO)


CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": INTO,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def model_of(folder: Path, scheme_of: object) -> Decoder:
    return build_model(
        model_config_of(dict(CONFIG), str(folder)), torch.float32, CPU, scheme_of=scheme_of
    )  # type: ignore[arg-type]


def test_a_checkpoint_with_float8_matrices_is_loaded_and_one_without_is_refused(
    tmp_path: Path,
) -> None:
    fp8 = Fp8()
    model = model_of(tmp_path, lambda name: fp8 if "_proj" in name else Plain())
    tensors = {}
    kept = [weight for weight in model.weights() if not weight.optional]
    for number, weight in enumerate(kept):
        for part in weight.parts:
            drawn = torch.randn(part.shape, generator=torch.Generator().manual_seed(number))
            tensors[part.name] = drawn.to(weight.dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(model, find_weights(model, tmp_path))
    for weight in kept:
        for part, place in weight.places():
            assert torch.equal(place.float().view(part.shape), tensors[part.name].float()), (
                part.name
            )
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(wide, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"is F32, and this checkpoint's scheme has \(F8_E4M3\)"
    ):
        find_weights(model, tmp_path)
