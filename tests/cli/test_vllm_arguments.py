"""vLLM's arguments: each is taken where it asks for what is done anyway, told where it changes
nothing, or refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import typer

from penstock.cli import app
from penstock.config import Config
from penstock.errors import UsageError
from penstock.request import SamplingParams
from penstock.vllm_arguments.engine_table import ENGINE, SHARED, SHORT
from penstock.vllm_arguments.request_table import CALL, SAMPLING
from penstock.vllm_arguments.server_table import SERVE, SHARED_SERVE
from penstock.vllm_arguments.sift import check_call, engine_knobs


def knobs(**given: Any) -> dict[str, Any]:
    own, told = engine_knobs("m", given)
    assert told == [] and own.pop("model") == "m"
    return own


def test_a_name_is_ours_or_has_a_fate() -> None:
    """No argument is checked that an option reads already, and none is called the same that isn't
    there."""
    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {param.name for param in serve.params}
    ours, sampling = set(Config().places()), {field.name for field in fields(SamplingParams)}
    assert ours & (ENGINE.keys() | SERVE.keys()) == set() and options & SERVE.keys() == set()
    assert sampling & SAMPLING.keys() == set()
    assert set(SHARED) <= ours and set(SHARED_SERVE) <= options
    assert set(SHORT.values()) <= ENGINE.keys() | set(SHARED_SERVE) | set(SHARED)
    assert not any(name.startswith("no_") for name in ENGINE.keys() | SERVE.keys())


def test_every_fate_has_a_sentence_that_fits_a_line() -> None:
    for name, argument in (ENGINE | SERVE | SAMPLING | CALL).items():
        assert 10 < len(argument.note) < 110 and argument.note[-1] != ".", name
        assert not argument.told or (argument.is_flag and len(argument.taken) == 1), name


def test_what_asks_for_what_is_done_anyway_is_taken() -> None:
    scripts = {
        "pipeline_parallel_size": 1,
        "enforce_eager": False,
        "quantization": None,
        "disable_log_stats": True,
        "trust_remote_code": False,
        "swap_space": 4,
        "max_seq_len_to_capture": 8192,
        "block_size": 16,
        "task": "auto",
        "tokenizer_mode": "auto",
        "enable_lora": False,
        "max_lora_rank": 64,
        "hf_overrides": {},
        "limit_mm_per_prompt": {"image": 0},
        "distributed_executor_backend": "mp",
        "cpu_offload_gb": 0.0,
        "nnodes": 1,
        "disable_custom_all_reduce": True,
        "speculative_config": None,
        "tokenizer_revision": None,
        "max_logprobs": 20,
        "enable_chunked_prefill": True,
        "served_model_name": ["x", "y"],
        "generation_config": "auto",
    }
    assert knobs(**scripts) == {}


def test_our_knobs_are_spelt_as_vllm_spells_them() -> None:
    class Half:
        def __str__(self) -> str:
            return "torch.float16"

    own = knobs(
        dtype="half",
        seed=None,
        max_model_len=None,
        load_format="safetensors",
        revision="v1",
        max_num_seqs=8,
    )
    assert own == {"dtype": "float16", "load_format": "auto", "revision": "v1", "max_num_seqs": 8}
    assert [knobs(dtype=d)["dtype"] for d in ("float", "bfloat16", "auto", Half())] == [
        "float32",
        "bfloat16",
        "auto",
        "float16",
    ]
    Config.of(**own)
    with pytest.raises(UsageError, match="dtype must be one of"):
        Config.of(**knobs(dtype="int3"))
    with pytest.raises(UsageError, match="unknown option 'max_seqs': known are"):
        Config.of(**knobs(max_seqs=8))


def test_what_changes_nothing_is_told() -> None:
    own, told = engine_knobs(
        "m", {"trust_remote_code": True, "enforce_eager": True, "enable_chunked_prefill": False}
    )
    assert own == {"model": "m"} and [line.partition(":")[0] for line in told] == [
        "trust_remote_code=True changes nothing",
        "enforce_eager=True changes nothing",
        "enable_chunked_prefill=False changes nothing",
    ]
    assert told[0].endswith(": no code of a model ever runs here")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2 is not served (only 1): a model is not cut by layers",
        ),
        (
            {"hf_config_path": "other"},
            "hf_config_path='other' is not served (only the same as model)",
        ),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "(only []): keys that must stay wide"),
        ({"task": "embed"}, "(only 'auto' or 'generate'): models generate text here"),
        ({"hf_overrides": {"x": "y" * 900}}, "..."),
        (
            {"trust_remote_code": "yes"},
            "trust_remote_code='yes' is not served (only False): no code of a model",
        ),
        (
            {"guided_decoding_disable_additional_properties": True},
            "say additionalProperties: false in the schema",
        ),
        (
            {"structured_outputs_config": {"enable_in_reasoning": True}},
            "structured_outputs_config.enable_in_reasoning True",
        ),
        ({"structured_outputs_config": {"x": 1}}, "structured_outputs_config has no 'x'"),
        ({"swap_space": "much"}, "swap_space='much' is not served (only a number)"),
    ],
)
def test_what_is_refused_says_the_way_out(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine_knobs("m", given)
    assert says in str(caught.value) and len(str(caught.value)) < 250
    assert str(caught.value.param).split(".")[0] in (next(iter(given)), "enable_in_reasoning")


def test_white_space_of_forms_is_ours_by_another_name() -> None:
    for given in (
        {"guided_decoding_disable_any_whitespace": True},
        {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
        {"disable_any_whitespace": True},
    ):
        own, told = engine_knobs("m", given)
        assert own == {"model": "m", "disable_any_whitespace": True} and told == []
        assert Config.of(**own).model.disable_any_whitespace
    assert engine_knobs("m", {"structured_outputs_config": {"disable_any_whitespace": False}})[
        0
    ] == {"model": "m"}


def test_sampling_params_take_vllms_where_they_ask_for_nothing() -> None:
    taken = {
        "best_of": 3,
        "bad_words": [],
        "spaces_between_special_tokens": True,
        "structured_outputs": None,
    }
    params = SamplingParams(n=3, temperature=0.5, **taken)  # type: ignore[arg-type]
    assert params == SamplingParams(n=3, temperature=0.5) == replace(params)
    assert SamplingParams(best_of=1) == SamplingParams()  # type: ignore[call-arg]
    for given, says in (
        (
            {"best_of": 4, "n": 3},
            r"best_of=4 is not served \(only the same as n\): samples are not ranked",
        ),
        (
            {"logits_processors": ["x"]},
            r"logits_processors=\['x'\] is not served \(only \[\]\): code from outside",
        ),
        ({"use_beam_search": True}, "use_beam_search=True is not served: there is no beam search"),
    ):
        with pytest.raises(UsageError, match=says):
            SamplingParams(**given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_arguments_of_calls() -> None:
    check_call("generate", {"lora_request": None, "priority": 0, "tools": []})
    with pytest.raises(UsageError, match="lora_request=5 is not served: one adapter is merged"):
        check_call("generate", {"lora_request": 5})
    with pytest.raises(UsageError, match="chat takes no argument 'message'"):
        check_call("chat", {"message": []})
