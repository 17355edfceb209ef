"""What `make bench` rests on: the products counted are the model's own; a benchmark that dies is told, not hidden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("head_dim", [None, 24])
def test_products_are_the_linear_layers_of_transformers(head_dim: int | None) -> None:
    import products
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        **({"head_dim": head_dim} if head_dim else {}),
    }
    layers, head = products.weights_of(config, torch.float32)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(weight.numel() for weight in [*layers, head]) == sum(linear)
    assert products.forward_seconds(layers, head, 2, at_least=0.0) > 0


def test_the_table_takes_figures_from_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import run_all

    (tmp_path / "good.py").write_text("import json; print('talk'); print(json.dumps({'a': {'b': 3}}))")
    (tmp_path / "bad.py").write_text("raise SystemExit('no disk')")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "OUT", tmp_path / "build" / "bench.json")
    monkeypatch.setattr(
        run_all,
        "BENCHMARKS",
        (
            run_all.Benchmark(("good.py",), (run_all.Figure("good", "good", "x", "", ("a", "b")),)),
            run_all.Benchmark(("bad.py",), (run_all.Figure("bad", "bad", "x", "", ("a",)),)),
        ),
    )
    assert run_all.main() == 1
    written = json.loads((tmp_path / "build" / "bench.json").read_text())
    assert (written["good"], written["bad"]) == (3.0, None)
    assert "no disk" in written["details"]["bad.py"]


def test_the_keys_that_the_figures_are_known_by() -> None:
    import run_all

    keys = {figure.key for benchmark in run_all.BENCHMARKS for figure in benchmark.figures}
    assert keys >= {
        "host_step_ms",
        "host_admit_group_ms",
        "host_finish_ms",
        "demo_vs_transformers",
        "qwen_vs_transformers",
        "help_s",
        "demo_first_sample_s",
    }
    assert all((BENCHMARKS / benchmark.command[0]).is_file() for benchmark in run_all.BENCHMARKS)
