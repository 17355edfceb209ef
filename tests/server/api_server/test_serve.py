"""`serve` with the demo model, in processes of their own, and clients as people have them,
unchanged: the official one, curl, and lm_eval, whose measures are compared with the same weights in
transformers. What deaths leave is test_deaths'.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from at_length import at_length
from lm_eval_tasks import lm_eval, write_tasks

from penstock.demo import model_folder
from penstock.row_table import RANGES

pytestmark = pytest.mark.torch

SERVE = """
import sys
from penstock.config import Config
from penstock.errors import PenstockError
from penstock.server.api_server.serve import serve
try:
    config = Config.of(model=sys.argv[1], max_num_seqs=32, max_model_len=512, dtype="float32")
    serve(config, port=0, api_server_count=int(sys.argv[2]))
except PenstockError as error:
    print("error:", error, flush=True)
    sys.exit(error.exit_code)
"""
PROMPT = "Question: Tom has 3 apples and buys 4 more. How many apples does Tom have?\nAnswer:"
COMPLETIONS = "/v1/completions"


class Serving:
    def __init__(self, model: str = "demo", servers: int = 1) -> None:
        command = [sys.executable, "-c", SERVE, model, str(servers)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("penstock serves demo at http://127.0.0.1:"), line
        return line.split()[-1].removesuffix("/v1")

    def engine(self) -> int:
        """The engine's process id."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        (engine,) = (
            int(pid)
            for pid in children
            if "engine.process" in Path(f"/proc/{pid}/cmdline").read_text()
        )
        return engine

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=600)
        return self.process.returncode, out, err


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    serving = Serving()
    try:
        found = serving.url()
        engine = serving.engine()
        yield found
    finally:
        ended = serving.end(signal.SIGTERM)
    code, out, err = ended
    assert (code, out) == (0, "")
    said = [line.split()[1] for line in err.splitlines() if line.startswith("penstock: ")]
    assert said == ["loads", "weights", "demo", "listens"] and err.count("\n") == len(said), err
    assert not Path(f"/proc/{engine}").exists()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=600) as made:
        yield made


def gauge(url: str, name: str) -> float:
    lines = httpx.get(url + "/metrics").text.splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith(f"penstock:{name}{{"))
    return float(value)


def wait_until(condition: Any) -> None:
    while not condition():
        time.sleep(0.02)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streamed_and_whole_answers_are_one(client: openai.OpenAI, temperature: float) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "prompt": [PROMPT, "Question: A"],
        "n": 3,
        "max_tokens": 40,
        "seed": 5,
    }
    asked |= {"temperature": temperature, "stop": ["Question:", "####"]}
    whole = client.completions.create(**asked)
    texts, ends = dict.fromkeys(range(6), ""), {}
    for chunk in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert all(texts.values()) and not any("####" in text for text in texts.values())
    assert "stop" in ends.values()
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens <= 6 * 40
    assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens
    if temperature == 0:
        assert texts[0] == texts[1] == texts[2]
    else:
        assert len({texts[0], texts[1], texts[2]}) > 1


def test_label_scores_are_the_softmax_of_transformers_logits(url: str) -> None:
    """Streams of many prompts are merged on the way: scores stand where their items did."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).eval()
    query, labels = list(range(20, 58)), [11, 5, 40]
    items = [[30 + at % 50, *range(60, 60 + at % 7)] for at in range(80)]
    with torch.inference_mode():
        logits = [model(torch.tensor([query + item])).logits[0, -1] for item in items[:20]]
    for softmax in (True, False):
        body = {"query": query, "items": items, "label_token_ids": labels, "apply_softmax": softmax}
        answer = httpx.post(url + "/generative_scoring", json=body, timeout=600).json()
        assert answer["object"] == "list" and [each["index"] for each in answer["data"]] == list(
            range(80)
        )
        for each, row in zip(answer["data"], logits, strict=False):
            wanted = row[labels].softmax(-1) if softmax else row.softmax(-1)[labels]
            assert each["label_probs"] == pytest.approx(wanted.tolist(), rel=1e-3)
            assert each["score"] == each["label_probs"][0]
        assert answer["usage"]["prompt_tokens"] == sum(len(query) + len(item) for item in items)
        assert answer["usage"]["completion_tokens"] == 80
    text = {"query": "Is 7 prime? ", "items": ["Answer:", " No,"], "label_token_ids": labels}
    assert len(httpx.post(url + "/generative_scoring", json=text).json()["data"]) == 2


def test_the_rest_of_the_samples_end_when_two_agree(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "prompt": PROMPT,
        "n": 60,
        "max_tokens": 200,
        "seed": 5,
        "stop": ["Question:"],
    }
    more = {"stop_when": {"pattern": r"#### *([0-9]+)", "agree": 2}, "return_token_ids": True}
    whole = client.completions.create(**asked, extra_body=more)
    texts, ends, tokens = dict.fromkeys(range(60), ""), dict[int, str](), 0
    for chunk in client.completions.create(
        **asked, extra_body=more, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            assert choice.index not in ends, "news after the end"
            texts[choice.index] += choice.text
            tokens += len(choice.model_extra["token_ids"] or ())
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    streamed = [(ends[index], texts[index]) for index in range(60)]
    for choices in (streamed, [(choice.finish_reason, choice.text) for choice in whole.choices]):
        answers = Counter(
            re.findall(r"#### *([0-9]+)", text)[0]
            for end, text in choices
            if end == "stop" and "####" in text
        )
        assert len(choices) == 60 and max(answers.values()) >= 2
        assert Counter(end for end, _ in choices)["abort"] > 10
    assert all(
        choice.stop_reason == "stop_when"
        for choice in whole.choices
        if choice.finish_reason == "abort"
    )
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    assert chunk.usage.completion_tokens == tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_that_has_to_be_called_is(client: openai.OpenAI, stream: bool) -> None:
    """The demo model was taught no tools: the grammar alone makes it call them."""
    pytest.importorskip("llguidance")
    count = {
        "type": "object",
        "properties": {"apples": {"type": "integer", "minimum": 0, "maximum": 999}},
    }
    count |= {"required": ["apples"], "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": count, "strict": True}}
        for name in ("buy", "sell")
    ]
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": PROMPT}],
        "tools": tools,
        "n": 4,
    }
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200, "seed": 3}
    calls = dict.fromkeys(range(4), "")
    ends: dict[int, str | None] = {}
    if stream:
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                for part in choice.delta.tool_calls or []:
                    calls[choice.index] += part.function.arguments
                ends[choice.index] = choice.finish_reason
    else:
        for choice in client.chat.completions.create(**asked).choices:
            (call,) = choice.message.tool_calls
            assert call.function.name in ("buy", "sell") and choice.message.content is None
            calls[choice.index], ends[choice.index] = call.function.arguments, choice.finish_reason
        done = {"role": "tool", "tool_call_id": call.id, "content": "There are 7 now."}
        said = [*asked["messages"], choice.message, done]
        assert (
            client.chat.completions.create(
                model="demo", messages=said, max_tokens=4
            ).usage.completion_tokens
            == 4
        )
    assert ends == dict.fromkeys(range(4), "tool_calls")
    assert all(0 <= json.loads(arguments)["apples"] <= 999 for arguments in calls.values())


def test_a_stop_string_is_named_and_may_stay(client: openai.OpenAI) -> None:
    asked = {
        "model": "demo",
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 60,
        "stop": ["####"],
    }
    cut = client.completions.create(**asked).choices[0]
    kept = client.completions.create(
        **asked, extra_body={"include_stop_str_in_output": True}
    ).choices[0]
    assert cut.finish_reason == "stop" and cut.model_extra["stop_reason"] == "####"
    assert kept.text == cut.text + "####"


def test_echo_scores_the_prompt_as_it_scores_its_own_tokens(client: openai.OpenAI) -> None:
    """What lm_eval relies on: the logprobs of generated tokens are those of the same tokens as a
    prompt."""
    first = client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=8, logprobs=1
    )
    extra = {"return_token_ids": True}
    ids = (
        client.completions.create(
            model="demo", prompt=PROMPT, temperature=0, max_tokens=8, extra_body=extra
        )
        .choices[0]
        .model_extra
    )
    whole = ids["prompt_token_ids"] + ids["token_ids"]
    echoed = client.completions.create(
        model="demo", prompt=whole, max_tokens=0, echo=True, logprobs=1
    )
    scores = echoed.choices[0].logprobs.token_logprobs
    assert scores[0] is None and len(scores) == len(whole)
    assert scores[-8:] == pytest.approx(first.choices[0].logprobs.token_logprobs, abs=0.05)
    assert echoed.choices[0].text == PROMPT + first.choices[0].text


def test_a_burst_of_all_kinds_is_answered_and_leaves_nothing(url: str) -> None:
    """Requests that come, are cut and end at once, so that words cross in both directions at the
    same moments."""
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 5},
        {"n": 7, "temperature": 0, "logprobs": 3},
        {"stream": True, "top_p": 0.5, "stop": ["e", " the"]},
        {"max_tokens": 400, "ignore_eos": True, "cut": 0.05},
        {"prompt": [[5] * 200, [6], [7, 8]], "top_k": 3, "stop_token_ids": list(range(100, 200))},
        {
            "max_tokens": 40,
            "stream": True,
            "n": 5,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": 9},
        },
        {"echo": True, "logprobs": 2, "min_p": 0.1, "seed": 3, "frequency_penalty": 1},
    ]

    async def one(http: httpx.AsyncClient, kind: dict[str, Any]) -> int:
        body = {"prompt": PROMPT, "max_tokens": 10, **kind}
        cut = body.pop("cut", None)
        try:
            answer = await http.post(
                COMPLETIONS, json=body, timeout=httpx.Timeout(120, read=cut or 120)
            )
        except httpx.ReadTimeout:
            assert cut is not None
            return 0
        assert '"error"' not in answer.text
        return answer.status_code

    async def burst() -> list[int]:
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as http:
            return await asyncio.gather(*(one(http, kinds[at % len(kinds)]) for at in range(35)))

    codes = asyncio.run(burst())
    assert set(codes) <= {0, 200} and codes.count(200) >= 30
    wait_until(lambda: gauge(url, "num_requests_running") + gauge(url, "num_requests_waiting") == 0)
    assert gauge(url, "kv_cache_usage_perc") == 0


def test_the_ends_of_every_range_are_answered(url: str) -> None:
    for name, (low, high, open_low) in RANGES.items():
        for value in (1e-30 if open_low else low, high):
            body = {
                "prompt": PROMPT,
                "max_tokens": 2,
                name: {"5": value} if name == "logit_bias" else value,
            }
            answer = httpx.post(url + COMPLETIONS, json=body, timeout=600)
            assert answer.status_code == 200, (name, value, answer.text)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_model_that_cannot_load_is_one_line(tmp_path: Path, servers: int) -> None:
    status, out, err = Serving(str(tmp_path), servers).end()
    assert status == 2 and out.startswith("error: ") and out.count("\n") == 1 and not err


# --- curl


@pytest.mark.parametrize(
    "how",
    [
        ("-H", "Transfer-Encoding: chunked"),
        ("--http1.0",),
        (
            "--http2",
            # over plain HTTP it asks for an upgrade, which isn't served: the answer comes as if it
            # had not
        ),
        ("--compressed",),
        ("-H", "Expect: 100-continue", "--expect100-timeout", "30"),
    ],
    ids=lambda how: " ".join(how),
)
def test_curl_in_its_ways(url: str, how: tuple[str, ...]) -> None:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    asked = json.dumps({"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 8})
    command = [
        program,
        "-sS",
        "--max-time",
        "120",
        url + COMPLETIONS,
        "-H",
        "Content-Type: application/json",
    ]
    plain, other = (subprocess.check_output([*command, *more, "-d", asked]) for more in ((), how))
    assert json.loads(other)["choices"] == json.loads(plain)["choices"]


# --- lm_eval


class Reference:
    """The same weights in transformers, one text at a time."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder())
        self.model = AutoModelForCausalLM.from_pretrained(
            model_folder(), dtype=torch.float32
        ).eval()

    def score(self, context: list[int], rest: list[int]) -> tuple[float, bool]:
        """The log-probability of `rest` behind `context`, and whether greedy decoding would draw
        it."""
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([context + rest])).logits[
                0, len(context) - 1 : -1
            ]
        scores = logits.log_softmax(-1)
        target = self.torch.tensor(rest)
        return scores.gather(1, target[:, None]).sum().item(), bool(
            (scores.argmax(-1) == target).all()
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def greedy(self, text: str, stops: list[str], most: int) -> str:
        ids = self.ids(text)
        made = self.model.generate(
            self.torch.tensor([ids]), max_new_tokens=most, do_sample=False, pad_token_id=3
        )
        found = self.tokenizer.decode(made[0][len(ids) :], skip_special_tokens=True)
        return min((found.partition(stop)[0] for stop in stops), key=len)


@pytest.fixture(scope="module")
def reference() -> Reference:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed: make reliability brings it")
    return Reference()


@at_length
@pytest.mark.parametrize(
    ("name", "together", "how"),
    [
        ("ids", 1, ("num_concurrent=4",)),
        ("texts", 4, ("tokenized_requests=False", "tokenizer_backend=huggingface")),
    ],
)
def test_lm_eval_measures_what_transformers_does(
    url: str, tmp_path: Path, reference: Reference, name: str, together: int, how: tuple[str, ...]
) -> None:
    rows = write_tasks(tmp_path)
    results, samples = lm_eval(
        tmp_path,
        name,
        "local-completions",
        *how,
        together=together,
        model="demo",
        base_url=url + COMPLETIONS,
        tokenizer=model_folder(),
        max_retries=1,
    )
    prompts = [f"Question: {row['question']}\nAnswer:" for row in rows]

    right = 0
    for row, prompt, sample in zip(rows, prompts, samples["sums_choice"], strict=True):
        context = reference.ids(prompt)
        whole = [reference.ids(f"{prompt} {choice}") for choice in row["choices"]]
        wanted = [reference.score(context, ids[len(context) :]) for ids in whole]
        found = [(float(resp[0][0]), resp[0][1] == "True") for resp in sample["resps"]]
        assert [score for score, _ in found] == pytest.approx(
            [score for score, _ in wanted], abs=2e-3
        )
        assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
        right += max(range(3), key=lambda at: wanted[at][0]) == row["label"]
    assert results["sums_choice"]["acc,none"] == pytest.approx(right / len(rows))

    for prompt, sample in zip(prompts, samples["sums_free"], strict=True):
        assert sample["resps"][0][0] == reference.greedy(prompt, ["\n\n", "####"], 64)

    for row, sample in zip(rows, samples["sums_text"], strict=True):
        ids = reference.ids(f"Question: {row['question']}\nAnswer: {row['answer']}")
        wanted = reference.score([reference.tokenizer.eos_token_id], ids)[0]
        assert float(sample["resps"][0][0]) == pytest.approx(wanted, abs=1e-2)
