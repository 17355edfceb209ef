"""A constraint holds for every token of a real model's samples, beside free rows that are what they
are alone: forked and preempted, results 0 to 3 steps late, over two ranks, with fewer mask slots
than samples want, with masks that are late. Over a toy grammar, and over a regex that llguidance
compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_model import CONTEXT, END, VOCABULARY, logits_of, make_folder, make_tokenizer
from schedule_drive import ByTurns
from toy_constraint import Alternating, holds

from penstock.config import Config
from penstock.engine.build_engine import build_engine
from penstock.engine.engine import Engine, Refused
from penstock.request import Request, SamplingParams, StructuredOutputsParams
from penstock.schedule.constraint import Constraint
from penstock.schedule.mask_makers import MasksHere
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step import Flight, LateMasks
from penstock.structured_output.mask_pool import MaskPool
from penstock.text.grammar import GrammarCompiler, grammar_text
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

PROMPTS = [
    [40 + i * 7 % 200 for i in range(37)],
    [5],
    [40 + i * 7 % 200 for i in range(33)],
    [9] * 16,
]
ASKED = [
    SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=30, detokenize=False),
    SamplingParams(n=2, temperature=0.8, seed=2, max_tokens=20, top_p=0.9, detokenize=False),
    SamplingParams(
        n=4,
        temperature=1.0,
        seed=3,
        max_tokens=24,
        allowed_token_ids=[*range(60, 120), END],
        logprobs=1,
    ),
    SamplingParams(
        n=1,
        temperature=0.0,
        seed=4,
        max_tokens=24,
        min_tokens=5,
        logit_bias={7: 3.0},
        detokenize=False,
    ),
]
CONSTRAINED = (0, 2)  # of the requests


SIZES = {"max_num_seqs": 16, "kv_cache_tokens": 4096, "prefix_groups": "always"}
REGEX = "([a-z ]{1,5}[0-9]){2,6}!"


@dataclass
class Grammar:
    """What makes a sample's constraint, what is asked with it, and what each sample is alone."""

    make: Callable[[], Constraint]
    asked: list[SamplingParams]
    alone: list[dict[int, list[int]]]


def _run(
    engine: Engine, grammar: Grammar, through: Callable[[Request], Refused | None] | None = None
) -> list[dict[int, list[int]]]:
    """All requests at once -> tokens by sample, of each."""
    for number, (prompt, params) in enumerate(zip(PROMPTS, grammar.asked, strict=True)):
        request = Request(
            request_id=number, prompt=np.array(prompt, np.int32).tobytes(), sampling=replace(params)
        )
        constrain = (lambda sample: grammar.make()) if number in CONSTRAINED else None
        if through is None:
            engine.scheduler.submit(request, constrain)
        else:
            assert through(request) is None
    out: list[dict[int, list[int]]] = [{} for _ in PROMPTS]
    while engine.has_work:
        deltas = engine.step()
        for i in range(deltas.count if deltas is not None else 0):
            assert deltas is not None
            tokens = deltas.tokens[deltas.start[i] : deltas.start[i + 1]].tolist()
            out[int(deltas.request[i])].setdefault(int(deltas.sample[i]), []).extend(tokens)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(folder: Path) -> Callable[[str], Grammar]:
    """Makes each grammar once, whatever order its tests come in."""
    return cache(lambda name: make_grammar(folder, name))


@pytest.fixture(params=["toy", "regex"])
def grammar(made: Callable[[str], Grammar], request: pytest.FixtureRequest) -> Grammar:
    return made(request.param)


def make_grammar(folder: Path, name: str) -> Grammar:
    make: Callable[[], Constraint] = lambda: Alternating(VOCABULARY, (END,), forces=True)  # noqa: E731
    asked = ASKED
    if name == "regex":
        compiler = GrammarCompiler(Tokenizer.load(folder, vocab_size=VOCABULARY), (END,))
        make = compiler.compile(grammar_text(StructuredOutputsParams(regex=REGEX))).matcher
        # they bar what the regex needs
        asked = [replace(params, allowed_token_ids=None) for params in ASKED]
    twin = logits_of(folder)
    alone = [
        {
            k: twin.run(prompt, params, k, make() if number in CONSTRAINED else None)
            for k in range(params.n)
        }
        for number, (prompt, params) in enumerate(zip(PROMPTS, asked, strict=True))
    ]
    constrained = [tokens for number in CONSTRAINED for tokens in alone[number].values()]
    free = [
        tokens
        for number in range(len(PROMPTS))
        if number not in CONSTRAINED
        for tokens in alone[number].values()
    ]
    if name == "toy":
        assert sum(map(len, constrained)) > 60 and all(
            holds(tokens, (END,)) for tokens in constrained
        )
        assert not all(holds(tokens, (END,)) for tokens in free)
    else:
        texts = [make_tokenizer().decode(tokens) for tokens in constrained]
        whole = [text for text, tokens in zip(texts, constrained, strict=True) if tokens[-1] == END]
        assert whole and all(re.fullmatch(REGEX, text) for text in whole), texts
        assert sum(map(len, constrained)) > 60
    return Grammar(make, asked, alone)


FEW_ROWS = {"steps_ahead": 3, "preempt_every": 2, "max_num_seqs": 5}


@pytest.mark.parametrize(
    "grammar, knobs, slots",
    [
        ("toy", {"steps_ahead": 0}, None),
        ("toy", {"steps_ahead": 2, "preempt_every": 3}, None),
        ("toy", FEW_ROWS, None),
        ("toy", {"steps_ahead": 3, "kv_cache_tokens": CONTEXT + 32}, None),
        ("toy", {"steps_ahead": 1, "preempt_every": 4}, 2),
        ("regex", {"steps_ahead": 1}, None),
        ("regex", FEW_ROWS, None),
        ("regex", {"steps_ahead": 1, "preempt_every": 4}, 2),
    ],
    indirect=["grammar"],
    ids=str,
)
def test_a_grammar_holds_beside_free_rows(
    knobs: dict[str, Any], slots: int | None, folder: Path, grammar: Grammar
) -> None:
    config = Config.of(
        model=str(folder), skip_tokenizer_init=True, device="cpu", dtype="float32", **SIZES | knobs
    )
    engine, _ = build_engine(config)
    if slots is not None:
        engine.scheduler = Scheduler(replace(engine.scheduler.limits, mask_slots=slots))
    try:
        for _ in range(2):  # the second time prompts are cached, and slots are used anew
            assert _run(engine, grammar) == grammar.alone
        if "preempt_every" in knobs:
            assert engine.scheduler.stats()["preemptions"] > 0
        engine.scheduler.check()
    finally:
        engine.runner.close()


@pytest.mark.parametrize("grammar", ["toy"], indirect=True)
def test_ranks_draw_late_together(folder: Path, grammar: Grammar) -> None:
    knobs = {"dtype": "float32", "tensor_parallel_size": 2} | SIZES
    engine, _ = build_engine(
        Config.of(model=str(folder), skip_tokenizer_init=True, device="cpu", **knobs)
    )
    try:
        assert _run(engine, grammar) == grammar.alone
    finally:
        engine.runner.close()


@pytest.mark.parametrize(
    "knobs", [{"steps_ahead": 1}, {"steps_ahead": 2, "preempt_every": 3}], ids=str
)
def test_masks_that_are_late_sit_their_own_rows_out(
    knobs: dict[str, Any], folder: Path, grammar: Grammar
) -> None:
    config = Config.of(
        model=str(folder), skip_tokenizer_init=True, device="cpu", dtype="float32", **SIZES | knobs
    )
    engine, _ = build_engine(config)
    threads, draw = ByTurns(), engine.runner.draw
    engine.scheduler = Scheduler(engine.scheduler.limits, makers=MasksHere(VOCABULARY, threads))

    def drawn(late: LateMasks) -> Flight:
        threads.run()  # in time for the next step
        return draw(late)

    engine.runner.draw = drawn  # type: ignore[method-assign]
    try:
        assert _run(engine, grammar) == grammar.alone
        assert engine.scheduler.stats()["late_masks"] > 10
    finally:
        engine.runner.close()


@pytest.mark.parametrize("grammar", ["regex"], indirect=True)
@pytest.mark.parametrize(
    "knobs", [{"steps_ahead": 1}, {"steps_ahead": 3, "preempt_every": 3}], ids=str
)
def test_masks_of_processes_are_the_same(
    knobs: dict[str, Any], folder: Path, grammar: Grammar
) -> None:
    """Two processes share what is asked; the engine's own way from a form to masks."""
    config = Config.of(model=str(folder), device="cpu", dtype="float32", **SIZES | knobs)
    engine, _ = build_engine(config)
    pool = MaskPool(folder, VOCABULARY, (END,), processes=2)
    engine.masks, engine.scheduler = pool, Scheduler(engine.scheduler.limits, makers=pool)
    form = StructuredOutputsParams(regex=REGEX)
    asked = [
        replace(params, structured_outputs=form) if number in CONSTRAINED else params
        for number, params in enumerate(grammar.asked)
    ]
    try:
        for _ in range(2):  # the second time the form is known
            assert (
                _run(engine, replace(grammar, asked=asked), through=engine.submit) == grammar.alone
            )
        assert not pool.held and len(pool.processes) == 2
        engine.scheduler.check()
    finally:
        engine.close()


def test_a_row_with_a_grammar_takes_part_in_each_step(folder: Path) -> None:
    """A step behind the host as others are, beside a free row: both end with the same step."""
    engine, _ = build_engine(
        Config.of(model=str(folder), skip_tokenizer_init=True, device="cpu", steps_ahead=1, **SIZES)
    )
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    for number, constrain in enumerate((None, lambda sample: Alternating(VOCABULARY))):
        request = Request(
            request_id=number, prompt=np.array([5, 6], np.int32).tobytes(), sampling=params
        )
        engine.scheduler.submit(request, constrain)
    try:
        while engine.has_work:
            engine.step()
        stats = engine.scheduler.stats()
        assert stats["generation_tokens"] == 40 and stats["steps"] - stats["late_masks"] <= 22, (
            stats
        )
    finally:
        engine.runner.close()


def test_a_grammar_takes_tokens_back(grammar: Grammar) -> None:
    """What drafts that did not hold will ask for."""
    sample, tokens = grammar.make(), grammar.alone[0][0]
    sample.accept(tokens[0])
    before = np.array(sample.mask())
    sample.accept(tokens[1])
    sample.accept(tokens[2])
    sample.rollback(2)
    after = sample.mask()
    assert after is not None and (after == before).all()
