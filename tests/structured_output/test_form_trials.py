"""Forms are compiled where that can be ended first: what passes no bound of the library costs its
own request."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_model import END, VOCABULARY, make_folder

from penstock.errors import UsageError
from penstock.mask_board import AS_IT_STANDS, MaskBoard
from penstock.request import Request, SamplingParams, StructuredOutputsParams
from penstock.structured_output import mask_pool, mask_process
from penstock.structured_output.compile_queue import CompileQueue
from penstock.structured_output.form_trials import TOO_LONG, Compile
from penstock.structured_output.mask_pool import MaskPool
from penstock.structured_output.mask_process import Begin, End, MaskDesk
from penstock.text.grammar import GrammarCompiler, check_grammar
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch  # it makes the model's folder

LETTERS = StructuredOutputsParams(regex="[a-z]{3,9}")
BOMBS = {
    "multiple": {"json": {"type": "integer", "multipleOf": 999_983}},
    "multiples": {
        "json": {
            "allOf": [
                {"type": "integer", "multipleOf": number} for number in (7, 11, 13, 17, 19, 23)
            ]
        }
    },
    "inside lark": {"grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'},
}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[MaskPool]:
    pool = MaskPool(folder, VOCABULARY, (END,), processes=1, places=8)
    pool.compiled(LETTERS)  # its processes are there
    yield pool
    pool.close()


def _first_mask(pool: MaskPool, form: StructuredOutputsParams) -> bool:
    """Whether a sample's first mask has tokens."""
    places = np.array(
        [MaskPool.factory(pool, SamplingParams(structured_outputs=form))(0)], np.int32
    )
    pool.start(places, np.full(1, AS_IT_STANDS, np.int32))
    while pool.wait(0.01):
        pass
    made = bool(pool.board.words[places[0]].any())
    pool.end(places)
    return made


@pytest.mark.parametrize("name", BOMBS)
def test_what_compiles_for_minutes_is_ended_and_holds_no_other(pool: MaskPool, name: str) -> None:
    children = list(pool._children)
    bomb = pool.ask(StructuredOutputsParams(**BOMBS[name]))
    assert _first_mask(pool, StructuredOutputsParams(regex=f"{name}[0-9]"))
    with pytest.raises(UsageError) as refused:
        pool.compiled(bomb.asked)
    assert (refused.value.rule, refused.value.param) == (TOO_LONG, "structured_outputs")
    assert pool._children == children and all(child.poll() is None for child in pool._children)


def test_forms_of_batches_come_behind_those_that_somebody_waits_for(pool: MaskPool) -> None:
    def bomb(number: int) -> StructuredOutputsParams:
        return StructuredOutputsParams(json={"type": "integer", "multipleOf": 999_983 - number})

    behind = [pool.ask(bomb(number), background=True) for number in range(1, 4)]
    online = pool.ask(bomb(4))
    with pytest.raises(UsageError, match="to compile and to begin with"):
        pool.compiled(online.asked)
    assert sum(form.known for form in behind) <= 1, "more than the one that may have begun before"


def test_a_schema_of_thousands_of_properties_is_refused_by_name() -> None:
    """By the library's count, in the sandbox."""
    with pytest.raises(UsageError, match="grammar size"):
        check_grammar(StructuredOutputsParams(json=WIDE))


def test_where_the_process_of_trials_dies_another_takes_its_place(folder: Path) -> None:
    pool = MaskPool(folder, VOCABULARY, (END,), processes=1, places=8)
    try:
        pool.compiled(LETTERS)
        (first,) = pool._children
        (trials,) = map(
            int, Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        )
        form = pool.ask(StructuredOutputsParams(**BOMBS["multiple"]))
        os.kill(trials, signal.SIGKILL)
        while not form.deaths:
            pool.look(0.001)
        assert _first_mask(pool, StructuredOutputsParams(regex="[0-9]{2}"))
        with pytest.raises(UsageError, match="to compile and to begin with this takes more than"):
            pool.compiled(form.asked)
    finally:
        pool.close()


def test_kept_forms_are_bounded_by_what_they_take(
    pool: MaskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}}
    large = pool.compiled(StructuredOutputsParams(json=schema))
    assert large.bytes > len(json.dumps(schema))
    monkeypatch.setattr("penstock.structured_output.mask_pool.KEPT_BYTES", 1000)
    pool.compiled(LETTERS)
    assert large.dropped and pool._bytes < large.bytes


@pytest.fixture
def desk(folder: Path) -> tuple[MaskDesk, MaskBoard]:
    words = -(-VOCABULARY // 32)
    board = MaskBoard.over(np.zeros(MaskBoard.size(4, words), np.int32), 4, words)
    compiler = GrammarCompiler(Tokenizer.load(folder, vocab_size=VOCABULARY), (END,))
    return MaskDesk(compiler, board, range(4)), board


def _settled(desk: MaskDesk) -> list[Any]:
    found = []
    while desk.busy:
        found += desk.settle()
        time.sleep(0.001)
    return found


def _ask(board: MaskBoard, *places: int) -> None:
    board.ask(np.array(places, np.int32), np.full(len(places), AS_IT_STANDS, np.int32))


def test_masks_of_a_slow_form_are_made_in_a_thread(desk: tuple[MaskDesk, MaskBoard]) -> None:
    """A place whose sample is over while that writes to it begins no other before."""
    desk_, board = desk
    desk_.take(Compile(1, LETTERS, slow=True))
    desk_.take(Compile(2, LETTERS))
    desk_.take(Begin(0, 1, 0, (), True))
    _ask(board, 0)
    assert not desk_.due()  # it waits for its grammar
    assert {each.grammar for each in _settled(desk_)} == {1, 2}
    for place, ticket in desk_.due():
        assert not desk_.make(place, ticket)
    assert desk_.busy and not desk_.due() and board.missing() == 1
    desk_.take(End(np.zeros(1, np.int32).tobytes()))
    desk_.take(Begin(0, 2, 0, (), True))
    assert 0 not in desk_._samples
    _settled(desk_)
    assert not board.missing() and desk_._samples[0].grammar == 2


def test_a_mask_that_takes_too_long_ends_its_row_alone(
    desk: tuple[MaskDesk, MaskBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk_, board = desk
    desk_.take(Compile(1, LETTERS))
    desk_.take(Begin(0, 1, 0, (), True))
    desk_.take(Begin(1, 1, 0, (), True))
    _settled(desk_)
    _ask(board, 0, 1)
    (first, second) = desk_.due()
    monkeypatch.setattr(mask_process, "MOST", -1.0)
    desk_.make(*first)
    monkeypatch.undo()
    desk_.make(*second)
    assert not board.words[0].any() and board.words[1].any() and not board.missing()
    _ask(board, 0)
    desk_.make(*desk_.due()[0])
    assert not board.words[0].any() and not board.missing()


def test_samples_of_a_form_that_fails_where_it_passed_before_end(
    desk: tuple[MaskDesk, MaskBoard],
) -> None:
    desk_, board = desk
    desk_.take(Compile(1, StructuredOutputsParams(regex="(")))
    desk_.take(Begin(0, 1, 0, (), True))
    desk_.take(End(grammars=(1,)))
    _ask(board, 0)
    (said,) = _settled(desk_)
    assert said.refusal is not None
    desk_.make(*desk_.due()[0])
    assert not board.missing() and not board.words[0].any()


def test_a_form_that_is_waited_for_is_compiled_once_however_many_come(
    pool: MaskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays while others are asked for,
    and whoever has waited for it needn't ask for it again."""
    monkeypatch.setattr(mask_pool, "KEPT", 2)
    queue = CompileQueue(pool)
    asked = [StructuredOutputsParams(regex=f"many[{letter}]") for letter in "abcdefgh"]
    sampling = [SamplingParams(structured_outputs=each) for each in asked]
    with monkeypatch.context() as deaf:  # nothing is heard of forms meanwhile: none is known
        deaf.setattr(pool, "look", lambda seconds=0.0: None)
        for number, each in enumerate(sampling):
            assert queue.put(Request(request_id=number, prompt=b"", sampling=each))
        forms = [form for _, form in queue._requests.values()]
        assert [pool.ask(each) for each in asked] == forms, "it is asked for anew"
    found: list[int] = []
    while queue.waiting:
        for request, form in queue.ready():
            assert form is forms[request.request_id]
            found.append(request.request_id)
            place = MaskPool.factory(pool, sampling[request.request_id], form)(0)
            pool.end(np.array([place], np.int32))
    assert sorted(found) == [*range(8)]
    assert len(pool._forms) == 2, "once they are known, few are kept"
    kept = {form.number for form in pool._forms.values()}
    assert all(process.forms <= kept for process in pool.processes), (
        "a process keeps a form that the pool let go"
    )


def test_a_form_whose_first_masks_take_long_is_known_as_slow(pool: MaskPool) -> None:
    """It is compiled in milliseconds; a mask of its second token takes a tenth of a second, and
    more."""
    terms = "".join(f"T{number}: /[a-z ]/\n" for number in range(400))
    many = " | ".join(f"T{number}+" for number in range(400))
    slow = pool.compiled(StructuredOutputsParams(grammar=f'start: "b" ({many})*\n{terms}'))
    assert slow.slow and not pool.compiled(StructuredOutputsParams(regex="quick[0-9]")).slow
