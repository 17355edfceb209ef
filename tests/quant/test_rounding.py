"""Rounding by what a matrix is multiplied by: its products err less than those of the nearest
numbers, whole numbers stay what they are, twice is the same; and a build's stage, which sees the
inputs of each matrix and no padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.build import check_quality
from penstock.build.model_linears import linears
from penstock.build.options import BuildOptions
from penstock.build.round_weights import _at_once, _inputs, _moments, round_weights
from penstock.build.work_sample import WorkSample
from penstock.demo import model_folder
from penstock.kernels.choose import choose
from penstock.layers.maker import Maker
from penstock.quant.integers import to_int
from penstock.quant.rounding import nearest, round_to_products, search_scale
from penstock.quant.write_compressed import store
from penstock.weights.load import load_model
from penstock.weights.write_quantized import write_quantized

pytestmark = pytest.mark.torch


def drawn(out: int, into: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """A matrix, and inputs that go together and are of different sizes."""
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.randn(out, into, generator=draw) * torch.rand(out, 1, generator=draw)
    mix = torch.randn(into, into, generator=draw) * torch.rand(into, generator=draw).exp()
    return matrix, torch.randn(tokens, into, generator=draw) @ mix / into**0.5


def moments_of(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def lost(matrix: Tensor, rows: Tensor, numbers: Tensor, scale: Tensor) -> float:
    """The mean square by which products are off, of the products' own."""
    worth = numbers.float() * scale.float().repeat_interleave(matrix.shape[1] // scale.shape[1], 1)
    return float((rows @ (worth - matrix).T).square().mean() / (rows @ matrix.T).square().mean())


@pytest.mark.parametrize(("into", "group", "seed"), [(128, 32, 1), (320, 64, 2), (384, 128, 3)])
def test_products_err_less_than_those_of_the_nearest_numbers(
    into: int, group: int, seed: int
) -> None:
    """Of inputs that were seen and of others alike: less by searched scales, less still by errors
    made good."""
    matrix, rows = drawn(48, into, 4 * into, seed)
    seen, others = rows.split((2 * into, 2 * into))
    moments = moments_of(seen)
    groups = matrix.view(48, -1, group)
    scale = search_scale(groups, moments.diagonal().view(-1, group), 4, torch.float32)
    for judged in (seen, others):
        usual = lost(matrix, judged, *to_int(matrix, 4, group, torch.float32))
        searched = lost(matrix, judged, nearest(groups, scale, 4).flatten(1), scale)
        rounded = lost(matrix, judged, *round_to_products(matrix, moments, 4, group, torch.float32))
        assert rounded < 0.75 * searched < 0.75 * usual


def test_a_searched_scale_is_no_worse_than_the_usual_one_in_any_group() -> None:
    matrix, rows = drawn(32, 256, 512, 4)
    weights, groups = moments_of(rows).diagonal().view(-1, 64), matrix.view(32, -1, 64)

    def cost(numbers: Tensor, scale: Tensor) -> Tensor:
        return ((numbers * scale[..., None] - groups).square() * weights).sum(2)

    numbers, usual = to_int(matrix, 4, 64, torch.float32)
    found = search_scale(groups, weights, 4, torch.float32)
    assert (
        cost(nearest(groups, found, 4), found) <= cost(numbers.float().view_as(groups), usual)
    ).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_that_four_bits_hold_stay_what_they_are(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    numbers = torch.randint(-7, 8, (16, 128), generator=draw)
    numbers[:, ::32], numbers[3] = 7, 0
    matrix = (
        numbers * 2.0 ** torch.randint(-6, 3, (16, 4), generator=draw).repeat_interleave(32, 1)
    ).to(dtype)
    found, scale = round_to_products(
        matrix, moments_of(torch.randn(300, 128, generator=draw)), 4, 32, dtype
    )
    assert scale.dtype == dtype and found.dtype == torch.int8
    assert torch.equal((found.float() * scale.float().repeat_interleave(32, 1)).to(dtype), matrix)


def test_inputs_that_never_came_and_matrices_of_nothing_are_rounded_to_the_nearest() -> None:
    matrix, rows = drawn(16, 128, 256, 6)
    rows[:, 40:70] = 0
    found, scale = round_to_products(matrix, moments_of(rows), 4, 64, torch.float32)
    assert torch.equal(
        found[:, 40:70].float(), nearest(matrix.view(16, -1, 64), scale, 4).flatten(1)[:, 40:70]
    )
    usual, _ = to_int(matrix, 4, 64, torch.float32)
    assert torch.equal(
        round_to_products(matrix, torch.zeros(128, 128), 4, 64, torch.float32)[0], usual
    )
    assert not round_to_products(torch.zeros(16, 128), moments_of(rows), 4, 64, torch.float32)[
        0
    ].any()


def test_twice_is_the_same() -> None:
    matrix, rows = drawn(24, 192, 400, 7)
    whole = round_to_products(matrix, moments_of(rows), 4, 64, torch.bfloat16)
    again = round_to_products(matrix.clone(), moments_of(rows), 4, 64, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_only_the_way_of_rounding_tells_stored_matrices_apart() -> None:
    matrix, rows = drawn(16, 128, 256, 8)
    usual, rounded = store(matrix, "int4", 64), store(matrix, "int4", 64, moments=moments_of(rows))
    assert layout(usual) == layout(rounded)
    assert not torch.equal(usual["weight_packed"], rounded["weight_packed"])


def layout(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


# --- the stage


def options_of(out: Path, **more: Any) -> dict[str, Any]:
    knobs = {"device": "cpu", "dtype": "float32"}
    asked = BuildOptions(model="demo", out=str(out), quantization="int4", knobs=knobs, **more)
    return dict(msgspec.to_builtins(asked))


def work() -> list[dict[str, Any]]:
    prompts = [list(range(40 + at, 60 + 2 * at)) for at in range(6)]
    sample = WorkSample(
        told="rows", prompts=prompts, sampling=[{}] * 6, outputs=[24] * 6, concurrency=6
    )
    return [dict(msgspec.to_builtins(sample))]


def test_moments_are_those_of_every_token_and_of_no_padding() -> None:
    cpu = torch.device("cpu")
    ops = choose(cpu, torch.float32)
    model = load_model(
        model_folder(), load_format="auto", dtype=torch.float32, device=cpu, ops=ops, seed=0
    )
    chosen = list(linears(model))[:4]
    texts = [list(range(30, 70)), list(range(90, 97)), [5]]
    with torch.inference_mode():
        together = _moments(model, ops, texts, chosen)
        alone = [_moments(model, ops, [text], chosen) for text in texts]
    for at, found in enumerate(together):
        wanted = sum(len(text) * each[at] for text, each in zip(texts, alone, strict=True)) / sum(
            map(len, texts)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_as_many_matrices_are_looked_at_as_there_is_room_for() -> None:
    make = Maker(torch.float32, torch.device("meta"), 1)
    linears_of = [make.linear(str(at), 4, into) for at, into in enumerate((8, 8, 16, 32, 8))]
    cut = _at_once(linears_of, 4 * (8 * 8 + 8 * 8 + 16 * 16))
    assert [[_inputs(each) for each in some] for some in cut] == [[8, 8, 16], [32], [8]]


def test_a_rounded_folder_is_nearer_to_the_model_than_one_of_nearest_numbers(
    tmp_path: Path,
) -> None:
    """And of the same layout; a matrix that is kept wide is not rounded. Three layers of eight are
    rounded."""
    usual, built = tmp_path / "usual", tmp_path / "built"
    kept = "model.layers.0.mlp.down_proj"
    wide = [kept, "model.layers.[3-7].*"]
    found = round_weights(options_of(built, keep_wide=wide), str(model_folder()), work())
    made = built / ".build" / "rounded"
    assert found["matrices"] == len(list(made.iterdir())) > 0 and found["tokens"] > 0
    assert not (made / f"{kept}.safetensors").exists()
    write_quantized(model_folder(), usual, "int4", keep_wide=wide)
    write_quantized(model_folder(), built, "int4", keep_wide=wide, rounded=made)
    plain, rounded = (load_file(folder / "model.safetensors") for folder in (usual, built))
    assert layout(plain) == layout(rounded)
    assert (usual / "config.json").read_text() == (built / "config.json").read_text()
    for name, tensor in load_file(made / "model.layers.1.self_attn.q_proj.safetensors").items():
        assert torch.equal(rounded[f"model.layers.1.self_attn.q_proj.{name}"], tensor)
    off = []
    for folder in (usual, built):
        options = options_of(folder)
        check_quality.score_source(options, str(model_folder()), work())
        off.append(check_quality.score_built(options, {}, {})["kl_mean"])
    assert off[1] < 0.8 * off[0], off
