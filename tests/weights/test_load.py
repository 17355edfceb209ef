"""Loading: fused, tied and sharded weights land where they belong; every broken folder is one clear
line."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_bounds import bounded
from safetensors.torch import load_file, save_file

from penstock.errors import CapacityError, CheckpointError
from penstock.kernels.choose import choose
from penstock.layers.decoder_layer import DecoderLayer
from penstock.layers.mlp import Mlp
from penstock.models.build_model import build_model
from penstock.models.decoder import Decoder
from penstock.models.model_config import MOST_OF
from penstock.models.read_config import read_model_config
from penstock.weights.load import load_model
from penstock.weights.place import dummy_weights, find_weights, load_weights

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "dtype": "float32",
}
Q0 = "model.layers.0.self_attn.q_proj.weight"


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What transformers would save, written out by hand."""
    hidden, middle, kv = 16, 24, 8
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            shapes |= {
                f"{at}self_attn.{name}_proj.weight": (out, hidden),
                f"{at}self_attn.{name}_proj.bias": (out,),
            }
        shapes |= {f"{at}mlp.{name}_proj.weight": (middle, hidden) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, middle)
        shapes |= {
            f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
    return shapes


def _write(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], shards: int = 1
) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names, weight_map = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def _tensors(config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in _shapes(config).items()}


def _fill(folder: Path, dtype: torch.dtype = torch.float32, seed: int | None = None) -> Decoder:
    """Filled (with dummies where there is a seed), not yet arranged for its kernels: the weights
    can be looked at."""
    model = build_model(read_model_config(folder), dtype, CPU)
    if seed is None:
        load_weights(model, find_weights(model, folder))
    else:
        dummy_weights(model, seed)
    return model


def places(model: Decoder) -> dict[str, torch.Tensor]:
    return {part.name: place for weight in model.weights() for part, place in weight.places()}


def _head(model: Decoder) -> torch.Tensor:
    return model.head.loaded["weight"].value


def _load(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Decoder:
    options: dict[str, Any] = {"load_format": "auto", "seed": 0} | more
    return load_model(
        folder, dtype=dtype, device=CPU, ops=choose(CPU, dtype, "reference"), **options
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_lands_in_its_place(tmp_path: Path, shards: int) -> None:
    tensors = _tensors()
    _write(tmp_path, tensors, CONFIG, shards)
    model = _fill(tmp_path)
    q, k, v = (tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    gate, up = (tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    layer = model.blocks[1]
    assert isinstance(layer, DecoderLayer) and isinstance(layer.mlp, Mlp)
    assert torch.equal(layer.mixer.qkv.loaded["weight"].value, torch.cat((q, k, v)))
    assert torch.equal(layer.mlp.gate_up.loaded["weight"].value, torch.cat((gate, up)))
    assert torch.equal(_head(model), tensors["lm_head.weight"])
    assert model.weights_bytes == sum(t.numel() * 4 for t in tensors.values())
    found = places(model)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_converted_to_the_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = _tensors()
    _write(tmp_path, tensors, CONFIG)
    found = places(_fill(tmp_path, dtype))
    assert all(torch.equal(found[name], tensors[name].to(dtype)) for name in tensors)


def test_a_number_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    tensors = _tensors()
    tensors[Q0][3, 5] = 1e5
    _write(tmp_path, tensors, CONFIG)
    with pytest.raises(CheckpointError, match=r"q_proj.*doesn't fit float16"):
        _load(tmp_path, torch.float16)
    assert _load(tmp_path, torch.bfloat16).dtype == torch.bfloat16


def test_a_tied_head_is_the_table_and_may_be_stored_twice_but_not_differ(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = _tensors()
    head = tensors.pop("lm_head.weight")
    _write(tmp_path / "once", tensors, config)
    model = _fill(tmp_path / "once")
    assert torch.equal(_head(model), tensors["model.embed_tokens.weight"])
    assert model.weights_bytes == sum(t.numel() * 4 for t in tensors.values())
    _write(
        tmp_path / "twice",
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        config,
    )
    assert torch.equal(_head(_fill(tmp_path / "twice")), tensors["model.embed_tokens.weight"])
    _write(tmp_path / "other", tensors | {"lm_head.weight": head}, config)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        _load(tmp_path / "other")


def test_old_rope_buffers_are_passed_over(tmp_path: Path) -> None:
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(2)}
    _write(tmp_path, _tensors() | extra, CONFIG)
    _load(tmp_path)


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = _fill(tmp_path, seed=3)
    values = torch.cat([weight.value.flatten() for weight in model.weights()])
    assert values.abs().max() <= 1e-3 and values.min() < -9e-4 and values.max() > 9e-4
    assert abs(float(values.mean())) < 5e-5
    layer = model.blocks[0]
    assert isinstance(layer, DecoderLayer)
    norm = layer.mlp_norm.weight.value
    assert norm.abs().max() <= 1e-3 and norm.unique().numel() > 8, "norm weights too"
    again, other = (_fill(tmp_path, seed=seed) for seed in (3, 4))
    both = zip(model.weights(), again.weights(), strict=True)
    assert all(torch.equal(a.value, b.value) for a, b in both)
    assert not torch.equal(next(model.weights()).value, next(other.weights()).value)
    with pytest.raises(CheckpointError, match="holds no weights"):
        _load(tmp_path)


def test_the_rotary_table_may_be_shorter_than_the_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for positions, expected in ((None, 64), (20, 20)):
        (table,) = _load(tmp_path, load_format="dummy", positions=positions).kinds.values()
        assert table.shape == (expected, 2, 2)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("size", list(MOST_OF))
def test_a_size_that_is_too_much_takes_no_memory(
    tmp_path: Path, size: str, load_format: str
) -> None:
    """Each as large as a config may have it, beside sound weights: the shapes refuse it, or the
    memory there is."""
    heads = {"num_attention_heads": MOST_OF[size]} if size == "num_key_value_heads" else {}
    _write(tmp_path, _tensors(), CONFIG | {"head_dim": 4, size: MOST_OF[size]} | heads)
    refused = (
        CapacityError
        if load_format == "dummy" or size == "max_position_embeddings"
        else CheckpointError
    )
    with bounded(600), pytest.raises(refused) as caught:
        _load(tmp_path, load_format=load_format, room=1 << 20)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_model_takes_is_told(tmp_path: Path) -> None:
    _write(tmp_path, _tensors(), CONFIG)
    need = _load(tmp_path).weights_bytes + 64 * 4 * 4
    assert _load(tmp_path, room=need).weights_bytes < need
    for load_format in ("auto", "dummy"):
        with pytest.raises(
            CapacityError,
            match=r"take 0\.00 GiB, 64 positions 0\.00 GiB, and 0\.00 GiB is free on cpu: take",
        ):
            _load(tmp_path, load_format=load_format, room=need - 1)


Break = Callable[[Path], None]
SHARD = "model-00002-of-00003.safetensors"


def _cut(file: str, keep: Callable[[int], int]) -> Break:
    def cut(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: keep(len(data))])

    return cut


def _retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        change(tensors)
        save_file(tensors, folder / SHARD)

    return rewrite


def _reindex(change: Callable[[dict[str, Any]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return rewrite


def _reheader(header: bytes) -> Break:
    return lambda folder: (
        (folder / SHARD).write_bytes(struct.pack("<Q", len(header)) + header) and None
    )


def _only(*names: str) -> Break:
    def strip(folder: Path) -> None:
        for path in folder.glob("model*"):
            path.unlink()
        for name in names:
            (folder / name).write_bytes(b"x")

    return strip


IN_SHARD = sorted(_shapes(CONFIG))[1]  # the first tensor of the second shard
OVERLONG = json.dumps({IN_SHARD: {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()

BROKEN: dict[str, tuple[Break, list[str]]] = {
    "a shard cut short": (
        _cut(SHARD, lambda n: n - 5),
        [SHARD, "is cut short: tensor '", "bytes past its end"],
    ),
    "a shard missing": (lambda f: (f / SHARD).unlink(), [SHARD, "is missing", IN_SHARD]),
    "a git-lfs pointer": (
        lambda f: (f / SHARD).write_text("version https://git-lfs.github.com/spec/v1\n") and None,
        [SHARD, "git lfs pull"],
    ),
    "a header that is no JSON": (_reheader(b"{nonsense"), [SHARD, "broken header"]),
    "a header without a shape": (
        _reheader(b'{"a": {"dtype": "F32"}}'),
        [SHARD, "broken header at tensor 'a'"],
    ),
    "bytes that don't fit the shape": (
        lambda f: (_reheader(OVERLONG + b" " * 64)(f), _pad(f))[0],
        ["don't fit its shape"],
    ),
    "a wrong shape": (
        _retensor(lambda t: t.update({IN_SHARD: torch.zeros(3, 3)})),
        [SHARD, IN_SHARD, "has shape [3, 3], config.json asks for"],
    ),
    "an integer tensor": (
        _retensor(lambda t: t.update({IN_SHARD: t[IN_SHARD].to(torch.int8)})),
        [SHARD, IN_SHARD, "I8", "unquantized"],
    ),
    "an unknown name": (
        _retensor(lambda t: t.update({"model.layers.0.adapter": torch.zeros(3)})),
        [SHARD, "'model.layers.0.adapter'", "LlamaForCausalLM"],
    ),
    "a name that the index promises": (
        _retensor(lambda t: t.pop(IN_SHARD)),
        [SHARD, "lacks tensor", IN_SHARD],
    ),
    "a tensor in two shards": (
        _retensor(lambda t: t.update({"lm_head.weight": torch.zeros(40, 16)})),
        ["is in", "and in"],
    ),
    "a name nowhere": (
        lambda f: (
            _retensor(lambda t: t.pop(IN_SHARD))(f),
            _reindex(lambda i: i["weight_map"].pop(IN_SHARD))(f),
        )[0],
        ["lack tensor", IN_SHARD, "LlamaForCausalLM"],
    ),
    "an index that is no JSON": (
        _cut("model.safetensors.index.json", lambda n: n // 2),
        ["index.json", "not valid JSON"],
    ),
    "an index without a map": (
        _reindex(lambda i: i.pop("weight_map")),
        ["index.json", "no weight_map"],
    ),
    "an index that leaves its folder": (
        _reindex(lambda i: i["weight_map"].update({IN_SHARD: "../x.safetensors"})),
        ["index.json", "'../x.safetensors'"],
    ),
    "no index": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        ["neither model.safetensors nor", "index"],
    ),
    "pickle alone": (
        _only("pytorch_model.bin", "training_args.bin"),
        ["pytorch_model.bin", "pickle", "save_pretrained"],
    ),
    "GGUF alone": (_only("model-q4.gguf"), ["model-q4.gguf", "GGUF is not read", "gguf_file=NAME"]),
    "no weights at all": (_only(), ["holds no weights", "load_format='dummy'"]),
}


def _pad(folder: Path) -> None:
    with (folder / SHARD).open("ab") as file:
        file.write(bytes(64))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    _write(folder, _tensors(), CONFIG, shards=3)
    return folder


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_folder_is_one_clear_line(tmp_path: Path, sound: Path, case: str) -> None:
    breaks, said = BROKEN[case]
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    breaks(folder)
    with pytest.raises(CheckpointError) as caught:
        _load(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    for part in said:
        assert part in message, message


def test_config_and_weights_of_two_models(tmp_path: Path) -> None:
    _write(tmp_path, _tensors(), CONFIG | {"attention_bias": False})
    with pytest.raises(CheckpointError, match=r"\.bias'.*of one model"):
        _load(tmp_path)
    assert not read_model_config(tmp_path).qkv_bias
