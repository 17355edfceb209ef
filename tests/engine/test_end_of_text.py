"""The tokenizer's eos_token ends an answer, beside the ids that generation_config.json names: the
demo model, whose copy's tokenizer calls a full stop its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams, demo
from penstock.config import ModelOptions
from penstock.jobs.doctor import text
from penstock.request import CompletionOutput, StructuredOutputsParams

pytestmark = pytest.mark.torch

STOP = 17  # "."
KNOBS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 8,
    "kv_cache_tokens": 4096,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(demo.model_folder(), tmp_path_factory.mktemp("demo") / "copy")
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "."}))
    return copy


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **KNOBS) as made:
        yield made


def answer(llm: LLM, **more: Any) -> CompletionOutput:
    ids = llm.get_tokenizer().encode("Question: ")
    asked = SamplingParams(**{"temperature": 0, "max_tokens": 40, **more})
    return llm.generate([ids], asked, use_tqdm=False)[0].outputs[0]


def test_an_answer_ends_there(llm: LLM) -> None:
    going_on = answer(llm, ignore_eos=True).token_ids
    assert len(going_on) == 40 and going_on.count(STOP) > 1
    ended = answer(llm)
    assert ended.token_ids == going_on[: going_on.index(STOP) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None) and "." not in ended.text
    assert llm.facts.eos_token_ids == (0, 2, STOP)


def test_it_is_an_end_in_all_that_ends_are(llm: LLM) -> None:
    at = answer(llm).token_ids.index(STOP)
    later = answer(llm, min_tokens=at + 3)
    assert STOP not in later.token_ids[: at + 3] and len(later.token_ids) > at + 3
    assert answer(llm, allowed_token_ids=[STOP, 260], logit_bias={STOP: 50}).token_ids == [STOP]
    ids = llm.get_tokenizer().encode("Question: ")
    samples = llm.generate([ids], SamplingParams(n=8, max_tokens=60, seed=1), use_tqdm=False)[
        0
    ].outputs
    assert all(STOP not in each.token_ids[:-1] for each in samples)
    assert any(each.token_ids[-1] == STOP for each in samples)


def test_a_form_ends_there(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(regex="[a-z]{4}")
    barred = {0: -100.0, 2: -100.0}
    held = answer(llm, structured_outputs=form, logit_bias=barred)
    assert held.token_ids[-1] == STOP and len(held.text) == 4 and held.finish_reason == "stop"


def test_without_a_tokenizer_the_models_own_ids_end_it(folder: Path) -> None:
    with LLM(str(folder), **KNOBS, skip_tokenizer_init=True) as llm:
        assert llm.facts.eos_token_ids == (0, 2)


def test_the_doctor_says_it(folder: Path, tmp_path: Path) -> None:
    assert ("end ids", "0, 2, 17") in text(folder, ModelOptions(model=str(folder)))
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "tokenizer_config.json").write_text("{")
    told = dict(text(broken, ModelOptions(model=str(broken))))
    assert (
        told["end ids"] == "0, 2" and "tokenizer_config.json is not valid JSON" in told["tokenizer"]
    )
