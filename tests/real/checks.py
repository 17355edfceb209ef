"""What is tried on a published checkpoint. Each check is a function from a folder to what came out,
in a few words; one that fails raises AssertionError. It knows clients and command lines, as people
have them."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
from lm_eval_tasks import lm_eval, write_tasks

from penstock import LLM, SamplingParams
from penstock.artifact.manifest import read_manifest
from penstock.demo import problems_file, shots_file

PENSTOCK = [sys.executable, "-m", "penstock"]
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time,   in a   land \n\n\tfar away",
    "今日はいい天気ですね。 👩‍👩‍👧 ",
]
DRAWN = [{"temperature": 0}, *({"temperature": 1.0, "seed": seed} for seed in range(3))]


@dataclass(frozen=True)
class Trial:
    """A checkpoint under trial: its folder, and one for what the checks write."""

    folder: Path
    room: Path


# --- against transformers


def parity(trial: Trial) -> str:
    """Token ids of texts, greedy answers and their logprobs, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trial.folder)
    model = AutoModelForCausalLM.from_pretrained(trial.folder, dtype=torch.float32).eval()
    with LLM(str(trial.folder), dtype="float32", max_model_len=512) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=32, logprobs=1)
        outputs = llm.generate(TEXTS, greedy, use_tqdm=False)
    tokens, off = 0, 0.0
    for text, output in zip(TEXTS, outputs, strict=True):
        ids = tokenizer(text).input_ids
        assert list(output.prompt_token_ids) == ids, (
            f"ids of {text!r}: {output.prompt_token_ids}, not {ids}"
        )
        theirs = model.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=32,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answer, mine = theirs.sequences[0, len(ids) :].tolist(), output.outputs[0]
        assert list(mine.token_ids) == answer, f"behind {text!r}: {mine.token_ids}, not {answer}"
        for step, logits, told in zip(answer, theirs.logits, mine.logprobs, strict=True):
            off = max(off, abs(float(logits[0].float().log_softmax(-1)[step]) - told[step].logprob))
        tokens += len(answer)
    assert off < 1e-3, f"logprobs are {off:.2g} off"
    return f"{tokens} of {tokens} greedy tokens, logprobs within {off:.0e}"


def evaluated(trial: Trial) -> str:
    """lm_eval: a choice, a free answer and a perplexity, over HTTP and by its own backend of
    transformers."""
    folder = trial.room / "lm_eval"
    folder.mkdir(parents=True)
    count = len(write_tasks(folder))
    start = json.loads((trial.folder / "config.json").read_text())["bos_token_id"]
    # lm_eval's own backend begins texts of this family so
    bos = "gemma" in trial.folder.name.lower()
    with serving(trial.folder) as client:
        asked = {
            "base_url": f"{client.base_url}completions",
            "custom_prefix_token_id": start,
            "add_bos_token": bos,
        }
        ours = lm_eval(
            folder,
            "ours",
            "local-completions",
            together=4,
            model="real",
            tokenizer=trial.folder,
            **asked,
        )
    wide = {"dtype": "float32", "prefix_token_id": start, "add_bos_token": bos}
    theirs = lm_eval(
        folder, "theirs", "hf", together=1, device="cpu", pretrained=trial.folder, **wide
    )
    for task, samples in theirs[1].items():
        for mine, other in zip(ours[1][task], samples, strict=True):
            for a, b in zip(mine["resps"], other["resps"], strict=True):
                assert _same(a[0], b[0]), f"{task}: {a} and {b}"
    told = []
    for task, metrics in theirs[0].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                mine = ours[0][task][name]
                assert math.isclose(mine, value, rel_tol=1e-3), f"{task} {name}: {mine} and {value}"
                told.append(f"{name.partition(',')[0]} {mine:.3g}")
    return f"{count} rows of three tasks: {', '.join(told)}, both"


def _same(mine: Any, other: Any) -> bool:
    """Whether two answers to lm_eval are alike: texts, logprobs, or a logprob and whether it is
    greedy."""
    if isinstance(mine, list):
        return len(mine) == len(other) and all(map(_same, mine, other))
    try:
        return math.isclose(float(mine), float(other), rel_tol=1e-3, abs_tol=1e-2)
    except (TypeError, ValueError):
        return bool(mine == other)


# --- over HTTP


@contextmanager
def serving(folder: Path) -> Iterator[openai.OpenAI]:
    """A server with the checkpoint, under the name `real`."""
    words = [
        "serve",
        str(folder),
        "--port",
        "0",
        "--dtype",
        "float32",
        "--served-model-name",
        "real",
    ]
    calls = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "1024"]
    process = subprocess.Popen([*PENSTOCK, *words, *calls], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, f"the server said {line!r}"
        yield openai.OpenAI(
            base_url=line.split()[-1], api_key="none", max_retries=0, timeout=httpx.Timeout(600)
        )
    finally:
        process.terminate()
        process.wait()


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": WEATHER}}
]
QUESTION: Any = {"role": "user", "content": "Is it warm in Rome this week?"}


def together(run: Callable[[Any], int], cases: Iterable[Any]) -> int:
    """Runs all cases at once, in rows of one engine -> the sum of what they gave."""
    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(run, cases))


def tools(trial: Trial) -> str:
    """Calls that must be made, that may be, and the turn behind them; streamed as whole."""
    named = {"type": "function", "function": {"name": "get_weather"}}

    def case(choice_and_how: tuple[Any, dict[str, Any]]) -> int:
        choice, how = choice_and_how
        asked: Any = {
            "model": "real",
            "messages": [QUESTION],
            "tools": TOOLS,
            "tool_choice": choice,
            **how,
        }
        whole = client.chat.completions.create(**asked, max_tokens=100).choices[0]
        made = whole.message.tool_calls or []
        for call in made:
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        assert made or choice == "auto", f"no call, and {choice} was asked for: {whole}"
        streamed = _chat_stream(client, max_tokens=100, **asked)
        wanted = [(call.function.name, call.function.arguments) for call in made]
        assert (streamed["calls"], streamed["content"]) == (wanted, whole.message.content or ""), (
            streamed,
            whole,
        )
        if made:
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "24 degrees"} for call in made
            ]
            asked |= {"messages": [QUESTION, whole.message, *results], "tool_choice": "none"}
            assert client.chat.completions.create(**asked, max_tokens=8).usage.completion_tokens
        return len(made)

    cases = [(choice, how) for choice in ("required", named, "auto") for how in DRAWN]
    with serving(trial.folder) as client:
        calls = together(case, cases)
    return (
        f"{calls} calls in {len(cases)} chats, all of their schema, and the turns behind them;"
        " streamed = whole"
    )


FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pet": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 8}]},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "trains"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pet", "likes"],
    "additionalProperties": False,
}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
ADDED = r"\d{1,3} \+ \d{1,3} = \d{1,3}"
SUM = 'start: number " + " number " = " number\nnumber: /[0-9]{1,3}/'


def forms(trial: Trial) -> str:
    """Answers of a schema, a regex, a choice, a grammar."""
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": FORM},
    }
    choice = ["yes", "no", "I don't know"]
    each: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        (
            {"response_format": schema},
            lambda text: jsonschema.validate(json.loads(text), FORM) is None,
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": DATE}}},
            lambda text: re.fullmatch(DATE, text),
        ),
        ({"extra_body": {"structured_outputs": {"choice": choice}}}, lambda text: text in choice),
        (
            {"extra_body": {"structured_outputs": {"grammar": SUM}}},
            lambda text: re.fullmatch(ADDED, text),
        ),
    ]
    asked: Any = {
        "model": "real",
        "messages": [{"role": "user", "content": "Tell me of somebody."}],
        "max_tokens": 160,
    }

    def case(form_and_how: Any) -> int:
        (form, fits), how = form_and_how
        answer = client.chat.completions.create(**asked, **how, **form).choices[0]
        assert answer.finish_reason == "stop" and fits(answer.message.content), f"{form}: {answer}"
        return 1

    with serving(trial.folder) as client:
        judged = together(case, [(form, how) for form in each for how in DRAWN])
    return f"{judged} answers of {judged} in their form"


def streams(trial: Trial) -> str:
    """Streamed answers are the whole ones: texts, ends, logprobs and counts, of completions and
    chats."""

    def completion(text_and_how: tuple[str, dict[str, Any]]) -> int:
        text, how = text_and_how
        asked: Any = {"model": "real", "prompt": text, "max_tokens": 24, "logprobs": 1, **how}
        whole = client.completions.create(**asked)
        pieces: list[Any] = [["", None, []] for _ in whole.choices]
        usage = None
        for event in client.completions.create(
            stream=True, stream_options={"include_usage": True}, **asked
        ):
            usage = event.usage or usage
            for choice in event.choices:
                piece = pieces[choice.index]
                piece[0] += choice.text
                piece[1] = choice.finish_reason or piece[1]
                piece[2] += choice.logprobs.token_logprobs if choice.logprobs else []
        for choice, piece in zip(whole.choices, pieces, strict=True):
            assert [choice.text, choice.finish_reason] == piece[:2], (
                f"{text!r}, {how}: {piece}, not {choice}"
            )
            assert _same(choice.logprobs.token_logprobs, piece[2])
        counts = [(each.prompt_tokens, each.completion_tokens) for each in (usage, whole.usage)]
        assert counts[0] == counts[1], f"{text!r}, {how}: {counts}"
        return len(pieces)

    def chat(text_and_how: tuple[str, dict[str, Any]]) -> int:
        text, how = text_and_how
        asked = {
            "model": "real",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 24,
            **how,
            "n": 1,
        }
        whole = client.chat.completions.create(**asked).choices[0]  # type: ignore[call-overload]
        streamed = _chat_stream(client, **asked)
        assert (streamed["content"], streamed["end"]) == (
            whole.message.content,
            whole.finish_reason,
        ), streamed
        return 1

    stopped, several = (
        {"temperature": 0, "stop": [" the", "1"]},
        {"temperature": 0.7, "seed": 1, "n": 2},
    )
    cases = [(text, how) for text in TEXTS for how in (*DRAWN[:2], stopped, several)]
    with serving(trial.folder) as client:
        pairs = together(completion, cases) + together(chat, cases)
    return f"{pairs} pairs the same"


def _chat_stream(client: openai.OpenAI, **asked: Any) -> dict[str, Any]:
    """A streamed chat, put together: content, calls (name, arguments), how it ended."""
    content, calls, end = "", dict[int, list[str]](), None
    for event in client.chat.completions.create(stream=True, **asked):
        for choice in event.choices:
            content += choice.delta.content or ""
            end = choice.finish_reason or end
            for call in choice.delta.tool_calls or []:
                pieces = calls.setdefault(call.index, ["", ""])
                pieces[0] += call.function.name or ""
                pieces[1] += call.function.arguments or ""
    return {"content": content, "calls": [tuple(calls[at]) for at in sorted(calls)], "end": end}


# --- jobs and builds


def monkeys(trial: Trial) -> str:
    """Repeated sampling of word problems in GSM8K's form."""
    problems, n = 4, 4
    out = trial.room / "monkeys"
    words = [
        "monkeys",
        str(trial.folder),
        "--out",
        str(out),
        "--problems",
        str(problems_file()),
        "--shots",
    ]
    _run([*words, str(shots_file()), "--limit", str(problems), "--n", str(n), "--max-tokens", "96"])
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    drawn = {(row["problem"], row["sample"]) for row in rows if row["text"] and row["token_count"]}
    assert drawn == {(at, sample) for at in range(problems) for sample in range(n)}, (
        f"{sorted(drawn)} were drawn"
    )
    assert summary["samples"] == len(drawn) and not summary["failed"]
    rate = summary["speed"]["output_tokens_per_second"]
    return (
        f"{len(drawn)} samples, pass@{n} {summary['coverage'][-1]['value']:.0%}, {rate:.0f} tok/s"
    )


def built(kind: str) -> Callable[[Trial], str]:
    """Returns the check that builds in numbers of `kind` for word problems, which `penstock build`
    checks; the artifact must answer."""

    def build(trial: Trial) -> str:
        out, rows = trial.room / "built", trial.room / "rows.jsonl"
        asked = [
            json.loads(line)["question"] for line in shots_file().read_text().splitlines()[:64]
        ]
        work = [
            {"id": str(at), "prompt": f"Question: {question}\nAnswer:", "max_tokens": 32}
            for at, question in enumerate(asked)
        ]
        rows.write_text("".join(json.dumps(row) + "\n" for row in work))
        words = [
            "--quantization",
            kind,
            "--workload",
            str(rows),
            "--tune-minutes",
            "0",
            "--max-model-len",
            "512",
        ]
        _run(["build", str(trial.folder), "--out", str(out), *words])
        quality = read_manifest(out).quality
        assert quality is not None and quality.kl_mean <= quality.bound
        with LLM(str(out), max_model_len=128) as llm:
            (answer,) = llm.generate(
                TEXTS[:1], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
            )
        assert answer.outputs[0].text
        size = sum(path.stat().st_size for path in out.glob("*.safetensors")) / 1e6
        shutil.rmtree(out)
        found = (
            f"KL {quality.kl_mean:.2g} (bound {quality.bound:g}), the same token"
            f" {quality.agreement:.1%}"
        )
        return f"{found}, {size:.0f} MB"

    return build


def _run(words: list[str]) -> None:
    done = subprocess.run([*PENSTOCK, *words], capture_output=True, text=True)
    assert done.returncode == 0, f"penstock {words[0]}: {done.stderr.strip().splitlines()[-1:]}"
