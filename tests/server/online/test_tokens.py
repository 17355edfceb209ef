"""/tokenize, /detokenize and what else tools ask of a server beside answers; and what other
servers' paths are told."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from server_fake import CONTEXT, Running, make_tokenizer, running_server

from penstock.sandbox.sandbox_process import Job, Reply, TellJob, TokensJob
from penstock.server.api_server.not_served import INSTEAD, not_served
from penstock.server.online.request_limits import RequestLimits
from penstock.server.online.token_handlers import FEW_IDS
from penstock.server.openai.token_forms import MOST_IDS

pytestmark = pytest.mark.torch

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}>{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(
        make_tokenizer(tmp_path_factory.mktemp("tok"), template=TEMPLATE)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=600) as made:
        yield made


def said(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("text", ["Tom has 3 apples.", "naïve – 学\n", " ", "word " * 2000])
def test_there_and_back(http: httpx.Client, server: Running, text: str) -> None:
    told = said(http, "/tokenize", prompt=text, return_token_strs=True)
    tokenizer = server.service.client.tokenizer
    assert tokenizer is not None and told["tokens"] == tokenizer.encode(text)
    assert (
        told["count"] == len(told["tokens"]) == len(told["token_strs"])
        and told["max_model_len"] == CONTEXT
    )
    bare = said(http, "/tokenize", prompt=text, add_special_tokens=False)
    assert bare["token_strs"] is None and said(http, "/detokenize", tokens=bare["tokens"]) == {
        "prompt": text
    }


def test_what_is_too_long_to_be_answered_is_counted_all_the_same(http: httpx.Client) -> None:
    assert said(http, "/tokenize", prompt="ab" * 40_000)["count"] == 80_000 > CONTEXT
    assert said(http, "/tokenize", prompt="a" * 1_000_000)["count"] == 1_000_000
    for text in ("a" * 1_000_001, "\u0301" * 500_001):  # as many tokens, perhaps, as bytes in UTF-8
        answer = http.post("/tokenize", json={"prompt": text})
        assert (
            answer.status_code == 400
            and "1000000 bytes: tokenise it in parts" in answer.json()["error"]["message"]
        )


def test_what_is_long_is_done_in_a_sandbox_and_has_a_place_in_the_queue(
    http: httpx.Client, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, seen = server.service.sandboxes, list[Job]()
    run = pool.run

    def noted(jobs: Sequence[Job]) -> Awaitable[list[Reply]]:
        seen.extend(jobs)
        return run(jobs)

    monkeypatch.setattr(pool, "run", noted)
    text = "ab " * 3_000
    ids = said(http, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert said(http, "/detokenize", tokens=ids) == {"prompt": text} and len(ids) > FEW_IDS
    assert [type(job) for job in seen] == [TellJob, TokensJob]
    assert said(http, "/detokenize", tokens=ids[:FEW_IDS])["prompt"] in text and len(seen) == 2
    assert len(said(http, "/detokenize", model="fake", tokens=[5] * MOST_IDS)["prompt"]) == MOST_IDS
    for more, why in (
        (1, "tokens has more than 1000000 ids: send them in parts"),
        (4, "send it in parts"),
    ):
        answer = http.post("/detokenize", json={"tokens": [5] * (MOST_IDS + more)})
        assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    with held(server.service.request_limits):
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert http.post(path, json=body).status_code == 429
    assert said(http, "/detokenize", tokens=[5])


@contextmanager
def held(limits: RequestLimits) -> Iterator[None]:
    """Has the queue full."""
    ticket = limits.acquire(None, limits.reqs.most, 0)
    yield
    ticket.release()


def test_nothing_has_no_text(http: httpx.Client) -> None:
    assert (
        said(http, "/detokenize", tokens=[]) == {"prompt": ""}
        and said(http, "/tokenize", prompt="")["tokens"] == []
    )


def test_a_chat_is_what_the_template_makes_of_it(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = said(http, "/tokenize", messages=messages)["tokens"]
    assert said(http, "/detokenize", tokens=whole) == {"prompt": "[user] hi\n>"}
    open_ended = said(http, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    assert said(http, "/detokenize", tokens=open_ended) == {"prompt": "[user] hi\n"}


def test_what_tools_ask_of_a_tokenizer(http: httpx.Client, server: Running) -> None:
    told = http.get("/tokenizer_info").json()
    tokenizer = server.service.client.tokenizer
    assert tokenizer is not None
    assert told["chat_template"] == TEMPLATE and told["vocab_size"] == tokenizer.vocab_size
    assert {name: told[name] for name in tokenizer.special_tokens} == dict(tokenizer.special_tokens)


def test_probes(http: httpx.Client) -> None:
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/tokenize", {}, "prompt must be one text, or give messages"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt must be one text, or give messages"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "x"}]},
            "exclude each other",
        ),
        (
            "/tokenize",
            {"prompt": "a", "return_token_strs": "yes"},
            "return_token_strs must be true or false",
        ),
        ("/tokenize", {"prompt": "a", "model": "other"}, "the model asked for is not served here"),
        ("/tokenize", {"prompt": "a", "bogus": 1}, "bogus"),
        ("/tokenize", {"messages": []}, "messages must be a list of at least one message"),
        ("/detokenize", {}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [True]}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [-1]}, "tokens has an id outside the vocabulary"),
        ("/detokenize", {"tokens": [10**30]}, "outside the vocabulary"),
        ("/detokenize", {"tokens": [1], "text": "a"}, "'text' is not a field of /detokenize"),
        ("/detokenize", {"tokens": [1], "model": 3}, "model must be a text"),
    ],
)
def test_bad_input(http: httpx.Client, path: str, body: dict[str, Any], error: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code in (400, 404) and error in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", INSTEAD)
def test_other_servers_paths_say_what_to_take(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_served"
    assert answer.json()["error"]["message"] == INSTEAD[path] == not_served(f"{path}/more")
    assert not_served(f"{path}x") is None
