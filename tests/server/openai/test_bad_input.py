"""What errors say, which values ask for nothing, and the ends of ranges. Bad input by the hundred
is the corpus'; any bytes at all are test_fuzz's."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import replace
from math import nextafter
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fake import CONTEXT, Running, make_tokenizer, running_server

from penstock.row_table import RANGES
from penstock.server.openai import unsupported_fields as policies
from penstock.server.openai.forms import ChatForm, CompletionForm
from penstock.server.openai.http_limits import HttpLimits

pytestmark = pytest.mark.torch

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tok"))
    with running_server(tokenizer, limits=HttpLimits(max_body_bytes=1_000_000)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=600) as made:
        yield made


def check_shape(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and answer.headers["content-type"] == "application/json"
    )
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 600
    return dict(error)


def test_a_refusal_says_a_thing_once(http: httpx.Client) -> None:
    def said(**fields: Any) -> str:
        answer = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], **fields})
        return str(answer.json()["error"]["message"])

    assert said(reasoning_effort="low").startswith(
        "reasoning_effort with this value is not read by the "
    )
    assert said(vllm_xargs={"a": 1}) == "vllm_xargs is not served with this value: leave it out"
    assert said(user=3).startswith("user is not served with this value: ")


# What vLLM's bodies hold where nothing was asked for: the defaults of its classes, as a client that
# dumps them sends.
OF_BOTH = {
    "model": "",
    "frequency_penalty": None,
    "logit_bias": None,
    "max_tokens": None,
    "n": 1,
    "presence_penalty": None,
    "response_format": None,
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "temperature": None,
    "top_p": None,
    "user": None,
    "use_beam_search": False,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "watermarking": None,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "priority": 0,
    "request_id": None,
    "session_id": None,
    "return_tokens_as_token_ids": None,
    "return_token_ids": None,
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
    "return_mm_kwargs": True,
    "cache_salt": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "vllm_xargs": None,
    "repetition_detection": None,
    "thinking_token_budget": None,
    "stream_interval": None,
    "logits_processors": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "guided_decoding_backend": None,
    "guided_whitespace_pattern": None,
}
OF_COMPLETION = {
    "echo": False,
    "suffix": None,
    "logprobs": None,
    "prompt_embeds": None,
    "best_of": None,
}
OF_CHAT = {
    "logprobs": False,
    "top_logprobs": 0,
    "max_completion_tokens": 1,
    "tools": None,
    "tool_choice": "none",
    "reasoning_effort": None,
    "include_reasoning": True,
    "parallel_tool_calls": True,
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "documents": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "return_prompt_text": None,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", **OF_BOTH, **OF_COMPLETION}),
        (CHAT, {"messages": USER, **OF_BOTH, **OF_CHAT}),
    ],
    ids=["completion", "chat"],
)
def test_a_body_that_spells_out_every_default_is_one_that_says_nothing(
    http: httpx.Client, server: Running, path: str, body: dict[str, Any]
) -> None:
    plain = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": USER, "max_completion_tokens": 1}
    )
    for asked in (plain, body):
        answer = http.post(path, json=asked)
        assert answer.status_code == 200, answer.text
    said, spelt = (each.sampling for each in server.engine.submitted[-2:])
    assert replace(spelt, stop=None, stop_token_ids=None) == said


NOTHING: list[dict[str, Any]] = [
    {"bad_words": []},
    {"logits_processors": []},
    {"logprob_token_ids": []},
    {"structured_outputs": {}},
    {"vllm_xargs": {}},
    {"kv_transfer_params": {}},
    {"ec_transfer_params": {}},
    {"mm_processor_kwargs": {}},
    {"media_io_kwargs": {}},
    {"repetition_detection": {}},
    {"prompt_cache_options": {}},
    {"guided_json": None},
    {"thinking_token_budget": -1},
    {"truncation_side": "left"},
    {"stream_interval": 1},
    {"watermarking": False},
    {"stream_options": {}},
    {"stream_options": {"include_usage": False, "continuous_usage_stats": False}},
    {"session_id": "a"},
    {"guided_decoding_backend": "outlines"},
    {"model": ""},
    {"user": "me"},
    {"store": False},
    {"metadata": {"a": "b"}},
    {"service_tier": "auto"},
    {"safety_identifier": "x"},
    {"prompt_cache_key": "x"},
    {"response_format": {"type": "text"}},
    {"priority": 0},
    {"use_beam_search": False},
    {"stop": None},
    {"seed": None},
]
NOTHING_IN_CHAT: list[dict[str, Any]] = [
    {"documents": []},
    {"include_reasoning": True},
    {"chat_template": ""},
    {"verbosity": "medium"},
    {"top_logprobs": 0},
    {"return_prompt_text": False},
    {"functions": []},
    {"web_search_options": None},
    {"tools": []},
    {"tool_choice": "none"},
    {"modalities": ["text"]},
    {"parallel_tool_calls": True},
]


@pytest.mark.parametrize("more", [*NOTHING, *NOTHING_IN_CHAT], ids=str)
def test_a_value_that_asks_for_nothing_is_taken_as_nothing(
    http: httpx.Client, more: dict[str, Any]
) -> None:
    spoken = {
        "role": "assistant",
        "content": "x",
        "refusal": "",
        "reasoning": "",
        "reasoning_content": "",
    }
    spoken |= {"tool_calls": None, "annotations": []}
    answer = http.post(CHAT, json={"messages": [spoken], "max_tokens": 1, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "fake"
    if more in NOTHING:
        assert (
            http.post(
                COMPLETIONS, json={"prompt": "x", "suffix": "", "n": 2, "best_of": 2, **more}
            ).status_code
            == 200
        )


@pytest.mark.parametrize("name", RANGES)
def test_a_number_past_its_ends_is_told_its_range(http: httpx.Client, name: str) -> None:
    low, high, open_low = RANGES[name]
    past = [low if open_low else nextafter(low, -1e300), nextafter(high, 1e300)]
    past += [1e-38, 1e-45, 5e-324] * (name == "repetition_penalty")
    for value, status in [
        (high, 200),
        (nextafter(low, high), 200),
        *((value, 400) for value in past),
    ]:
        answer = http.post(
            COMPLETIONS, json={"prompt": "x", name: {"7": value} if name == "logit_bias" else value}
        )
        assert answer.status_code == status, (value, answer.text)
        if status == 400:
            error = check_shape(answer)
            assert (
                error["param"] == name
                and str(low) in error["message"]
                and str(high) in error["message"]
            )


def test_values_that_the_models_size_bounds_are_cut_to_it(
    http: httpx.Client, server: Running
) -> None:
    body = {"prompt": "x", "max_tokens": 2**63 - 1, "top_k": 2**63 - 1}
    assert http.post(COMPLETIONS, json=body).json()["choices"][0]["finish_reason"] == "length"
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.max_tokens, sampling.top_k) == (CONTEXT, 0)


def test_every_field_of_the_forms_has_one_place() -> None:
    for form, fates in ((CompletionForm, policies.COMPLETION), (ChatForm, policies.CHAT)):
        assert not set(form.__struct_fields__) & set(fates)


def test_the_page_names_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    forms = (*CompletionForm.__struct_fields__, *ChatForm.__struct_fields__)
    fates = (*policies.COMPLETION, *policies.CHAT, *policies.MESSAGE, *policies.STREAM_OPTIONS)
    assert not [name for name in (*forms, *fates) if f"`{name}`" not in page]


def test_probes_by_head(http: httpx.Client) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/health/engine", "/metrics"):
        by_get, by_head = http.get(path), http.head(path)
        assert (by_head.status_code, by_head.content) == (200, b"")
        assert by_head.headers["content-type"] == by_get.headers["content-type"]
    assert http.get("/health").json() == {"ready": True}  # on the same connection


def test_errors_say_a_way_out(http: httpx.Client) -> None:
    def said(path: str, **body: Any) -> Any:
        answer = http.post(path, **body)
        assert answer.status_code == 400 and answer.headers["x-request-id"].startswith("req_")
        return check_shape(answer)["message"]

    assert said(CHAT, json={"messages": [{"role": "zq7", "content": "x"}]}) == (
        "messages[0].role must be one of system, developer, user, assistant, tool"
    )
    assert "/v1/chat/completions" in said(COMPLETIONS, json={"messages": USER})
    assert "/v1/completions" in said(CHAT, json={"prompt": "x"})
    long = said(COMPLETIONS, json={"prompt": [1] * 4000})
    # what litellm looks for
    assert "this model's maximum context length is" in long and "prompt is too long" in long
    assert "gzip; send it plain" in said(COMPLETIONS, content=gzip.compress(b'{"prompt": "x"}'))
    assert "byte order mark" in said(COMPLETIONS, content=b'\xef\xbb\xbf{"prompt": "x"}')
    assert check_shape(http.get(COMPLETIONS))["type"] == "invalid_request_error"


def test_a_model_without_a_template_cannot_chat(tmp_path: pytest.TempPathFactory) -> None:
    with running_server(make_tokenizer(tmp_path, template=None)) as server:
        answer = httpx.post(server.url + CHAT, json={"messages": USER})
        assert answer.status_code == 400 and "template" in check_shape(answer)["message"]
