"""LLM() is the demo model: its greedy answers are transformers', its forks are its single samples,
it chats."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from itertools import product
from math import isfinite, nextafter
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams, demo
from penstock.errors import UsageError
from penstock.row_table import RANGES

pytestmark = pytest.mark.torch

ROWS = [json.loads(line) for line in demo.problems_file().read_text().splitlines()[:5]]
QUESTIONS = [f"Question: {row['question']}\nAnswer:" for row in ROWS]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_model_len=256, max_num_seqs=32, kv_cache_tokens=4096) as made:
        yield made


def test_every_number_up_to_its_ends_gives_tokens(llm: LLM) -> None:
    """What float32 makes 0, subnormal or 1 of among them, and all ends at once."""
    tiny = [5e-324, 1e-50, 1e-45, 1e-40, 1e-30]
    taken: dict[str, list[float]] = {
        "temperature": [*tiny, 1e-7, 1e-6],
        "top_p": [*tiny, nextafter(1.0, 0.0)],
        "min_p": [*tiny, nextafter(1.0, 0.0)],
        "presence_penalty": tiny,
        "frequency_penalty": tiny,
        "logit_bias": tiny,
    }
    every = list(range(2048))
    ends = {
        name: (nextafter(low, high) if open_low else low, high)
        for name, (low, high, open_low) in RANGES.items()
    }
    asked: list[dict[str, Any]] = [
        {name: value} for name in ends for value in (*ends[name], *taken.get(name, ()))
    ]
    asked += [dict(zip(ends, some, strict=True)) for some in product(*ends.values())]
    for each in asked:
        if "logit_bias" in each:
            each["logit_bias"] = dict.fromkeys(
                every if len(each) == 1 else every[::2], each["logit_bias"]
            )
    params = [
        SamplingParams(max_tokens=3, seed=1, ignore_eos=True, logprobs=1, **each) for each in asked
    ]
    for out in llm.generate([QUESTIONS[0]] * len(params), params, use_tqdm=False):
        assert out.error is None and [each.finish_reason for each in out.outputs] == ["length"]
        assert all(
            isfinite(near.logprob) for at in out.outputs[0].logprobs or () for near in at.values()
        )


def test_it_chats(llm: LLM) -> None:
    talks = [[{"role": "user", "content": row["question"]}] for row in ROWS[:2]]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    both = llm.chat(talks, params, use_tqdm=False)
    for talk, out in zip(talks, both, strict=True):
        (alone,) = llm.chat(talk, params, use_tqdm=False)
        assert alone.outputs[0].text == out.outputs[0].text != ""
        assert alone.prompt_token_ids == out.prompt_token_ids
        assert (
            out.prompt == f"<|turn|>user\n{talk[0]['content']}<|end_of_turn|>\n<|turn|>assistant\n"
        )
        assert (
            llm.get_tokenizer().encode(out.prompt, add_special_tokens=False) == out.prompt_token_ids
        )
    said = [
        {"role": "user", "content": ROWS[0]["question"]},
        {"role": "assistant", "content": "The "},
    ]
    (going_on,) = llm.chat(
        said, params, use_tqdm=False, continue_final_message=True, add_generation_prompt=False
    )
    assert going_on.prompt == (both[0].prompt or "") + "The " and going_on.outputs[0].text
    (given,) = llm.chat(
        said,
        params,
        use_tqdm=False,
        chat_template_kwargs={"bos_token": "x"},
        tools=[{"type": "function"}],
    )
    assert given.error is None
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"continue_final_message": True}, "exclude each other"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be true or false"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object"),
        ({"tools": [7]}, "tools must be a list of objects"),
        ({"chat_template": "x"}, "say chat_template=FILE"),
    ]
    for options, says in wrong:
        with pytest.raises(UsageError, match=says):
            llm.chat(said, params, use_tqdm=False, **options)
    (broken,) = llm.chat([{"role": "user"}], params, use_tqdm=False)
    assert broken.outputs == [] and broken.error and broken.prompt is None


def test_the_readmes_example_runs_and_its_chat_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "LLM()" in block
    ]
    (tmp_path / "example.py").write_text(example)
    made = runpy.run_path(str(tmp_path / "example.py"))
    (output,) = made["answer"].outputs
    assert output.finish_reason == "stop" and re.search(r"#### 501\s*$", output.text)
    assert capsys.readouterr().out.strip().endswith(output.text.strip())
