"""Structured outputs of the demo model: each sample is valid by an independent judge, what cannot
be served is refused in one line beside others that go on, and an engine in a process of its own
says the same."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from made_schemas import SCHEMAS

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.config import Config
from penstock.engine.control import PREFIX_CACHE, Control
from penstock.engine.launch import launch
from penstock.errors import UsageError

pytestmark = pytest.mark.torch
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PROMPTS = ["Tom has 3 apples and buys 4 more.", "x"]
SAMPLES = 6  # of each schema: 300 in all
REGEXES = [r"[0-9]{3}-[a-z]{2,4}", r"(ja|nein), (ü|€|😀)+!", r"\d{1,3}(\.\d{1,3}){3}"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"$ref": "https://example.com/x.json"}}, "does not fetch resources"),
    ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable schema"),
    ({"json": {"$ref": "#"}}, "nothing can match"),
    ({"json": {"type": "string", "format": "nonsense"}}, "Unknown format: nonsense"),
    ({"json": "{"}, "structured_outputs cannot be served"),
    ({"json": '{"a":' * 5_000 + "1" + "}" * 5_000}, "recursion limit"),
    (
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(6)]}
                    for i in range(8)
                ]
            }
        },
        "too large",
    ),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "a: b"}, "Expected ::="),
    ({"grammar": 'a: "b"\n'}, "structured_outputs cannot"),
    ({"structural_tag": "x"}, "structural_tag: JSON is malformed"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo", device="cpu", dtype="float32", max_num_seqs=256, kv_cache_tokens=131_072
    ) as made:
        yield made


def texts(llm: LLM, forms: list[dict[str, Any]], seed: int = 1, n: int = 4) -> list[list[str]]:
    """All samples of all forms, drawn together; each ended with its form."""
    asked = [StructuredOutputsParams(**form) for form in forms]
    params = [
        SamplingParams(n=n, max_tokens=300, seed=seed, structured_outputs=one) for one in asked
    ]
    outs = llm.generate([PROMPTS[i % 2] for i in range(len(forms))], params, use_tqdm=False)
    for form, out in zip(forms, outs, strict=True):
        ends = [(output.text, output.finish_reason) for output in out.outputs]
        assert [end for _, end in ends] == ["stop"] * n, (form, out.error, ends)
    return [[output.text for output in out.outputs] for out in outs]


@pytest.mark.parametrize("bare", [False, True], ids=["spaced", "bare"])
def test_samples_are_valid_by_jsonschema(llm: LLM, bare: bool) -> None:
    forms = [
        {"json": json.dumps(one) if bare else one, "disable_any_whitespace": bare}
        for one in SCHEMAS
    ]
    assert len(forms) == 50
    for schema, found in zip(SCHEMAS, texts(llm, forms, n=1 if bare else SAMPLES), strict=True):
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.FormatChecker()
        )
        for text in found:
            validator.validate(json.loads(text))
            assert not bare or "\n" not in text


def test_samples_match_their_regex_choice_or_grammar(llm: LLM) -> None:
    choice = ['"quoted"', "ja\\n", "a b", "😀"]
    many = [f"number {i}" for i in range(10_000)]
    grammars = ['root ::= "x" | "yy" [0-9]', 'start: "a" /[0-9]/']
    forms = [
        *({"regex": regex} for regex in REGEXES),
        {"choice": choice},
        {"choice": many},
        *({"grammar": grammar} for grammar in grammars),
    ]
    found = texts(llm, forms)
    for regex, drawn in zip(REGEXES, found, strict=False):
        assert all(re.fullmatch(regex, text, re.ASCII) for text in drawn), regex
    one, of_many, gbnf, lark = found[len(REGEXES) :]
    assert set(one) <= set(choice) and set(of_many) <= set(many)
    assert all(re.fullmatch("x|yy[0-9]", text) for text in gbnf) and all(
        re.fullmatch("a[0-9]", text) for text in lark
    )


def test_any_object_is_one(llm: LLM) -> None:
    params = SamplingParams(
        n=6, max_tokens=100, seed=2, structured_outputs=StructuredOutputsParams(json_object=True)
    )
    (out,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert all(output.text.startswith("{") for output in out.outputs)
    assert all(
        isinstance(json.loads(one.text), dict) for one in out.outputs if one.finish_reason == "stop"
    )


def test_a_stop_string_logprobs_and_min_tokens_go_with_a_form(llm: LLM) -> None:
    def one(regex: str, **more: Any) -> Any:
        params = SamplingParams(
            max_tokens=60, seed=3, structured_outputs=StructuredOutputsParams(regex=regex), **more
        )
        return llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0]

    assert one("ab[0-9]{9}", stop=["b"]).text == "a"
    long = one("a{1,50}", min_tokens=9)
    assert len(long.token_ids) >= 9 and set(long.text) == {"a"} and long.finish_reason == "stop"
    short = one("ab", min_tokens=9)  # a form that ends before: its end comes first
    assert (short.text, short.finish_reason) == ("ab", "stop")
    scored = one("[0-9]{4}", logprobs=2)
    assert len(scored.logprobs) == len(scored.token_ids)
    assert one("abc[0-9]{9}", allowed_token_ids=[5]).finish_reason == "numerical_error"


def test_forced_text_takes_few_steps_and_has_its_own_logprobs(llm: LLM) -> None:
    regex = "Mateo saves apples every month[0-9]{2} and Lily buys pencils[.]"
    form, ids = StructuredOutputsParams(regex=regex), llm.get_tokenizer().encode(PROMPTS[0])
    before = llm.stats()["steps"]
    asked = SamplingParams(
        n=2, max_tokens=60, seed=3, logprobs=0, min_tokens=2, structured_outputs=form
    )
    (out,) = llm.generate([ids], asked, use_tqdm=False)
    assert llm.stats()["steps"] - before < len(out.outputs[0].token_ids)
    for sample in out.outputs:
        assert re.fullmatch(regex, sample.text) and sample.finish_reason == "stop"
        (scored,) = llm.generate(
            [[*ids, *sample.token_ids]],
            SamplingParams(max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
        for token, said, alone in zip(
            sample.token_ids, sample.logprobs, scored.prompt_logprobs[len(ids) :], strict=True
        ):
            assert abs(said[token].logprob - alone[token].logprob) < 1e-3


@pytest.mark.parametrize("form, why", REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_served_is_one_line_and_others_go_on(
    llm: LLM, form: dict[str, Any], why: str
) -> None:
    forms = [StructuredOutputsParams(**form), StructuredOutputsParams(choice=["yes"])]
    params = [SamplingParams(structured_outputs=each) for each in forms]
    for _ in range(2):  # the second time it is known
        bad, good = llm.generate(PROMPTS, params, use_tqdm=False)
        assert (
            bad.error is not None and why in bad.error and "\n" not in bad.error and not bad.outputs
        )
        assert [output.text for output in good.outputs] == ["yes"]


def test_regexes_that_explode_are_bounded(llm: LLM) -> None:
    for regex in ("(((((a{100}){100}){100}){100}){100})", "(.*a){20}.{200}", "(a{1,1000}){1,1000}"):
        form = StructuredOutputsParams(regex=regex)
        (out,) = llm.generate(
            ["x"], SamplingParams(max_tokens=8, structured_outputs=form), use_tqdm=False
        )
        assert out.error is not None or len(out.outputs) == 1


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"regex": "a", "json_object": True},
        {"structural_tag": 7},
        {"choice": []},
        {"choice": [""]},
        {"regex": 7},
    ],
)
def test_forms_that_say_nothing_or_too_much_are_refused(form: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        StructuredOutputsParams(**form)


def test_an_engine_of_its_own_process_draws_the_same(llm: LLM) -> None:
    """Requests wait there for their grammar's compile; one that is cut meanwhile is gone, a bad one
    is refused, and one that is ended by what is asked between steps is told so."""
    form = StructuredOutputsParams(regex="[0-9]{3}-[a-z]{2}")
    params = SamplingParams(n=3, max_tokens=40, seed=1, structured_outputs=form)
    (alone,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)

    async def main() -> tuple[list[str], str]:
        client = await launch(
            Config.of(model="demo", device="cpu", dtype="float32", kv_cache_tokens=32_768)
        )
        try:
            client.submit([5, 6, 7], params, stream=False).cancel()
            stream = client.submit([5, 6, 7], params, stream=False)
            found = {delta.index: delta.text async for deltas in stream for delta in deltas}
            bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
            with pytest.raises(UsageError) as refused:
                async for _ in client.submit([5], bad, stream=False):
                    pass
            long = replace(
                params,
                structured_outputs=StructuredOutputsParams(regex="[a-f]{300}"),
                max_tokens=300,
            )
            stream = client.submit([5, 6, 7], long, stream=False)
            await client.control(Control(PREFIX_CACHE, mode="abort"))
            assert [delta.finish_reason async for deltas in stream for delta in deltas] == [
                "abort"
            ] * 3
            return [found[i] for i in sorted(found)], str(refused.value)
        finally:
            await client.close()

    found, why = asyncio.run(main())
    assert found == [output.text for output in alone.outputs] and "unclosed group" in why
