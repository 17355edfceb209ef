"""Drawn messages between server and engine: any bytes are a word, or one EngineError; nobody waits
for ever."""

from __future__ import annotations

import numpy as np
import pytest
from fuzz_bounds import check_error
from fuzz_inputs import examples, mangled
from fuzz_targets import EngineLoop, heard
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from penstock.children.carried_error import CarriedError
from penstock.engine.build_engine import EngineFacts
from penstock.engine.channel import DOWN, UP, Ask, Cancel, Close, Ready, StepOutputs
from penstock.engine.engine import Refused
from penstock.errors import EngineError
from penstock.request import Request, SamplingParams
from penstock.schedule.deltas import GOES_ON, LENGTH, Deltas, PromptNews

LONG = settings(suppress_health_check=list(HealthCheck))
FACTS = EngineFacts(
    model="m", folder="f", max_model_len=64, max_num_seqs=8, vocab_size=256, eos_token_ids=(0,)
)


def news(finish: int, *samples: tuple[int, int]) -> StepOutputs:
    """One token of each (request, sample)."""
    count = len(samples)
    deltas = Deltas(
        request=np.array([request for request, _ in samples], np.int64),
        sample=np.array([sample for _, sample in samples], np.int32),
        finish=np.full(count, finish, np.int8),
        stop_id=np.full(count, -1, np.int32),
        start=np.arange(count + 1, dtype=np.int32),
        tokens=np.arange(count, dtype=np.int32),
        chosen=np.full(count, -0.5, np.float32),
        rank=np.ones(count, np.int32),
        top_ids=np.zeros((count, 1), np.int32),
        top=np.zeros((count, 1), np.float32),
        prompts=[PromptNews(0, 16), PromptNews(1, 0)],
    )
    return StepOutputs(deltas, [], {"completed_steps": 3.0})


def ask(number: int, prompt: list[int], **sampling: object) -> Ask:
    ids = np.array(prompt, np.int32).tobytes()
    return Ask(
        Request(request_id=number, prompt=ids, sampling=SamplingParams(**sampling), stream=True)
    )  # type: ignore[arg-type]


END = UP.encode(news(LENGTH, (0, 0), (0, 1), (1, 0), (1, 1)))
NEWS = [
    UP.encode(word)
    for word in (
        news(GOES_ON, (0, 0), (1, 1), (0, 1)),
        news(LENGTH, (0, 0), (1, 1)),
        StepOutputs(None, [Refused(0, CarriedError("UsageError", "no", "n"))], None),
        StepOutputs(None, [], {"completed_steps": 4.0}),
        CarriedError("CapacityError", "a line", None),
        Ready(FACTS),
    )
]
WORDS = [
    DOWN.encode(word)
    for word in (
        ask(0, [1, 2, 3], n=3, seed=5, max_tokens=9, logprobs=2),
        ask(
            1,
            [4] * 40,
            temperature=0.5,
            top_k=3,
            logit_bias={3: 1.0},
            stop_token_ids=[7],
            max_tokens=20,
        ),
        Ask(
            Request(
                request_id=2,
                prompt=bytes(8),
                sampling=SamplingParams(n=4),
                watch=bytes(32),
                samples=[3, 1],
            )
        ),
        Cancel(0, None),
        Cancel(1, 0),
        Close(),
    )
]
ANY = st.binary(max_size=40) | st.sampled_from(
    [b"\x91" * 3_000, b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)


def drawn(good: list[bytes]) -> st.SearchStrategy[bytes]:
    return st.sampled_from(good).flatmap(mangled) | st.sampled_from(good) | ANY


@settings(LONG, max_examples=examples(500))
@given(data=drawn(NEWS) | drawn(WORDS))
def test_bytes_are_a_word_or_an_engine_error(data: bytes) -> None:
    for read in (UP.decode, DOWN.decode):
        try:
            read(data)
        except EngineError as error:
            check_error(error)
            assert "cannot be read" in str(error)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> EngineLoop:
    return EngineLoop(tmp_path_factory.mktemp("engine"))


def test_good_words_bring_an_engine_to_rest(loop: EngineLoop) -> None:
    assert loop.turn(WORDS) == "rest"


@settings(LONG, max_examples=examples(150))
@given(messages=st.lists(drawn(WORDS), min_size=1, max_size=6))
def test_an_engine_comes_to_rest_or_says_why_not(loop: EngineLoop, messages: list[bytes]) -> None:
    ended = loop.turn(messages)
    event(ended)
    assert ended in ("rest", "EngineError")


def test_good_news_reach_their_streams() -> None:
    assert heard(NEWS[:2], END) == ["end", "end"]
    assert heard([b"\xc1"], END) == ["EngineError"] * 2


@settings(LONG, max_examples=examples(150))
@given(messages=st.lists(drawn(NEWS), min_size=1, max_size=4))
def test_no_stream_waits_for_ever(messages: list[bytes]) -> None:
    ended = heard(messages, END)
    event(str(ended))
    assert len(ended) == 2  # each, well or by an error of the house
