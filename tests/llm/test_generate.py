"""LLM over lists: transformers' greedy tokens, ends, stops, logprobs, orders, errors of single
prompts, statistics."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_model import CONTEXT, END, VOCABULARY, Twin, logits_of, make_folder
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.errors import CheckpointError, TokenizerError, UsageError
from penstock.llm import Prompt
from penstock.request import Request, RequestOutput

pytestmark = pytest.mark.torch

PROMPTS = [[40 + i * 7 % 200 for i in range(n)] for n in (30, 1, 17, 16)] + [[9, 8, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def twin(folder: Path) -> Twin:
    return logits_of(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as made:
        yield made


def open_llm(folder: Path, **knobs: Any) -> LLM:
    defaults = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_tokens": 4096,
        "dtype": "float32",
    }
    return LLM(str(folder), **defaults | knobs)


def run(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | more)


@pytest.mark.parametrize("given", ["a text", {"prompt": "a text"}, [1, 2]], ids=str)
def test_a_stream_of_texts_says_what_it_takes(llm: LLM, given: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"takes penstock\.Prompt\(key=\.\.\., prompt=\.\.\., params=\.\.\.\), and this is",
    ):
        list(llm.stream([given]))
    assert next(llm.stream([Prompt(key=3, prompt="a text", params=greedy(max_tokens=2))])).key == 3


def test_a_first_step_that_is_full_does_not_wait_for_the_other_prompts(llm: LLM) -> None:
    under_way: list[int] = []

    def prompts() -> Iterator[Prompt]:
        for i in range(8):
            under_way.append(len(llm.engine.flights))
            yield Prompt(key=i, prompt=[40 + i] * 30, params=greedy(max_tokens=3))

    assert sorted(done.key for done in llm.stream(prompts())) == list(range(8))
    assert under_way[:3] == [0, 0, 0]  # 90 tokens, where a step takes 64
    assert under_way[3:] == [1] * 5


def test_what_scripts_for_vllm_say_is_taken(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_llm(
        folder, tensor_parallel_size=1, trust_remote_code=True, quantization=None, seed=None
    ) as llm:
        assert (
            "penstock: trust_remote_code=True changes nothing: no code of a model"
            in capsys.readouterr().err
        )
        (out,) = llm.generate([PROMPTS[0]], greedy(), use_tqdm=False, lora_request=None)
        assert out.error is None
        with pytest.raises(
            UsageError,
            match=(
                r"lora_request='x' is not served: one adapter is merged into the weights, by"
                r" lora=DIR"
            ),
        ):
            llm.generate([PROMPTS[0]], greedy(), lora_request="x")
    with pytest.raises(UsageError, match=r"pipeline_parallel_size=2 is not served \(only 1\)"):
        open_llm(folder, pipeline_parallel_size=2)


# --- against transformers -------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers_up_to_an_end_id(
    folder: Path, twin: Twin, tmp_path: Path
) -> None:
    """End ids come from generation_config.json, a list: three that the model draws somewhere in its
    greedy answers."""
    free = [twin.run(prompt, greedy()) for prompt in PROMPTS]
    ends = [END, free[0][11], free[2][5], free[4][20]]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with open_llm(copy) as llm:
        outs = run(llm, PROMPTS, greedy(ignore_eos=False))
    for prompt, out in zip(PROMPTS, outs, strict=True):
        want = twin.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=ends,
            pad_token_id=END,
        )[0, len(prompt) :].tolist()
        (output,) = out.outputs
        assert output.token_ids == want
        assert output.finish_reason == ("stop" if want[-1] in ends else "length")
        assert output.stop_reason is None
    assert {out.outputs[0].finish_reason for out in outs} == {"stop", "length"}


@pytest.mark.parametrize("way", ["whole", "chunked", "cached", "three samples", "few blocks"])
def test_prompt_logprobs_are_those_of_the_models_raw_logits(
    way: str, folder: Path, twin: Twin
) -> None:
    knobs: dict[str, Any] = {
        "chunked": {"max_num_batched_tokens": 16},
        "few blocks": {"kv_cache_tokens": CONTEXT + 16, "max_num_batched_tokens": 16},
    }
    params = SamplingParams(
        n=3 if way == "three samples" else 1,
        max_tokens=3,
        prompt_logprobs=2,
        logprobs=4,
        temperature=1.5,
        seed=1,
        logit_bias={50: 3.0},
        top_k=9,
        repetition_penalty=1.2,
    )
    prompts = [*PROMPTS, [40 + i * 7 % 200 for i in range(90)]]
    with open_llm(folder, **knobs.get(way, {})) as llm:
        if way == "cached":
            run(llm, prompts, greedy())
            assert run(llm, prompts, greedy())[-1].num_cached_tokens > 0
        outs = run(llm, prompts, params)
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.num_cached_tokens == 0  # what lies in the cache has no logits
        check_scores(twin, prompt, out.prompt_logprobs or [], first=1, k=2)
        assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
        assert len(out.prompt_logprobs) == len(prompt)
        for output in out.outputs:
            whole = prompt + output.token_ids
            check_scores(
                twin,
                whole,
                [None] * len(prompt) + list(output.logprobs or []),
                first=len(prompt),
                k=4,
            )
            chosen = [
                scores[t].logprob
                for t, scores in zip(output.token_ids, output.logprobs or [], strict=True)
            ]
            assert output.cumulative_logprob == pytest.approx(sum(chosen))


def check_scores(twin: Twin, ids: list[int], scores: list[Any], *, first: int, k: int) -> None:
    """Scores of ids[first:] against log_softmax of transformers' logits: values, ranks, the top k,
    their order."""
    raw = torch.log_softmax(twin.logits(ids).double(), -1)
    assert len(scores) == len(ids)
    for at in range(first, len(ids)):
        row, found = raw[at - 1], scores[at]
        assert next(iter(found)) == ids[at]
        for token, score in found.items():
            assert score.logprob == pytest.approx(float(row[token]), abs=2e-4)
            assert score.rank == int((row > row[token]).sum()) + 1
        assert set(found) == {ids[at], *row.topk(k).indices.tolist()}


# --- ends -----------------------------------------------------------------------------------------


def test_stop_ids_few_and_many_end_a_sample_and_are_named(llm: LLM, twin: Twin) -> None:
    free = twin.run(PROMPTS[0], greedy())
    target = free[15]
    first = free.index(target)
    never = [t for t in range(VOCABULARY) if t not in free]
    for ids in (
        [target],
        [*never[:7], target],
        [*never[:20], target],
        [*never[:20], target, *never[20:30]],
    ):
        (output,) = run(llm, [PROMPTS[0]], greedy(stop_token_ids=ids))[0].outputs
        assert (output.finish_reason, output.stop_reason) == ("stop", target)
        assert output.token_ids == free[: first + 1]
        assert output.text == llm.get_tokenizer().decode(free[:first])
        late = run(llm, [PROMPTS[0]], greedy(stop_token_ids=ids, min_tokens=first + 1))[0].outputs[
            0
        ]
        assert len(late.token_ids) > first + 1


def test_a_stop_string_cuts_text_and_ids_where_it_was_completed(llm: LLM, twin: Twin) -> None:
    free = twin.run(PROMPTS[2], greedy())
    text = llm.get_tokenizer().decode(free)
    pieces = [llm.get_tokenizer().decode([t]) for t in free]
    stop = next(
        text[a : a + 3]
        for a in range(8, 30)
        if "\ufffd" not in text[a : a + 3] and not any(text[a : a + 3] in piece for piece in pieces)
    )
    ends = text.index(stop) + len(stop)
    count = next(
        i for i in range(1, 41) if llm.get_tokenizer().decode(free[:i])[:ends].endswith(stop)
    )
    outs = run(
        llm,
        [PROMPTS[2]] * 3,
        [greedy(stop=stop), greedy(stop=[stop], include_stop_str_in_output=True), greedy()],
    )
    cut, kept, whole = (out.outputs[0] for out in outs)
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (
        text[: ends - len(stop)],
        "stop",
        stop,
    )
    assert (kept.text, cut.token_ids, kept.token_ids) == (text[:ends], free[:count], free[:count])
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (text, "length", None)


def test_lengths_are_what_was_asked_or_the_context(llm: LLM) -> None:
    outs = run(
        llm,
        [PROMPTS[0]] * 3,
        [greedy(max_tokens=1), greedy(max_tokens=None), greedy(max_tokens=10_000)],
    )
    assert [len(out.outputs[0].token_ids) for out in outs] == [1, CONTEXT - 30, CONTEXT - 30]
    assert {out.outputs[0].finish_reason for out in outs} == {"length"}
    (longest,) = run(llm, [[5] * (CONTEXT - 1)], greedy())
    assert len(longest.outputs[0].token_ids) == 1


def test_ids_alone(folder: Path, twin: Twin) -> None:
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        with pytest.raises(UsageError, match="get_tokenizer needs a tokenizer"):
            llm.get_tokenizer()
        out, text, stop = run(
            llm, [PROMPTS[1], "text", PROMPTS[1]], [greedy(), greedy(), greedy(stop="x")]
        )
        assert (out.outputs[0].token_ids, out.outputs[0].text) == (
            twin.run(PROMPTS[1], greedy()),
            "",
        )
        for refused in (text, stop):
            assert (
                refused.outputs == [] and refused.error is not None and "tokenizer" in refused.error
            )


# --- order, and errors of single prompts ----------------------------------------------------------


def test_outputs_come_in_the_order_of_prompts_and_samples(llm: LLM, twin: Twin) -> None:
    """More samples than rows, of very different lengths, so that they end in another order."""
    each = [
        SamplingParams(n=20, seed=i, max_tokens=40 - 9 * i, logit_bias={END: 3.0}) for i in range(4)
    ]
    outs = run(llm, PROMPTS[:4], each)
    assert [out.prompt_token_ids for out in outs] == PROMPTS[:4]
    for out, params in zip(outs, each, strict=True):
        assert [output.index for output in out.outputs] == list(range(20))
        for index in (0, 7, 19):
            assert out.outputs[index].token_ids == twin.run(out.prompt_token_ids, params, index)


def test_a_subset_of_the_samples_is_the_same_as_in_the_whole(llm: LLM) -> None:
    params = SamplingParams(n=20, seed=4, max_tokens=9)
    (whole,) = run(llm, [PROMPTS[0]], params)
    some = list(llm.stream([Prompt(key="k", prompt=PROMPTS[0], params=params, samples=[17, 3, 8])]))
    assert [(f.key, f.prompt_tokens, f.error) for f in some] == [("k", 30, None)] * 3
    outputs = [f.output for f in some if f.output is not None]
    assert sorted(output.index for output in outputs) == [3, 8, 17]
    assert all(output == whole.outputs[output.index] for output in outputs)
    (refused,) = llm.stream([Prompt(key=1, prompt=PROMPTS[0], params=params, samples=[20])])
    assert refused.output is None and refused.error is not None and "samples" in refused.error


def test_a_prompt_that_cannot_run_says_why_and_the_others_go_on(llm: LLM, twin: Twin) -> None:
    bad: list[Any] = [[5] * CONTEXT, [], [VOCABULARY], "\ud800", [True], [1.5]]
    outs = run(llm, [PROMPTS[1], *bad, PROMPTS[4]], greedy())
    assert outs[0].outputs[0].token_ids == twin.run(PROMPTS[1], greedy())
    assert outs[-1].outputs[0].token_ids == twin.run(PROMPTS[4], greedy())
    for out in outs[1:-1]:
        assert out.outputs == [] and out.error and "\n" not in out.error
    assert str(CONTEXT) in (outs[1].error or "")
    assert not llm._client.asked


def fails_at(llm: LLM, fault: str, monkeypatch: pytest.MonkeyPatch) -> Prompt:
    """A prompt whose own error comes from the chat template,
    the tokenizers library or the engine."""
    text, scheduler = "a text that something fails at", llm.engine.scheduler
    ids = llm.get_tokenizer().encode(text)
    plain_encode, plain_submit = llm.get_tokenizer()._fast.encode_batch_fast, scheduler.submit

    class PanicError(BaseException):
        """As pyo3's, which is no Exception."""

    def encode(texts: list[str], **how: bool) -> Any:
        if text in texts:
            raise PanicError
        return plain_encode(texts, **how)

    def submit(request: Request) -> None:
        if list(np.frombuffer(request.prompt, np.int32)) == ids:
            raise ZeroDivisionError
        plain_submit(request)

    if fault == "template":
        return Prompt(key="bad", messages=[{"role": "user", "content": text}], params=greedy())
    if fault == "library":
        monkeypatch.setattr(llm.get_tokenizer(), "_fast", SimpleNamespace(encode_batch_fast=encode))
    else:
        monkeypatch.setattr(scheduler, "submit", submit)
    return Prompt(key="bad", prompt=text, params=greedy())


OWN_FAULTS = {
    "template": "this model has no chat template",
    "library": "the tokenizers library failed at this text",
    "engine": "the engine failed at this request",
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_a_fault_of_one_prompt_is_its_own(
    folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(folder) as llm:
        bad = fails_at(llm, fault, monkeypatch)
        good = [Prompt(key=key, prompt="the pump", params=greedy(n=2)) for key in "ab"]
        ended = list(llm.stream([good[0], bad, good[1]]))
        assert sorted(f.key for f in ended if f.output is not None) == ["a", "a", "b", "b"]
        (error,) = [f for f in ended if f.output is None]
        assert error.key == "bad" and (error.error or "").startswith(OWN_FAULTS[fault])
        assert not llm._client.asked and not llm.engine.has_work
        if bad.prompt is not None:
            outs = run(llm, ["the pump", bad.prompt, "the pump"], greedy())
            assert [len(out.outputs) for out in outs] == [1, 0, 1]
            assert [out.error for out in outs] == [None, error.error, None]


def test_a_model_that_cannot_chat_says_so_at_once(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    for given in (talk, [talk, talk]):
        with pytest.raises(TokenizerError, match="this model has no chat template"):
            llm.chat(given, use_tqdm=False)
    assert llm.chat([], use_tqdm=False) == []


def test_what_makes_no_sense_at_all_is_raised(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 prompts and 3"):
        run(llm, PROMPTS[:2], [greedy()] * 3)
    with pytest.raises(UsageError, match="prompt 1"):
        run(llm, [PROMPTS[0], 5])
    with pytest.raises(UsageError, match="prompts is NoneType"):
        llm.generate(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sampling_params must be a SamplingParams"):
        llm.generate(PROMPTS[:1], {"n": 1})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown option"):
        LLM("demo", tensor_parallel=2)
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "nothing"))
    assert run(llm, []) == []


def test_a_text_a_list_of_texts_and_ids(llm: LLM) -> None:
    text = "the pump lifts water"
    ids = llm.get_tokenizer().encode(text)
    ways: list[Any] = [text, [text], ids, [ids], {"prompt": text}, [{"prompt_token_ids": ids}]]
    outs = [run(llm, given, greedy())[0] for given in ways]
    assert {tuple(out.outputs[0].token_ids) for out in outs} == {
        tuple(outs[0].outputs[0].token_ids)
    }
    assert [out.prompt for out in outs] == [text, text, None, None, text, None]
    (default,) = run(llm, text)
    assert len(default.outputs[0].token_ids) <= 16 and default.prompt_token_ids == ids


# --- numbers that are not finite, and statistics --------------------------------------------------


def test_a_sample_whose_logits_are_not_finite_ends_and_the_others_go_on(
    folder: Path, twin: Twin, tmp_path: Path
) -> None:
    """The embedding of one token is NaN: whoever has it in the prompt, or draws it, is lost, and
    nobody else."""
    poison = twin.run(PROMPTS[4], greedy())[6]
    assert poison not in PROMPTS[0] + PROMPTS[2] + twin.run(PROMPTS[0], greedy()) + twin.run(
        PROMPTS[2], greedy()
    )
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = math.nan
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with open_llm(copy, max_num_seqs=4) as llm:
        outs = run(
            llm, [PROMPTS[0], [5, poison, 6], PROMPTS[4], PROMPTS[2]] * 3, greedy(n=2, logprobs=1)
        )
        assert llm.stats()["kv_usage"] < 1 and llm.stats()["running"] == 0
    at = twin.run(PROMPTS[4], greedy()).index(poison) + 1
    for i, out in enumerate(outs):
        for output in out.outputs:
            if i % 4 in (0, 3):
                assert output.token_ids == twin.run(out.prompt_token_ids, greedy())
                assert output.finish_reason == "length"
            else:
                want = [] if i % 4 == 1 else twin.run(PROMPTS[4], greedy())[:at]
                assert (output.finish_reason, output.token_ids) == ("numerical_error", want)
                assert len(output.logprobs or []) == len(want)


def test_a_groups_prompt_is_prefilled_and_counted_once(folder: Path) -> None:
    with open_llm(folder) as llm:
        (out,) = run(llm, [PROMPTS[0]], SamplingParams(n=64, max_tokens=5, ignore_eos=True))
        stats = llm.stats()
        assert stats["prefilled_tokens"] == len(PROMPTS[0]) - 1
        assert stats["prompt_tokens"] == len(PROMPTS[0])
        assert stats["generation_tokens"] == llm.generation_tokens == 64 * 5
        assert (out.num_cached_tokens, stats["prefix_hit_tokens"]) == (0, 0)
        (out,) = run(llm, [PROMPTS[0]], SamplingParams(n=64, max_tokens=5, ignore_eos=True))
        stats = llm.stats()
        assert out.num_cached_tokens == stats["prefix_hit_tokens"] == 16  # its one full block
        assert stats["prefilled_tokens"] == 2 * (len(PROMPTS[0]) - 1) - 16
        assert (stats["running"], stats["waiting"], stats["requests"]) == (0, 0, 2)


def test_prompt_logprobs_of_prompts_that_were_sent_back_half_way(folder: Path, twin: Twin) -> None:
    """Short samples teach the forecast a wrong length; long ones then take the blocks of prompts
    under way."""
    short = SamplingParams(n=64, max_tokens=64, logit_bias={END: 100.0})
    prompts, each = [], []
    for i in range(6):
        prompts += [PROMPTS[0][: 20 + i], [(i * 31 + j * 11) % 290 + 2 for j in range(120)]]
        each += [
            SamplingParams(n=3, seed=i, max_tokens=60, logit_bias={END: -100.0}),
            SamplingParams(max_tokens=2, prompt_logprobs=1),
        ]
    with open_llm(
        folder,
        max_num_seqs=14,
        max_num_batched_tokens=16,
        kv_cache_tokens=CONTEXT + 132,
        steps_ahead=2,
    ) as llm:
        run(llm, [PROMPTS[0]] * 2, short)
        outs = run(llm, prompts, each)
        assert llm.stats()["preemptions"] > 0
    for prompt, out in list(zip(prompts, outs, strict=True))[1::2]:
        check_scores(twin, prompt, out.prompt_logprobs or [], first=1, k=1)
