"""The channel's words: each comes back as it went, arrays with dtype and shape; the rest is
refused."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.children.carried_error import CarriedError
from penstock.engine.build_engine import EngineFacts
from penstock.engine.channel import (
    DOWN,
    UP,
    Ask,
    Cancel,
    ClientEnd,
    Close,
    Down,
    EngineEnd,
    Left,
    Ready,
    StepOutputs,
    Up,
)
from penstock.engine.client_ids import ClientIds
from penstock.engine.engine import Refused
from penstock.errors import EngineError
from penstock.request import Request, SamplingParams
from penstock.schedule.deltas import Deltas, PromptNews, empty_deltas

FULL = SamplingParams(
    n=7,
    temperature=0.25,
    top_p=0.5,
    top_k=-1,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias={0: -100.0, 5: 1.5},
    min_tokens=2,
    max_tokens=None,
    stop=["é", "Question:"],
    stop_token_ids=[1, 2, 3],
    ignore_eos=True,
    seed=-(2**63),
    logprobs=3,
    prompt_logprobs=0,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    allowed_token_ids=[9, 2, 9],
    bad_words=["é", "two words"],
)
FACTS = EngineFacts(
    model="m",
    folder="/a b/c",
    max_model_len=9,
    max_num_seqs=3,
    vocab_size=11,
    eos_token_ids=(0, 5),
    sampling_defaults={"temperature": 0.5, "top_k": 4},
    about={"dtype": "bfloat16", "kernels": {"norm": "why"}},
)


def deltas() -> Deltas:
    return Deltas(
        request=np.array([2**40, 1], np.int64),
        sample=np.array([0, 1023], np.int32),
        finish=np.array([-1, 3], np.int8),
        stop_id=np.array([-1, 7], np.int32),
        start=np.array([0, 2, 3], np.int32),
        tokens=np.array([5, 6, 7], np.int32),
        chosen=np.array([-1.5, np.nan, -np.inf], np.float32),
        rank=np.array([1, 0, 9], np.int32),
        top_ids=np.array([[1, 2], [3, -1], [-1, -1]], np.int32),
        top=np.zeros((3, 2), np.float32),
        prompts=[
            PromptNews(5, 16),
            PromptNews(
                6,
                0,
                np.zeros(0, np.float32),
                np.zeros(0, np.int32),
                np.zeros((0, 4), np.int32),
                np.zeros((0, 4), np.float32),
            ),
        ],
    )


IDS = np.arange(5, dtype=np.int32).tobytes()
TOO_LONG = Refused(1, CarriedError("ContextLengthError", "too long", "prompt"))
WORDS_DOWN: list[Down] = [
    Ask(
        Request(
            request_id=2**50,
            prompt=IDS,
            sampling=FULL,
            stream=True,
            watch=b"\x80\x01",
            samples=[6, 0],
        )
    ),
    Ask(Request(request_id=0, prompt=b"", sampling=SamplingParams())),
    Cancel(3, None),
    Cancel(3, 0),
    Close(),
]
WORDS_UP: list[Up] = [
    Ready(FACTS),
    CarriedError("UsageError", "a line", "model"),
    CarriedError("EngineError", "a line", None),
    StepOutputs(
        None, [TOO_LONG, Refused(2, CarriedError("UsageError", "no", None))], {"running": 1.0}
    ),
    StepOutputs(empty_deltas(), [], None),
    StepOutputs(deltas(), [], {}),
]


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, msgspec.Struct) or is_dataclass(a):
        names = (
            a.__struct_fields__ if isinstance(a, msgspec.Struct) else [f.name for f in fields(a)]
        )
        for name in names:
            assert_same(getattr(a, name), getattr(b, name))
    else:
        assert a == b


@pytest.mark.parametrize("word", WORDS_DOWN, ids=lambda word: type(word).__name__)
def test_words_go_down_as_they_are(word: Down) -> None:
    assert_same(word, DOWN.decode(DOWN.encode(word)))


@pytest.mark.parametrize("word", WORDS_UP, ids=lambda word: type(word).__name__)
def test_words_come_up_as_they_are(word: Up) -> None:
    assert_same(word, UP.decode(UP.encode(word)))


def test_a_foreign_extension_and_a_foreign_word_are_refused() -> None:
    good = UP.encode(StepOutputs(deltas(), [], None))
    head = b"\x01i\x01\x00\x00"  # the code, then an array's dtype and dimensions
    assert head in good
    with pytest.raises(EngineError, match="extension 2"):
        UP.decode(good.replace(head, b"\x02" + head[1:]))
    with pytest.raises(EngineError, match="cannot be read"):
        UP.decode(DOWN.encode(Close()))  # a word that goes down
    with pytest.raises(EngineError, match="cannot be read"):
        DOWN.decode(UP.encode(CarriedError("a", "b", None)))
    with pytest.raises(EngineError, match="cannot be read"):
        DOWN.decode(b"\xc1")


@pytest.mark.parametrize("one_each", [True, False], ids=["a token each", "any number"])
def test_each_client_gets_its_own_news_in_its_own_ids(one_each: bool) -> None:
    rng = np.random.default_rng(3)
    owners, k = ClientIds(3), 40
    ids = [
        (int(c), int(i))
        for c, i in zip(rng.integers(0, 3, k), rng.integers(0, 2**40, k), strict=True)
    ]
    counts = np.ones(k, np.int64) if one_each else rng.integers(0, 5, k)
    total = int(counts.sum())
    every = Deltas(
        request=np.array([owners.engine_id(c, i) for c, i in ids], np.int64),
        sample=rng.integers(0, 9, k).astype(np.int32),
        finish=rng.integers(-1, 3, k).astype(np.int8),
        stop_id=rng.integers(-1, 3, k).astype(np.int32),
        start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        tokens=np.arange(total, dtype=np.int32),
        chosen=rng.random(total).astype(np.float32),
        rank=rng.integers(1, 9, total).astype(np.int32),
        top_ids=rng.integers(0, 9, (total, 2)).astype(np.int32),
        top=rng.random((total, 2)).astype(np.float32),
        prompts=[PromptNews(owners.engine_id(c, i), 16 * c) for c, i in ids[:9]],
    )
    found = owners.deltas(every)
    seen = dict.fromkeys(range(3), 0)
    for at, (client, mine) in enumerate(ids):  # a slow twin: one sample after the other
        part, place = found[client], seen[client]
        seen[client] += 1
        tokens, whole = (slice(d.start[i], d.start[i + 1]) for d, i in ((part, place), (every, at)))
        assert part.request[place] == mine
        for name in ("sample", "finish", "stop_id"):
            assert getattr(part, name)[place] == getattr(every, name)[at]
        for name in ("tokens", "chosen", "rank", "top_ids", "top"):
            assert_same(getattr(part, name)[tokens], getattr(every, name)[whole])
    assert [found[c].count for c in range(3)] == [seen[c] for c in range(3)]
    for client in range(3):
        assert found[client].prompts == [PromptNews(i, 16 * c) for c, i in ids[:9] if c == client]
    refused = [
        Refused(owners.engine_id(c, i), CarriedError("UsageError", str(c), None))
        for c, i in ids[:5]
    ]
    for client, told in owners.refused(refused).items():
        assert told == [
            Refused(i, CarriedError("UsageError", str(c), None)) for c, i in ids[:5] if c == client
        ]


def test_several_clients_share_an_engine_and_leave_it(tmp_path: Any) -> None:
    """Each hears what is its own; one goes without a word, one with it, and the engine learns of
    both."""
    import asyncio

    async def hear(engine: EngineEnd, count: int) -> list[Any]:
        got: list[Any] = []
        while len(got) < count:
            got += engine.receive(0)
            await asyncio.sleep(0.001)
        return got

    async def share() -> None:
        places = [f"ipc://{tmp_path / str(at)}" for at in range(3)]
        engine = EngineEnd(places)  # before its clients
        clients = [ClientEnd(place) for place in places]
        try:
            for at, client in enumerate(clients):
                client.send_down(Ask(Request(request_id=7, prompt=IDS, sampling=SamplingParams())))
                client.send_down(Cancel(7, at))
            got = await hear(engine, 6)
            asked = {word.request.request_id for word in got if isinstance(word, Ask)}
            assert (
                asked
                == {21, 22, 23}
                == {word.request_id for word in got if isinstance(word, Cancel)}
            )
            assert [engine.owners.owns(1, n) for n in (21, 22, 23)] == [False, True, False]
            engine.send_up(Ready(FACTS))
            for client in clients:
                assert_same(await client.receive(), Ready(FACTS))
            engine.send_up(
                StepOutputs(None, [Refused(22, CarriedError("UsageError", "no", None))], None)
            )
            engine.send_up(StepOutputs(None, [], {"a": 1.0}))
            assert await clients[0].receive() == StepOutputs(None, [], {"a": 1.0}, 1)
            assert await clients[1].receive() == StepOutputs(
                None, [Refused(7, CarriedError("UsageError", "no", None))], None, 1
            )
            clients[0].close()
            assert await hear(engine, 1) == [Left(0)] and engine.clients == 2
            clients[1].send_down(Cancel(7, 3))
            clients[1].send_down(Close())
            clients[1].close(flush=True)  # in the turn of the loop that said it
            assert await hear(engine, 2) == [Cancel(22, 3), Left(1)] and engine.clients == 1
            assert await clients[2].receive() == StepOutputs(None, [], {"a": 1.0}, 1)
            # of one who has gone
            engine.send_up(
                StepOutputs(None, [Refused(22, CarriedError("UsageError", "no", None))], {"b": 2.0})
            )
            assert await clients[2].receive() == StepOutputs(None, [], {"b": 2.0}, 1)
            assert engine.receive(0) == []
        finally:
            engine.close()
            clients[2].close()

    asyncio.run(share())
