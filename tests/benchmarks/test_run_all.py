"""What `make bench` rests on: the products counted are the model's own; a benchmark that dies is
told, not hidden."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import products
import pytest
import streams
import torch
from at_length import at_length

pytestmark = pytest.mark.torch
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("head_dim", [None, 24])
def test_products_are_the_linear_layers_of_transformers(head_dim: int | None) -> None:
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


def streams_part(
    steps: list[list[list[int]]], arrivals: list[list[float]], words: int
) -> dict[str, np.ndarray]:
    """The columns of clients' events: steps[stream][event] is its tokens' steps."""
    events = [(number, event) for number, stream in enumerate(steps) for event in stream]
    return {
        "stream": np.array([number for number, _ in events]),
        "count": np.array([len(event) for _, event in events]),
        "tokens": np.array([step % words for _, event in events for step in event]),
        "arrival": np.array([when for stream in arrivals for when in stream]),
    }


def test_tokens_of_streams_find_their_steps() -> None:
    """With events of several tokens, and after the words have come round more than once."""
    log, words = np.arange(40) / 10, 8
    steps = [[[19], [20, 21, 22], [23]], [[3], [4], [5, 6, 7, 8, 9]], [[7], [8]]]
    arrivals = [[1.95, 2.25, 2.99], [0.3, 0.45, 0.95], [0.7, 3.9]]
    found, arrival, stream = streams.token_steps(streams_part(steps, arrivals, words), log, words)
    assert found.tolist() == [19, 20, 21, 22, 23, 3, 4, 5, 6, 7, 8, 9, 7, 8]
    assert stream.tolist() == [0] * 5 + [1] * 7 + [2] * 2
    assert arrival.tolist() == [1.95, 2.25, 2.25, 2.25, 2.99, 0.3, 0.45, *[0.95] * 5, 0.7, 3.9]
    for wrong in ([20, 22], [20, 20, 21], [21, 20]):
        bad = [steps[0], [[19], wrong]]
        with pytest.raises(SystemExit, match="misses a step"):
            streams.token_steps(streams_part(bad, [arrivals[0], [1.95, 2.5]], words), log, words)


@at_length
def test_streams_through_a_server_of_two_processes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "streams.py"),
        "--streams",
        "12",
        "--rate",
        "40",
        "--seconds",
        "0.5",
    ]
    command += ["--clients", "1", "--api-server-count", "2", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0 < found["events_per_second"] <= found["tokens_per_second"] * 1.01
    assert 0 < found["delay_ms"]["p50"] <= found["delay_ms"]["p99"] <= found["delay_ms"]["max"]
    assert len(found["server_cores"]) == 5  # the parent, two servers, a sandbox of each
