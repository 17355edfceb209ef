"""Any input at all gets an answer in OpenAI's shape and never a 5xx: hand-made cases, every field, random bodies."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from math import nextafter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_fake import CONTEXT, Running, make_tokenizer, running_server

from penstock.row_table import RANGES
from penstock.server.openai import unsupported_fields as policies
from penstock.server.openai.forms import ChatForm, CompletionForm
from penstock.server.openai.http_limits import HttpLimits

pytestmark = pytest.mark.torch

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
HUGE = 10**4000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tok"))
    with running_server(tokenizer, limits=HttpLimits(max_body_bytes=1_000_000)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def check_shape(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and answer.headers["content-type"] == "application/json"
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 600
    return dict(error)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b"\xff\xfe", b'"\xed\xa0\x80"', b"null", b"[]", b'"x"', b"7", b"true", b'{"a" 1}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00x"}', b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "x", "n": 1e400}', b'{"prompt": "x", "n": -1e400}',
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": ' + b"9" * 5000 + b"}",
        b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", b"{}{}",
        b'{"prompt": "x"} trailing', b"\xef\xbb\xbf{}", b"{'prompt': 'x'}", b'{"prompt": "x",}', b"\x00", b"{}",
        b'{"prompt": "\x01"}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_form(http: httpx.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body)
    assert answer.status_code == 400
    check_shape(answer)


COMPLETION_CASES: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"), ({"prompt": 7}, "prompt"), ({"prompt": {}}, "prompt"), ({"prompt": True}, "prompt"),
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"), ({"prompt": ["a", [1]]}, "prompt"), ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"), ({"prompt": [1.5]}, "prompt"), ({"prompt": [[1, "a"]]}, "prompt"),
    ({"prompt": [256]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [[0], [10**9]]}, "prompt"), ({"prompt": [None]}, "prompt"), ({"prompt": [1] * CONTEXT}, "prompt"),
    ({"prompt": "x" * CONTEXT}, "prompt"), ({"prompt": ["x", "y" * CONTEXT]}, "prompt"),
    ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 65_537}, "n"), ({"n": HUGE}, "n"), ({"n": 1.5}, "n"), ({"n": "1"}, "n"),
    ({"n": True}, "n"), ({"n": [1]}, "n"), ({"n": 40_000, "prompt": ["a", "b"]}, "n"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": "x"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 17}, "min_tokens"), ({"min_tokens": 2**63}, "min_tokens"),
    ({"min_tokens": CONTEXT, "max_tokens": 2**62}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": 1e300}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": HUGE}, "temperature"), ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"top_p": -1}, "top_p"), ({"top_k": -2}, "top_k"),
    ({"top_k": 0.5}, "top_k"), ({"min_p": 2}, "min_p"), ({"min_p": -1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"), ({"seed": 1.5}, "seed"), ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop"), ({"stop": 7}, "stop"), ({"stop": [7]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"stop_token_ids": 3}, "stop_token_ids"), ({"stop_token_ids": ["3"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"256": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"), ({"logit_bias": {"1": None}}, "logit_bias[...]"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"best_of": 2}, "best_of"), ({"best_of": 1, "n": 2}, "best_of"), ({"echo": "yes"}, "echo"), ({"echo": 1}, "echo"),
    ({"suffix": "x"}, "suffix"), ({"stream": 1}, "stream"), ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"bad_words": ["x"]}, "bad_words"), ({"bad_words": {}}, "bad_words"), ({"vllm_xargs": []}, "vllm_xargs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"), ({"truncation_side": "right"}, "truncation_side"),
    ({"thinking_token_budget": 0}, "thinking_token_budget"), ({"watermarking": 0}, "watermarking"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"ignore_eos": 0}, "ignore_eos"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"), ({"return_token_ids": 1}, "return_token_ids"),
    ({"unheard_of": 1}, "unheard_of"), ({"": 1}, ""), ({"x" * 5000: None}, "x" * 80), ({"user": 7}, "user"),
    ({"metadata": "x"}, "metadata"), ({"store": True}, "store"), ({"service_tier": "flex"}, "service_tier"),
    ({"store": 0}, "store"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"use_beam_search": True}, "use_beam_search"), ({"guided_json": {}}, "guided_json"), ({"priority": 1}, "priority"),
    ({"messages": USER}, "messages"), ({"top_logprobs": 1}, "top_logprobs"), ({"model": 7}, "model"),
    # Told before its prompt is tokenised, amid which its time would be over.
    ({"prompt": "x" * 90_000, "truncate_prompt_tokens": 5, "timeout": 1e-9, "cache_salt": ""}, "cache_salt"),
]  # fmt: skip


@pytest.mark.parametrize("fields, param", COMPLETION_CASES, ids=lambda value: str(value)[:60])
def test_completion_fields(http: httpx.Client, server: Running, fields: dict[str, Any], param: str | None) -> None:
    before = len(server.engine.submitted)
    answer = http.post(COMPLETIONS, content=json.dumps({"prompt": "x", **fields}))
    assert answer.status_code == 400, answer.text
    assert check_shape(answer)["param"] == param
    assert len(server.engine.submitted) == before and not server.engine.open


CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": {}}, "messages"), ({"messages": [7]}, "messages[0]"), ({"messages": [None]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"), ({"messages": [{"content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "user", "content": 7}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"), ({"echo": True}, "echo"), ({"prompt": "x"}, "prompt"),
    ({"modalities": ["audio"]}, "modalities"), ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"chat_template_kwargs": 7}, "chat_template_kwargs"), ({"suffix": "x"}, "suffix"), ({"best_of": 1}, "best_of"),
    ({"response_format": {"type": "json_schema"}}, "response_format"), ({"n": 0}, "n"),
    ({"include_reasoning": False}, "include_reasoning"), ({"documents": [{}]}, "documents"),
    ({"web_search_options": {}}, "web_search_options"), ({"top_logprobs": -1}, "top_logprobs"),
]  # fmt: skip


@pytest.mark.parametrize("fields, param", CHAT_CASES, ids=lambda value: str(value)[:60])
def test_chat_fields(http: httpx.Client, server: Running, fields: dict[str, Any], param: str) -> None:
    before = len(server.engine.submitted)
    answer = http.post(CHAT, content=json.dumps({"messages": USER, **fields}))
    assert answer.status_code == 400, answer.text
    assert check_shape(answer)["param"] == param
    assert len(server.engine.submitted) == before


def test_a_refusal_says_a_thing_once(http: httpx.Client) -> None:
    def said(**fields: Any) -> str:
        answer = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], **fields})
        return str(answer.json()["error"]["message"])

    assert said(reasoning_effort="low").startswith("reasoning_effort is not served: use chat_template_kwargs ")
    assert said(vllm_xargs={"a": 1}) == "vllm_xargs is not served with this value: leave it out"
    assert said(user=3).startswith("user is not served with this value: ")


def test_fields_that_change_nothing_are_taken(http: httpx.Client) -> None:
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
        "prompt_cache_key": "x", "response_format": {"type": "text"}, "priority": 0, "use_beam_search": False,
        "logit_bias": None, "stop": None, "n": None, "seed": None, "stream_options": None, "guided_json": None,
    }  # fmt: skip
    body = {"model": "fake", "prompt": "x", "suffix": "", "best_of": 2, **harmless, "n": 2}
    assert http.post(COMPLETIONS, json=body).status_code == 200
    chat = {"tools": [], "tool_choice": "none", "modalities": ["text"], "parallel_tool_calls": True}
    spoken = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    assert http.post(CHAT, json={"messages": [spoken], "max_tokens": 1, **harmless, **chat}).status_code == 200


# What vLLM's bodies hold where nothing was asked for: the defaults of its classes, as a client that dumps them sends.
OF_BOTH = {
    "model": "", "frequency_penalty": None, "logit_bias": None, "max_tokens": None, "n": 1, "presence_penalty": None,
    "response_format": None, "seed": None, "stop": [], "stream": False, "stream_options": None, "temperature": None,
    "top_p": None, "user": None, "use_beam_search": False, "top_k": None, "min_p": None, "repetition_penalty": None,
    "watermarking": None, "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False,
    "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None, "truncation_side": None, "prompt_logprobs": None, "logprob_token_ids": None,
    "allowed_token_ids": None, "bad_words": [], "structured_outputs": None, "priority": 0, "request_id": None,
    "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None, "routed_experts_prompt_start": 0,
    "return_token_offsets": False, "return_mm_kwargs": True, "cache_salt": None, "kv_transfer_params": None,
    "ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None, "thinking_token_budget": None,
    "stream_interval": None, "logits_processors": None, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "guided_decoding_backend": None, "guided_whitespace_pattern": None,
}  # fmt: skip
OF_COMPLETION = {"echo": False, "suffix": None, "logprobs": None, "prompt_embeds": None, "best_of": None}
OF_CHAT = {
    "logprobs": False, "top_logprobs": 0, "max_completion_tokens": 1, "tools": None, "tool_choice": "none",
    "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True, "echo": False,
    "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "documents": None,
    "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None, "mm_processor_kwargs": None,
    "return_prompt_text": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "x", **OF_BOTH, **OF_COMPLETION}), (CHAT, {"messages": USER, **OF_BOTH, **OF_CHAT})],
    ids=["completion", "chat"],
)
def test_a_body_that_spells_out_every_default_is_one_that_says_nothing(
    http: httpx.Client, server: Running, path: str, body: dict[str, Any]
) -> None:
    plain = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER, "max_completion_tokens": 1}
    for asked in (plain, body):
        answer = http.post(path, json=asked)
        assert answer.status_code == 200, answer.text
    said, spelt = (each.sampling for each in server.engine.submitted[-2:])
    assert replace(spelt, stop=None, stop_token_ids=None) == said


NOTHING: list[dict[str, Any]] = [
    {"bad_words": []}, {"logits_processors": []}, {"logprob_token_ids": []}, {"structured_outputs": {}},
    {"vllm_xargs": {}}, {"kv_transfer_params": {}}, {"ec_transfer_params": {}}, {"mm_processor_kwargs": {}},
    {"media_io_kwargs": {}}, {"repetition_detection": {}}, {"prompt_cache_options": {}}, {"guided_json": None},
    {"thinking_token_budget": -1}, {"truncation_side": "left"}, {"stream_interval": 1}, {"watermarking": False},
    {"stream_options": {}}, {"stream_options": {"include_usage": False, "continuous_usage_stats": False}},
    {"session_id": "a"}, {"guided_decoding_backend": "outlines"}, {"model": ""},
]  # fmt: skip
NOTHING_IN_CHAT: list[dict[str, Any]] = [
    {"documents": []}, {"include_reasoning": True}, {"chat_template": ""}, {"verbosity": "medium"},
    {"top_logprobs": 0}, {"return_prompt_text": False}, {"functions": []}, {"web_search_options": None},
]  # fmt: skip


@pytest.mark.parametrize("more", [*NOTHING, *NOTHING_IN_CHAT], ids=str)
def test_a_value_that_asks_for_nothing_is_taken_as_nothing(http: httpx.Client, more: dict[str, Any]) -> None:
    spoken = {"role": "assistant", "content": "x", "refusal": "", "reasoning": "", "reasoning_content": ""}
    answer = http.post(CHAT, json={"messages": [spoken], "max_tokens": 1, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "fake"
    if more in NOTHING:
        assert http.post(COMPLETIONS, json={"prompt": "x", **more}).status_code == 200


@pytest.mark.parametrize("name", RANGES)
def test_a_number_past_its_ends_is_told_its_range(http: httpx.Client, name: str) -> None:
    low, high, open_low = RANGES[name]
    past = [low if open_low else nextafter(low, -1e300), nextafter(high, 1e300)]
    past += [1e-38, 1e-45, 5e-324] * (name == "repetition_penalty")
    for value, status in [(high, 200), (nextafter(low, high), 200), *((value, 400) for value in past)]:
        answer = http.post(COMPLETIONS, json={"prompt": "x", name: {"7": value} if name == "logit_bias" else value})
        assert answer.status_code == status, (value, answer.text)
        if status == 400:
            error = check_shape(answer)
            assert error["param"] == name and str(low) in error["message"] and str(high) in error["message"]


def test_values_that_the_models_size_bounds_are_cut_to_it(http: httpx.Client, server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 2**63 - 1, "top_k": 2**63 - 1}
    assert http.post(COMPLETIONS, json=body).json()["choices"][0]["finish_reason"] == "length"
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.max_tokens, sampling.top_k) == (CONTEXT, 0)


def test_every_field_of_the_forms_has_one_place() -> None:
    for form, fates in ((CompletionForm, policies.COMPLETION), (ChatForm, policies.CHAT)):
        assert not set(form.__struct_fields__) & set(fates)


def test_the_page_names_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text()
    missing = [name for name in (*NAMES, *policies.MESSAGE, *policies.STREAM_OPTIONS) if f"`{name}`" not in page]
    assert not missing


def test_a_body_too_large(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, content=b"x" * 1_000_001)
    assert answer.status_code == 413 and check_shape(answer)["code"] == "body_too_large"
    answer = http.post(COMPLETIONS, content=iter([b"x" * 400_000] * 3))  # chunked: no length ahead
    assert answer.status_code == 413
    assert http.post(COMPLETIONS, content=b"x" * 1_000_000).status_code == 400


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/", 404), ("GET", COMPLETIONS, 405), ("POST", "/v1/models", 405), ("GET", "/v1/models/other", 404),
        ("POST", "/v1/embeddings", 404), ("POST", COMPLETIONS + "/", 404), ("GET", "/v1/models/%ff%00", 404),
        ("DELETE", "/metrics", 405), ("GET", "/v1/models/../../etc", 404), ("PUT", CHAT, 405), ("GET", "/docs", 404),
    ],
)  # fmt: skip
def test_paths_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    check_shape(answer)


def test_probes_by_head(http: httpx.Client) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/health/engine", "/metrics"):
        by_get, by_head = http.get(path), http.head(path)
        assert (by_head.status_code, by_head.content) == (200, b"")
        assert by_head.headers["content-type"] == by_get.headers["content-type"]
    assert http.get("/health").json() == {"ready": True}  # on the same connection


def test_errors_say_a_way_out(http: httpx.Client) -> None:
    def said(path: str, **body: Any) -> Any:
        answer = http.post(path, **body)
        assert answer.status_code == 400
        return check_shape(answer)["message"]

    assert said(CHAT, json={"messages": [{"role": "zq7", "content": "x"}]}) == (
        "messages[0].role must be one of system, developer, user, assistant, tool"
    )
    assert "/v1/chat/completions" in said(COMPLETIONS, json={"messages": USER})
    assert "/v1/completions" in said(CHAT, json={"prompt": "x"})
    assert "gzip; send it plain" in said(COMPLETIONS, content=gzip.compress(b'{"prompt": "x"}'))
    assert "byte order mark" in said(COMPLETIONS, content=b'\xef\xbb\xbf{"prompt": "x"}')
    assert check_shape(http.get(COMPLETIONS))["type"] == "invalid_request_error"


@pytest.mark.parametrize("path, rest", [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})])
def test_a_wrong_model_is_not_found(http: httpx.Client, path: str, rest: dict[str, Any]) -> None:
    answer = http.post(path, json={"model": "gpt-9", **rest})
    assert answer.status_code == 404 and check_shape(answer)["code"] == "model_not_found"
    assert "gpt-9" not in answer.text


def test_a_model_without_a_template_cannot_chat(tmp_path: pytest.TempPathFactory) -> None:
    with running_server(make_tokenizer(tmp_path, template=None)) as server:
        answer = httpx.post(server.url + CHAT, json={"messages": USER})
        assert answer.status_code == 400 and "template" in check_shape(answer)["message"]


NUMBERS = st.integers() | st.integers(-3, 300) | st.floats(allow_nan=False, allow_infinity=False) | st.just(HUGE)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.sampled_from(["user", "text", "fake"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted(
    {
        *CompletionForm.__struct_fields__,
        *ChatForm.__struct_fields__,
        *policies.COMPLETION,
        *policies.CHAT,
    }
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), LEAVES | VALUES, max_size=4), max_size=3
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(max_size=10) | st.lists(st.integers(-2, 300), max_size=4) | VALUES,
        "messages": st.just(USER) | MESSAGES,
        "n": st.integers(-1, 4),
        "max_tokens": st.integers(0, 5),
    },
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from([COMPLETIONS, CHAT]),
    base=BODIES,
    more=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
)
def test_random_bodies_never_make_a_5xx(http: httpx.Client, path: str, base: Any, more: Any) -> None:
    body = {**more, **base}
    body["n"] = min(body["n"], 4) if isinstance(body.get("n"), int) else body.get("n")
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text, body)
    if answer.status_code != 200:
        check_shape(answer)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_random_bytes_never_make_a_5xx(http: httpx.Client, body: bytes) -> None:
    answer = http.post(COMPLETIONS, content=body)
    assert answer.status_code == 400
    check_shape(answer)
