"""Clients as people have them, unchanged, against `penstock serve demo`: curl, and lm_eval with its local-completions.

openai's client has files of its own (test_server_openai, test_server_real, test_files, test_batches). What lm_eval
measures is compared with the same weights in transformers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.demo import model_folder, problems_file

pytestmark = pytest.mark.torch

KEY = "sk-the-clients'-key"
PROMPT = "Question: Tom has 3 apples and buys 4 more. How many apples does Tom have?\nAnswer:"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serving")
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--port", "0", "--dtype", "float32"]
    command += ["--max-num-seqs", "32", "--kv-cache-tokens", "65536", "--state-dir", str(folder / "state")]
    environment = {**os.environ, "PENSTOCK_API_KEY": KEY}
    with (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("penstock serves demo at "), (folder / "stderr").read_text()
            yield line.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
    assert process.returncode == 0


# --- curl


@pytest.fixture
def curl(url: str) -> Any:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")

    def ask(path: str, *arguments: str, key: str = KEY, send: bytes | None = None) -> bytes:
        command = [program, "-sS", "--max-time", "120", url + path, "-H", f"Authorization: Bearer {key}", *arguments]
        made = subprocess.run(command, input=send, capture_output=True)
        assert made.returncode == 0, made.stderr
        return made.stdout

    return ask


def body(**more: Any) -> tuple[str, ...]:
    asked = {"model": "demo", "temperature": 0, "max_tokens": 24, **more}
    return "-H", "Content-Type: application/json", "-d", json.dumps(asked)


@pytest.mark.parametrize(
    "how",
    [
        ("-H", "Transfer-Encoding: chunked"),
        ("--http1.0",),
        ("--http2",),  # over plain HTTP it asks for an upgrade, which isn't served: the answer comes as if it had not
        ("--compressed",),
        ("-H", "Expect: 100-continue", "--expect100-timeout", "30"),
    ],
    ids=lambda how: " ".join(how),
)
def test_curl_in_its_ways(curl: Any, how: tuple[str, ...]) -> None:
    plain = json.loads(curl("/completions", *body(prompt=PROMPT)))["choices"]
    assert json.loads(curl("/completions", *how, *body(prompt=PROMPT)))["choices"] == plain


# --- lm_eval

TASKS = {
    "sums_choice": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: label
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "sums_free": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n", "####"], max_gen_toks: 64, temperature: 0.0, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "sums_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "Question: {{question}}\\nAnswer: {{answer}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


def write_tasks(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in problems_file().read_text().splitlines()[:6]]
    for at, row in enumerate(rows):
        right = row["answer"].split("#### ")[-1]
        row["choices"] = [right, str(int(right) + 1), "nobody knows"]
        row["label"] = 0
        if at % 2:
            row["choices"].reverse()
            row["label"] = 2
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\n"
        rest = "test_split: test\nnum_fewshot: 0\nmetadata: {version: 1}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{rest}{task.lstrip()}")
    return rows


def lm_eval(
    folder: Path, url: str, name: str, *more: str, together: int
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Its results, and its samples by task, in the order of the rows. together: prompts of one body."""
    arguments = {"model": "demo", "base_url": f"{url}/completions", "tokenizer": str(model_folder()), "max_retries": 1}
    known = ",".join(f"{key}={value}" for key, value in arguments.items())
    command = [
        sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", ",".join((known, *more)),
        "--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(folder / name), "--log_samples",
        "--batch_size", str(together),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": KEY}
    made = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, **offline})
    assert made.returncode == 0, made.stderr[-3000:]
    (results,) = (folder / name).rglob("results_*.json")
    samples = {}
    for task in TASKS:
        (path,) = (folder / name).rglob(f"samples_{task}_*.jsonl")
        samples[task] = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return json.loads(results.read_text())["results"], samples


class Reference:
    """The same weights in transformers, one text at a time."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder())
        self.model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).eval()

    def score(self, context: list[int], rest: list[int]) -> tuple[float, bool]:
        """The log-probability of `rest` behind `context`, and whether greedy decoding would draw it."""
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([context + rest])).logits[0, len(context) - 1 : -1]
        scores = logits.log_softmax(-1)
        target = self.torch.tensor(rest)
        return scores.gather(1, target[:, None]).sum().item(), bool((scores.argmax(-1) == target).all())

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def greedy(self, text: str, stops: list[str], most: int) -> str:
        ids = self.ids(text)
        made = self.model.generate(self.torch.tensor([ids]), max_new_tokens=most, do_sample=False, pad_token_id=3)
        found = self.tokenizer.decode(made[0][len(ids) :], skip_special_tokens=True)
        return min((found.partition(stop)[0] for stop in stops), key=len)


@pytest.fixture(scope="module")
def reference() -> Reference:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed: make reliability brings it")
    if "PENSTOCK_RELIABILITY" not in os.environ:
        pytest.skip("lm_eval takes a minute to import and run: make reliability asks for it")
    return Reference()


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
    results, samples = lm_eval(tmp_path, url, name, *how, together=together)
    prompts = [f"Question: {row['question']}\nAnswer:" for row in rows]

    right = 0
    for row, prompt, sample in zip(rows, prompts, samples["sums_choice"], strict=True):
        context = reference.ids(prompt)
        whole = [reference.ids(f"{prompt} {choice}") for choice in row["choices"]]
        wanted = [reference.score(context, ids[len(context) :]) for ids in whole]
        found = [(float(resp[0][0]), resp[0][1] == "True") for resp in sample["resps"]]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=2e-3)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
        right += max(range(3), key=lambda at: wanted[at][0]) == row["label"]
    assert results["sums_choice"]["acc,none"] == pytest.approx(right / len(rows))

    for prompt, sample in zip(prompts, samples["sums_free"], strict=True):
        assert sample["resps"][0][0] == reference.greedy(prompt, ["\n\n", "####"], 64)

    for row, sample in zip(rows, samples["sums_text"], strict=True):
        ids = reference.ids(f"Question: {row['question']}\nAnswer: {row['answer']}")
        wanted = reference.score([reference.tokenizer.eos_token_id], ids)[0]
        assert float(sample["resps"][0][0]) == pytest.approx(wanted, abs=1e-2)
