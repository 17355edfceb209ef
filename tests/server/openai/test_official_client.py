"""The official `openai` client, sync and async, streamed and not, against a server over the fake
engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_fake import Running, make_tokenizer, running_server

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(make_tokenizer(tmp_path_factory.mktemp("tok"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completion_default_is_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello")
    assert (
        answer.object == "text_completion"
        and answer.id.startswith("cmpl-")
        and answer.model == "fake"
    )
    assert [c.text for c in answer.choices] == ["abcdefghijklmnop"]
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 16, 21)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.completion_tokens_details is None


def test_usage_tells_of_drafts(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, of three right drafts and one wrong one each."""
    monkeypatch.setattr(server.engine, "guesses", (3, 1))
    asked = {"model": "fake", "prompt": ["a", "b"], "max_tokens": 4}
    *_, last = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    for usage in (client.completions.create(**asked).usage, last.usage):
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens == 6
        assert details.rejected_prediction_tokens == 2


@pytest.mark.parametrize(
    "prompt, count, tokens",
    [("hi", 1, 2), (["hi", "there"], 2, 7), ([5, 6, 7], 1, 3), ([[5, 6], [7, 8, 9]], 2, 5)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_forms_are_prompt_major(
    client: openai.OpenAI, prompt: object, count: int, tokens: int, stream: bool
) -> None:
    asked = {"model": "fake", "prompt": prompt, "n": 2, "max_tokens": 3}
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    if stream:
        for chunk in client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    assert choice.index not in ends
                    ends[choice.index] = choice.finish_reason
            assert (chunk.usage is None) == bool(chunk.choices)
            usage = chunk.usage
    else:
        answer = client.completions.create(**asked)
        texts = {choice.index: choice.text for choice in answer.choices}
        ends = {choice.index: choice.finish_reason for choice in answer.choices}
        assert [choice.index for choice in answer.choices] == list(range(count * 2))
        usage = answer.usage
    assert texts == {at: ("abc", "bcd")[at % 2] for at in range(count * 2)}
    assert ends == dict.fromkeys(range(count * 2), "length")
    assert (usage.prompt_tokens, usage.completion_tokens) == (tokens, count * 2 * 3)


@pytest.mark.parametrize("options", [{"include_usage": True}, {}], ids=["both", "alone"])
@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 1, "extra_body": {"return_token_ids": True}}], ids=["plain", "full"]
)
def test_usage_in_every_event(
    client: openai.OpenAI, options: dict[str, bool], more: dict[str, Any]
) -> None:
    """As vLLM's: each event has its own choice's counts, the last one the whole request's."""
    asked = {
        "model": "fake",
        "prompt": [[5, 6], [7, 8, 9]],
        "n": 2,
        "max_tokens": 3,
        "stream": True,
        **more,
    }
    options = options | {"continuous_usage_stats": True}
    *events, last = client.completions.create(**asked, stream_options=options)
    made = dict.fromkeys(range(4), 0)
    for event in events:
        (choice,) = event.choices
        made[choice.index] += 1
        prompt = (2, 2, 3, 3)[choice.index]
        told = {"prompt_tokens": prompt, "completion_tokens": made[choice.index]}
        assert event.usage.model_dump(exclude_none=True) == told | {
            "total_tokens": prompt + made[choice.index]
        }
    assert set(made.values()) == {3} and not last.choices
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (
        5,
        12,
        17,
    )


def test_without_include_usage_no_event_has_any(client: openai.OpenAI) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    asked = {"model": "fake", "prompt": "x", "max_tokens": 2}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    assert len(chunks) == 2 and all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_echo_and_logprobs(client: openai.OpenAI, server: Running) -> None:
    answer = client.completions.create(
        model="fake", prompt="hey", echo=True, logprobs=2, max_tokens=2
    )
    choice = answer.choices[0]
    assert choice.text == "heyab"
    assert choice.logprobs.tokens == list("heyab") and choice.logprobs.text_offset == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert choice.logprobs.token_logprobs == [None, -0.25, -0.25, -0.25, -0.25]
    assert choice.logprobs.top_logprobs[0] is None and choice.logprobs.top_logprobs[4]["b"] == -0.25
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 2)


def test_streamed_echo_and_offsets(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="fake", prompt=[5, 6], echo=True, logprobs=0, max_tokens=3, stream=True
        )
    )
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert len(tokens) == 5 and tokens[2:] == ["a", "b", "c"]
    assert offsets == [sum(map(len, tokens[:at])) for at in range(5)]


def test_chat_defaults_to_the_context(client: openai.OpenAI, server: Running) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert (
        answer.choices[0].message.content.startswith("abcdef")
        and answer.choices[0].finish_reason == "length"
    )
    prompt = server.engine.tokenizer.decode(server.engine.submitted[-1].ids)
    assert prompt == "<user>hi\n<assistant>"
    assert answer.usage.total_tokens == 256


def test_chat_stream_begins_with_the_role(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        max_completion_tokens=4,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [(c.choices[0].index, c.choices[0].delta) for c in chunks if c.choices]
    for index, text in ((0, "abcd"), (1, "bcde")):
        mine = [delta for at, delta in deltas if at == index]
        assert [delta.role for delta in mine] == ["assistant", None, None, None]
        assert "".join(delta.content for delta in mine) == text
    assert chunks[-1].usage.completion_tokens == 8 and not chunks[-1].choices
    assert chunks[0].object == "chat.completion.chunk"


def test_chat_logprobs_with_bytes(client: openai.OpenAI) -> None:
    asked = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "logprobs": True,
    }
    content = client.chat.completions.create(**asked, top_logprobs=3).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "b"] and content[0].bytes == [97]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -2.0, -3.0]
    plain = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert plain[0].logprob == -0.25 and plain[0].top_logprobs == []
    chunks = list(client.chat.completions.create(**asked, top_logprobs=1, stream=True))
    assert [chunk.choices[0].logprobs.content[0].token for chunk in chunks] == ["a", "b"]


def test_vllm_names_reach_the_engine(client: openai.OpenAI, server: Running) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [3],
        "allowed_token_ids": [4, 3],
        "bad_words": ["sir", "my lord"],
        "ignore_eos": True,
        "prompt_logprobs": 1,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    plain = {
        "max_tokens": 3,
        "seed": -7,
        "stop": ["!", "?", ";", "#", "%"],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "temperature": 0.25,
        "top_p": 0.5,
    }
    asked = {
        "model": "fake",
        "prompt": "hey you",
        "user": "me",
        "logit_bias": {"9": -100, "3": 2},
        **plain,
    }
    answer = client.completions.create(**asked, extra_body={"return_token_ids": True, **extra})
    sampling, ids = server.engine.submitted[-1].sampling, server.engine.submitted[-1].ids
    assert {name: getattr(sampling, name) for name in plain | extra} == plain | extra
    assert sampling.logit_bias == {9: -100.0, 3: 2.0}
    choice = answer.choices[0].model_dump()
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) == 3
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids[1])] == {
        "logprob": -0.25,
        "rank": 1,
        "decoded_token": "e",
    }


def test_truncated_prompt_and_template_kwargs(client: openai.OpenAI, server: Running) -> None:
    asked = {"model": "fake", "max_tokens": 1}
    client.completions.create(**asked, prompt="abcdef", extra_body={"truncate_prompt_tokens": 2})
    assert server.engine.tokenizer.decode(server.engine.submitted[-1].ids) == "ef"
    messages = [{"role": "user", "content": "hi"}]
    extra = {"chat_template_kwargs": {"shout": "!!"}, "add_generation_prompt": False}
    client.chat.completions.create(**asked, messages=messages, extra_body=extra)
    assert server.engine.tokenizer.decode(server.engine.submitted[-1].ids) == "<user>hi\n!!"


def test_a_final_message_is_continued(client: openai.OpenAI, server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(model="fake", max_tokens=1, messages=messages, extra_body=extra)
    assert (
        server.engine.tokenizer.decode(server.engine.submitted[-1].ids)
        == "<user>hi\n<assistant>Well, "
    )
    for given in ({"continue_final_message": True}, {**extra, "continue_final_message": "yes"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="fake", max_tokens=1, messages=messages, extra_body=given
            )
        assert caught.value.param == "continue_final_message"


def test_tokens_as_ids(client: openai.OpenAI, server: Running) -> None:
    extra = {"return_tokens_as_token_ids": True}
    answer = client.completions.create(
        model="fake", prompt="x", max_tokens=1, logprobs=0, extra_body=extra
    )
    assert answer.choices[0].logprobs.tokens == [f"token_id:{server.engine.spelling[0]}"]


def test_async_client(server: Running) -> None:
    async def ask() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.completions.create(model="fake", prompt="x", max_tokens=3)
            messages = [{"role": "user", "content": "hi"}]
            stream = await client.chat.completions.create(
                model="fake", messages=messages, max_tokens=3, stream=True
            )
            return whole.choices[0].text, [chunk.choices[0].delta.content async for chunk in stream]

    assert asyncio.run(ask()) == ("abc", ["a", "b", "c"])


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "penstock"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("meta/other")
    assert caught.value.code == "model_not_found"


def test_the_models_defaults_serve_as_in_vllm(tmp_path: pytest.TempPathFactory) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    with running_server(make_tokenizer(tmp_path), sampling_defaults=defaults) as server:
        body = {"prompt": "x", "top_p": 0.5}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        sampling = server.engine.submitted[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (
            0.6,
            0.5,
            40,
            16,
        )


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    with running_server(None) as server:
        body = {"prompt": [1, 2], "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
        choice = httpx.post(server.url + "/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == "" and choice["token_ids"] == [100, 101]
        assert choice["logprobs"]["tokens"] == ["token_id:100", "token_id:101"]
        for refused in (
            {"prompt": "text"},
            {"prompt": [1], "echo": True},
            {"prompt": [1], "stop": "x"},
        ):
            assert httpx.post(server.url + "/v1/completions", json=refused).status_code == 400
        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert httpx.post(server.url + "/v1/chat/completions", json=chat).status_code == 400
