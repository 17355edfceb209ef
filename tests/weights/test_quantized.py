"""Quantized checkpoints, each format written by hand: loaded through config.json they compute what
their plain dequantised form does in float32, whole and over ranks; what doesn't fit is refused by
name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_forms import AWQ, FORMS, GPTQ, compressed, gptq, ints, packed, plain_int8
from quantized_model import (
    CONFIG,
    HIDDEN,
    MIDDLE,
    SHAPES,
    fused,
    linears,
    load,
    rows,
    times,
    wide_tensors,
    write,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import CheckpointError, UsageError
from penstock.parallel.layout import Layout

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", FORMS)
def test_a_quantized_checkpoint_multiplies_as_its_dequantised_form(
    tmp_path: Path, name: str
) -> None:
    worth = write(tmp_path, name)
    for fused_name, linear in linears(load(tmp_path)).items():
        matrix = fused(worth, fused_name)
        x = rows(matrix.shape[1])
        right = (x.double() @ matrix.double().T).float()
        torch.testing.assert_close(
            times(linear, x), right, rtol=1e-5, atol=2e-6 * float(right.abs().max())
        )


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("fp8 tensor", "weight_scale"),
        ("fp8 block", "weight_scale"),
        ("hf fp8", "weight_scale_inv"),
        ("awq 32", "scales"),
        ("gptq 32", "scales"),
        ("packed 4", "weight_scale"),
        ("int8", "weight_scale"),
    ],
)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_scale_that_is_no_finite_number_is_named(
    tmp_path: Path, name: str, scale: str, number: float
) -> None:
    write(tmp_path, name)
    path, at = tmp_path / "model.safetensors", f"model.layers.0.mlp.up_proj.{scale}"
    tensors = load_file(path)
    tensors[at].view(-1)[-1] = number
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{at}' holds what is no finite number"):
        load(tmp_path)


@pytest.mark.parametrize("name", FORMS)
def test_two_ranks_have_together_what_one_has(tmp_path: Path, name: str) -> None:
    worth = write(tmp_path, name)
    cuts_a_row = "block" in name or name == "hf fp8" or "64" in name or "packed 4 zeros" in name
    if (
        cuts_a_row
    ):  # 128 inputs in two blocks of 64 each can be; 192 in three of 64, or blocks of 128, can't
        with pytest.raises(UsageError, match="ranks"):
            load(tmp_path, layout=Layout(0, 2))
        return
    shares = [linears(load(tmp_path, layout=Layout(rank, 2))) for rank in range(2)]
    for fused_name in ("o", "down"):
        matrix = fused(worth, fused_name)
        x = rows(matrix.shape[1])
        halves = x.chunk(2, 1)
        both = sum(
            times(share[fused_name], half) for share, half in zip(shares, halves, strict=True)
        )
        torch.testing.assert_close(both, x @ matrix.T, rtol=1e-4, atol=1e-4)
    x = rows(HIDDEN)
    gate_up = torch.cat([times(share["gate_up"], x).view(5, 2, -1) for share in shares], 2).view(
        5, -1
    )
    torch.testing.assert_close(gate_up, x @ fused(worth, "gate_up").T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", ["fp8", "int8", "int4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_are_drawn_for_what_is_made(
    tmp_path: Path, made: str, dtype: torch.dtype
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model, again = (load(tmp_path, dtype, load_format="dummy", quantization=made) for _ in range(2))
    wide = load(tmp_path, dtype, load_format="dummy")
    assert model.weights_bytes < wide.weights_bytes
    for name, linear in linears(model).items():
        x = rows(fused_width(name)).to(dtype)
        found = times(linear, x)
        assert found.float().std() > 1e-4 and torch.equal(found, times(linears(again)[name], x))


@pytest.mark.parametrize("name", FORMS)
def test_dummy_weights_are_drawn_for_what_is_stored(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": FORMS[name][0]})
    )
    for fused_name, linear in linears(load(tmp_path, load_format="dummy")).items():
        found = times(linear, rows(fused_width(fused_name)))
        assert found.isfinite().all() and found.std() > 0


def fused_width(name: str) -> int:
    return MIDDLE if name == "down" else HIDDEN


@pytest.mark.parametrize("made, bits", [("int8", 8), ("int4", 4)])
def test_made_integers_are_the_nearest(tmp_path: Path, made: str, bits: int) -> None:
    tensors = wide_tensors()
    drawn = {
        at: torch.randn(shape, generator=torch.Generator().manual_seed(n))
        for n, (at, shape) in enumerate(SHAPES.items())
    }
    save_file(
        tensors | {f"model.layers.0.{at}.weight": t for at, t in drawn.items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name, linear in linears(load(tmp_path, quantization=made)).items():
        matrix = fused(drawn, name)
        group = matrix.shape[1] if bits == 8 else {128: 128, 192: 64}[matrix.shape[1]]
        found = times(linear, torch.eye(matrix.shape[1])).T
        step = matrix.unflatten(1, (-1, group)).abs().amax(2, keepdim=True) * 2 / (2**bits - 1)
        off = (found - matrix).unflatten(1, (-1, group)).abs() / step
        assert off.max() < 0.5001 and off.mean() > 0.2


def test_the_bytes_are_the_scheme_s(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    matrices = sum(out * into for out, into in SHAPES.values())
    scales = sum(out for out, _ in SHAPES.values())
    wide = load(tmp_path, torch.bfloat16, load_format="dummy")
    eight = load(tmp_path, torch.bfloat16, load_format="dummy", quantization="int8")
    assert wide.weights_bytes - eight.weights_bytes == matrices - 2 * scales
    assert sum(w.numbers for w in wide.weights()) == sum(w.numbers for w in eight.weights())


def test_what_a_format_says_beside_its_numbers_is_checked(tmp_path: Path) -> None:
    write(tmp_path, "gptq 64 sym")
    tensors = load_file(tmp_path / "model.safetensors")
    at = "model.layers.0.mlp.down_proj"
    changes: list[tuple[str, Tensor | None, str]] = [
        ("g_idx", torch.arange(MIDDLE, dtype=torch.int32).flip(0) // 64, "act-order"),
        ("qzeros", tensors[f"{at}.qzeros"] + 1, "set sym to false"),
        ("scales", None, "lack tensor"),
        ("qweight", tensors[f"{at}.qweight"].float(), "is F32, and this checkpoint's scheme has"),
    ]
    for suffix, tensor, said in changes:
        changed = {name: t for name, t in tensors.items() if name != f"{at}.{suffix}"}
        save_file(
            changed if tensor is None else changed | {f"{at}.{suffix}": tensor},
            tmp_path / "model.safetensors",
        )
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path)
    save_file(
        {n: t for n, t in tensors.items() if not n.endswith("g_idx")},
        tmp_path / "model.safetensors",
    )
    load(tmp_path)  # some writers leave it out


def test_biases_of_zeros_are_read_past_and_others_are_not(tmp_path: Path) -> None:
    """Early writers of GPTQ have one for every matrix. A model's own are read as ever."""
    worth = write(tmp_path, "gptq 32")
    tensors = load_file(tmp_path / "model.safetensors")
    biases = {f"model.layers.0.{at}.bias": torch.zeros(out) for at, (out, _) in SHAPES.items()}
    save_file(tensors | biases, tmp_path / "model.safetensors")
    x = rows(MIDDLE)
    torch.testing.assert_close(
        times(linears(load(tmp_path))["down"], x), x @ fused(worth, "down").T, rtol=1e-4, atol=1e-4
    )
    biases = {name: bias + 1 for name, bias in biases.items()}
    save_file(tensors | biases, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"is a bias, which config.json says the model hasn't"
    ):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"attention_bias": True, "mlp_bias": True})
    )
    for linear in linears(load(tmp_path)).values():
        assert torch.equal(linear.bias.value, torch.ones_like(linear.bias.value))


def test_a_wrong_weight_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "packed 4")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_shape"] = torch.tensor([HIDDEN, MIDDLE + 1])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_shape' is not the shape"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name, asked, said",
    [
        ("awq 32", "fp8", "its config.json says awq"),
        ("hf fp8", "int8", "its config.json says fp8"),
        ("awq 32", "gptq", "its config.json says awq"),
        ("awq 32", "awq", None),
        ("awq 32", "int4", None),
        ("hf fp8", "fp8", None),
        ("int8", "compressed-tensors", None),
    ],
)
def test_a_quantized_checkpoint_is_taken_as_it_is(
    tmp_path: Path, name: str, asked: str, said: str | None
) -> None:
    write(tmp_path, name)
    if said is None:
        load(tmp_path, quantization=asked)
        return
    with pytest.raises(UsageError, match=said):
        load(tmp_path, quantization=asked)


@pytest.mark.parametrize("asked", ["awq", "gptq", "compressed-tensors"])
def test_what_only_a_checkpoint_can_have_is_not_made(tmp_path: Path, asked: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UsageError, match="this one is wide"):
        load(tmp_path, load_format="dummy", quantization=asked)


def test_fused_matrices_of_two_schemes_are_refused(tmp_path: Path) -> None:
    config = {**GPTQ, "group_size": 32, "dynamic": {r"-:.*\.k_proj": {}}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"q_proj.*must have one scheme"):
        load(tmp_path, load_format="dummy")


def test_groups_that_don_t_divide_a_row_are_refused(tmp_path: Path) -> None:
    config = {**AWQ, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match="down_proj has 192 inputs, in groups of 128"):
        load(tmp_path, load_format="dummy")


def test_bfloat16_models_take_them_too(tmp_path: Path) -> None:
    for name in FORMS:
        worth = write(tmp_path, name)
        for fused_name, linear in linears(load(tmp_path, torch.bfloat16)).items():
            matrix = fused(worth, fused_name)
            x = rows(matrix.shape[1]).bfloat16()
            right = x.float() @ matrix.T
            assert (times(linear, x).float() - right).abs().max() < 0.02 * right.abs().max(), (
                name,
                fused_name,
            )


def test_forms_by_hand_differ() -> None:
    """The helpers' own sanity: each is worth something else than zeros, and zeros matter."""
    assert (
        gptq(8, 32, 32, 0)[1].std() > 0
        and packed(8, 32, 32, 0)[1].std() > 0
        and plain_int8(8, 32, 32, 0)[1].std() > 0
    )
    assert not torch.equal(gptq(8, 32, 32, 0)[1], gptq(8, 32, 32, 0, sym=True)[1])
    assert compressed(ints(4, 32), "pack-quantized")["format"] == "pack-quantized"
