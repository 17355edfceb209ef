"""benchmarks/side_by_side.py at tiny size: an engine that is there is measured, of one that isn't a
log is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import router_weights
import side_by_side
import torch
from execute_drive import tiny_model

pytestmark = pytest.mark.torch


def test_an_engine_is_measured_and_one_that_fails_costs_itself_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise SystemExit('no GPU')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = "--shape tiny --work big --knob device=cpu --knob dtype=float32 --turns 2"
    side_by_side.main(
        [*words.split(), "--out", str(tmp_path / "out"), "--vllm-site", str(tmp_path)]
    )
    told = json.loads((tmp_path / "out" / "side_by_side.json").read_text())
    assert len(told["penstock"]["big"]) == 2 and min(told["penstock"]["big"]) > 0
    assert "no GPU" in (tmp_path / "out" / "vllm.log").read_text()
    printed = capsys.readouterr().out
    assert f"vllm ended with 1: {tmp_path / 'out' / 'vllm.log'}" in printed and "big" in printed
    asked = json.loads((tmp_path / "out" / "vllm.json").read_text())
    assert asked["knobs"]["max_num_seqs"] == 1024 and asked["knobs"]["device"] == "cpu"
    assert {len(ids) for ids in asked["works"][0]["prompts"]} == {4}


def test_engines_open_together_take_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This tree, and itself as another commit's: texts, some samples each,
    ended by a stop string."""
    words = (
        "--shape tiny --work monkeys-stops --engine penstock --together --turns 2 --knob device=cpu"
    )
    side_by_side.main(
        [
            *words.split(),
            "--out",
            str(tmp_path),
            "--other",
            str(Path(side_by_side.__file__).parents[1]),
        ]
    )
    rates = [line for line in capsys.readouterr().out.splitlines() if " monkeys-stops " in line]
    assert [line.split()[0] for line in rates] == ["penstock", "other", "other", "penstock"]
    asked = json.loads((tmp_path / "other.json").read_text())["works"][0]
    assert len(asked["sampling"]["stop"][0]) == 2 and asked["sampling"]["n"] == 8
    assert all(isinstance(prompt, str) for prompt in asked["prompts"])


def test_a_work_that_it_cannot_give_all_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit,
        match="monkeys-alone is no work for several engines: take of monkeys, 128-1024, ",
    ):
        side_by_side.main(
            ["--shape", "tiny", "--work", "big", "--work", "monkeys-alone", "--out", str(tmp_path)]
        )


@pytest.mark.parametrize(
    "config",
    [
        {
            "model_type": "gemma4_text",
            "enable_moe_block": True,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 16,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 160,
        },
        {
            "model_type": "qwen3_moe",
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
            "head_dim": 8,
        },
    ],
    ids=["gemma4", "a dense layer first"],
)
def test_routers_are_drawn_wherever_a_layer_has_them(config: dict[str, Any]) -> None:
    """As engines draw them all but nothing tells one expert from another, and norms make scores
    small. On a GPU a product has its matrix plain."""
    model = tiny_model(**config, num_experts=4, moe_intermediate_size=24)
    moes = [
        block.routed.moe if "gemma4" in config["model_type"] else block.mlp
        for block in model.blocks
    ]
    weights = [torch.full((4, 32), 7.0) for moe in moes if hasattr(moe, "router")]
    for moe, weight in zip([moe for moe in moes if hasattr(moe, "router")], weights, strict=True):
        moe.router.product = SimpleNamespace(matrix=weight)
    runner = SimpleNamespace(_model=model)
    router_weights.spread_experts(
        "penstock", SimpleNamespace(engine=SimpleNamespace(runner=runner))
    )
    assert len(weights) == (2 if "gemma4" in config["model_type"] else 1)
    by = 4 / 32**0.5
    assert all(
        0.7 < float(weight.std()) / by < 1.3 and abs(float(weight.mean())) < 0.4 * by
        for weight in weights
    )
    norms = [weight for weight in model.weights() if weight.parts[0].name.endswith("norm.weight")]
    assert len(norms) > 4 and all(bool((weight.value == 1).all()) for weight in norms)


def test_routers_of_vllm_are_found_by_name() -> None:
    """Its Gemma 4 names them layers.N.router.proj, others layers.N.mlp.gate."""
    layer = torch.nn.ModuleDict(
        {
            "mlp": torch.nn.ModuleDict(
                {"gate": torch.nn.Linear(64, 8), "gate_up_proj": torch.nn.Linear(64, 8)}
            ),
            "router": torch.nn.ModuleDict({"proj": torch.nn.Linear(64, 8)}),
            "norm": torch.nn.RMSNorm(64),
        }
    )
    layer["mlp"]["gate"].e_score_correction_bias = torch.nn.Parameter(torch.ones(8))
    layer["norm"].weight.data.fill_(7.0)
    router_weights._spread_modules(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}))
    spread = {
        name: float(part.weight.detach().std()) > 0.3
        for name, part in layer.named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    assert spread == {"mlp.gate": True, "mlp.gate_up_proj": False, "router.proj": True}
    assert not layer["mlp"]["gate"].e_score_correction_bias.any()
    assert bool((layer["norm"].weight == 1).all())
