"""Forms on a GPU: masks that it reads from the processes' board, forced tokens, graphs captured at
work. The tokens are the CPU's, in float32, and the same again."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.llm.outputs import RequestOutput

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {
        "first": {"type": "string", "maxLength": 6},
        "second": {"enum": ["left", "right"]},
    },
    "required": ["first", "second"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = ({"json": SCHEMA}, {"regex": "[a-z]{3,8} = [0-9]{2,5}"}, {})
PROMPTS = ["1 + 1 =", "Ann has 3 apples.", "12 / 4 ="]


def _asked(turn: int) -> list[SamplingParams]:
    forms = [StructuredOutputsParams(**form) if form else None for form in FORMS]
    return [
        SamplingParams(
            n=4,
            seed=turn,
            max_tokens=80,
            temperature=0.9,
            structured_outputs=form,
            logprobs=turn or None,
        )
        for form in forms
    ]


def _answers(device: str) -> list[list[RequestOutput]]:
    with LLM(
        "demo", device=device, dtype="float32", kv_cache_tokens=1 << 15, max_num_seqs=64
    ) as llm:
        return [llm.generate(PROMPTS, _asked(turn), use_tqdm=False) for turn in (0, 0, 1)]


def test_forms_hold_and_tokens_are_the_cpus() -> None:
    there, here = _answers("cuda"), _answers("cpu")
    told = [
        [[tuple(o.token_ids) for out in outs for o in out.outputs] for outs in each]
        for each in (there, here)
    ]
    assert told[0] == told[1] and told[0][0] == told[0][1]
    for outs in there:
        for sample in outs[0].outputs:
            if sample.finish_reason == "stop":
                assert set(json.loads(sample.text)) == {"first", "second"}
        for sample in outs[1].outputs:
            assert sample.finish_reason != "stop" or re.fullmatch(
                str(FORMS[1]["regex"]), sample.text
            )
    assert any(o.finish_reason == "stop" for o in there[0][0].outputs)
