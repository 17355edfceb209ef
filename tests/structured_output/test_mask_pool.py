"""The processes that make masks: what one does first, what its death costs, what is kept, and what
comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_model import END, VOCABULARY, make_folder

from penstock.errors import UsageError
from penstock.mask_board import AS_IT_STANDS, MaskBoard
from penstock.request import SamplingParams, StructuredOutputsParams
from penstock.structured_output import mask_pool, mask_process
from penstock.structured_output import mask_worker_handle as mask_worker
from penstock.structured_output.form_trials import Compile
from penstock.structured_output.mask_pool import MaskPool
from penstock.structured_output.mask_process import Begin, End, MaskDesk
from penstock.text.grammar import GrammarCompiler, grammar_text
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch  # it makes the model's folder

WORDS = -(-VOCABULARY // 32)
LETTERS = StructuredOutputsParams(regex="[a-z]{3,9}")
DIGITS = StructuredOutputsParams(regex="[0-9]{3,9}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.load(folder, vocab_size=VOCABULARY), (END,))


@pytest.fixture
def pool(folder: Path) -> Iterator[MaskPool]:
    pool = MaskPool(folder, VOCABULARY, (END,), processes=2, places=8)
    yield pool
    pool.close()


def _samples(pool: MaskPool, form: StructuredOutputsParams, count: int) -> list[int]:
    """Returns their places."""
    made = MaskPool.factory(pool, SamplingParams(structured_outputs=form))
    return [pool.begin(made(index)) for index in range(count)]


def _made(pool: MaskPool, samples: list[int], token: int = AS_IT_STANDS) -> list[bytes]:
    places = np.array(samples, np.int32)
    pool.start(places, np.full(places.size, token, np.int32))
    while not pool.board.ready(places).all():
        pool.wait(0.01)
    return [pool.board.words[place].tobytes() for place in samples]


def _process_of(pool: MaskPool, place: int) -> int:
    return next(process.index for process in pool.processes if place in process.places)


def _allowed(words: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")).tolist()


def test_masks_are_the_librarys(pool: MaskPool, compiler: GrammarCompiler) -> None:
    samples = _samples(pool, LETTERS, 4)
    matcher = compiler.compile(grammar_text(LETTERS)).matcher()
    assert {_process_of(pool, place) for place in samples} == {0, 1}
    assert set(_made(pool, samples)) == {matcher.mask().tobytes()}
    token = _allowed(matcher.mask().tobytes())[0]
    matcher.accept(token)
    assert set(_made(pool, samples, token)) == {matcher.mask().tobytes()}


def test_places_come_back(pool: MaskPool) -> None:
    for _ in range(3):  # of 8 places
        places = np.array(_samples(pool, LETTERS, 8), np.int32)
        _made(pool, places.tolist())
        pool.start(places, np.full(8, AS_IT_STANDS, np.int32))
        pool.end(places)  # the masks of all of them are under way
        assert pool.held == 0
    assert len(set(_made(pool, _samples(pool, DIGITS, 8)))) == 1
    while pool.wait(0.01):
        pass  # nobody waits for a mask of a sample that has ended


def test_a_process_that_dies_costs_its_own_samples(pool: MaskPool) -> None:
    samples = _samples(pool, LETTERS, 4)
    _made(pool, samples)
    (first,) = pool._children
    children = [
        int(text)
        for text in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    ]
    assert len(children) == 2
    # the one that was forked first: process 1; the other tries forms
    os.kill(children[0], signal.SIGKILL)
    its = [_process_of(pool, place) == 1 for place in samples]
    others = [place for place, gone in zip(samples, its, strict=True) if not gone]
    token = _allowed(_made(pool, others)[0])[0]
    for _ in range(2):
        assert [not any(words) for words in _made(pool, samples, token)] == its
    pool.end(np.array(samples, np.int32))
    again = _samples(pool, LETTERS, 4)  # another has taken its place
    assert {_process_of(pool, place) for place in again} == {0, 1}
    assert all(any(words) for words in _made(pool, again))


def test_a_mask_that_is_being_made_when_its_process_dies_is_of_no_token(pool: MaskPool) -> None:
    samples = _samples(pool, LETTERS, 8)
    (first,) = pool._children
    os.kill(first.pid, signal.SIGSTOP)  # process 0
    places = np.array(samples, np.int32)
    pool.start(places, np.full(8, AS_IT_STANDS, np.int32))
    os.kill(first.pid, signal.SIGKILL)
    while pool.wait(0.01):
        pass
    assert [any(pool.board.words[place]) for place in samples] == [
        _process_of(pool, place) == 1 for place in samples
    ]


def test_a_form_whose_process_dies_goes_to_another_and_is_refused_then(folder: Path) -> None:
    pool = MaskPool(folder, VOCABULARY, (END,), processes=1)
    assert pool.compiled(LETTERS).known
    (first,) = pool._children
    first.kill()
    first.wait()  # it has gone, and nobody has looked yet
    assert any(_made(pool, _samples(pool, LETTERS, 1))[0])
    for asked, deaths in (
        (StructuredOutputsParams(regex="a{2,3}"), 1),
        (StructuredOutputsParams(regex="b{2,3}"), 2),
    ):
        os.kill(pool._children[-1].pid, signal.SIGSTOP)
        form = pool.ask(asked)
        while form.deaths < deaths:
            before = form.deaths
            while (
                form.number not in pool.processes[0].compiling
            ):  # it was tried, and a process is there for it
                pool.look(0.001)
            os.kill(pool._children[-1].pid, signal.SIGKILL)
            while form.deaths == before:
                pool.look(0.001)
        if deaths == 1:
            assert pool.compiled(asked).refusal is None
        else:
            with pytest.raises(UsageError, match="the processes that compiled it ended"):
                pool.compiled(asked)
    assert any(_made(pool, _samples(pool, LETTERS, 2))[0])
    pool.close()


def test_an_engine_may_want_json_without_white_space(folder: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    pieces = Tokenizer.load(folder, vocab_size=VOCABULARY).token_bytes
    cases: list[tuple[bool, dict[str, Any], bool]] = [
        (False, {}, True),
        (True, {}, False),
        (True, {"whitespace_pattern": " "}, True),  # which the request says itself
        (False, {"disable_any_whitespace": True}, False),
    ]
    for compact, more, blank in cases:
        pool = MaskPool(folder, VOCABULARY, (END,), processes=1, compact=compact)
        form = StructuredOutputsParams(json=schema, **more)
        # Beside bad words no text is forced: each token is drawn.
        made = MaskPool.factory(pool, SamplingParams(structured_outputs=form, bad_words=["zq"]))
        places = [pool.begin(made(0))]
        _made(pool, places)
        (behind_the_brace,) = _made(pool, places, pieces.index(b"{"))
        assert (pieces.index(b" ") in _allowed(behind_the_brace)) == blank, (compact, more)
        pool.close()


def test_few_forms_are_kept(pool: MaskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_pool, "KEPT", 1)
    before = _samples(pool, LETTERS, 1)
    letters = pool.compiled(LETTERS)
    pool.compiled(DIGITS)
    assert not any(letters.number in process.forms for process in pool.processes)
    late = MaskPool.factory(pool, SamplingParams(structured_outputs=DIGITS))
    pool.compiled(LETTERS)
    digits = [pool.begin(late(0))]  # of a form that was let go meanwhile
    assert _made(pool, before) != _made(pool, digits)


def test_a_form_that_was_let_go_is_handed_to_the_next_process_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_pool, "KEPT", 1)
    pool = MaskPool(folder, VOCABULARY, (END,), processes=1)
    late = MaskPool.factory(pool, SamplingParams(structured_outputs=DIGITS))
    pool.compiled(LETTERS)
    for _ in range(2):  # the second time of another process, the first having died
        place = pool.begin(late(0))
        assert any(_made(pool, [place])[0])
        pool.end(np.array([place], np.int32))
        pool._children[-1].kill()
        pool._children[-1].wait()
        pool.look()
    pool.close()


def test_slow_samples_come_last(compiler: GrammarCompiler) -> None:
    board = MaskBoard.over(np.zeros(MaskBoard.size(6, WORDS), np.int32), 6, WORDS)
    desk, places = MaskDesk(compiler, board, range(2, 5)), np.arange(2, 5, dtype=np.int32)
    desk.take(Compile(7, LETTERS))
    for place in places.tolist():
        desk.take(Begin(place, 7, 0, (), True))
    assert not desk.due() and desk.busy  # they begin once it is compiled
    while not (said := desk.settle()):
        time.sleep(0.001)
    assert [(each.grammar, each.refusal) for each in said] == [(7, None)] and not desk.busy
    desk._slow = {2, 3}  # as measured
    board.ask(np.arange(6, dtype=np.int32), np.full(6, AS_IT_STANDS, np.int32))  # others' too
    assert desk.due() == [(4, 1), (2, 1), (3, 1)]
    desk._others = 32
    assert desk.due() == [(2, 1)]  # it has waited long enough
    for _ in range(3):
        desk.make(*desk.due()[0])
    assert not desk.due() and board.missing() == 3 and board.words[2:5].any(1).all()
    board.ask(places[1:2], np.array([AS_IT_STANDS], np.int32))
    asked = desk.due()
    desk.take(End(places[1:2].tobytes()))
    # of the next sample, which has not begun here
    board.ask(places[1:2], np.array([AS_IT_STANDS], np.int32))
    desk.make(*asked[0])
    assert board.made[3] == 2 and board.asked[3] == 3


def test_who_was_asked_first_comes_first(compiler: GrammarCompiler) -> None:
    board = MaskBoard.over(np.zeros(MaskBoard.size(4, WORDS), np.int32), 4, WORDS)
    desk, places = MaskDesk(compiler, board, range(4)), np.arange(4, dtype=np.int32)
    desk.take(Compile(1, LETTERS))
    for place in places.tolist():
        desk.take(Begin(place, 1, 0, (), True))
    while not desk.settle():
        time.sleep(0.001)

    def ask(*some: int) -> None:
        board.ask(np.array(some, np.int32), np.full(len(some), AS_IT_STANDS, np.int32))

    ask(3)
    assert desk.due() == [(3, 1)]
    ask(0, 1)
    assert desk.due() == [(3, 1), (0, 1), (1, 1)]
    desk.make(3, 1)
    desk.make(0, 1)
    ask(0, 2, 3)  # 0 is asked again at each step, and passes nobody by it
    assert desk.due() == [(1, 1), (0, 2), (2, 1), (3, 2)]
    desk._slow = {0, 1}
    assert desk.due() == [(2, 1), (3, 2), (1, 1), (0, 2)]


@pytest.mark.parametrize(
    "most", [1 << 30, 4096]
)  # bytes that wait for a process before it is given up
def test_a_process_that_reads_nothing_holds_nobody_up(
    folder: Path, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(mask_worker, "UNSENT", most)
    pool = MaskPool(folder, VOCABULARY, (END,), processes=1, places=2)
    letters, digits = pool.compiled(LETTERS), pool.compiled(DIGITS)
    (first,), (worker,) = pool._children, pool.processes
    os.kill(first.pid, signal.SIGSTOP)
    # where a send waits for it after all
    rescue = threading.Timer(600, os.kill, (first.pid, signal.SIGCONT))
    rescue.start()
    for number in range(2000):
        place = pool.sample(digits if number % 2 else letters)
        pool.start(np.array([place], np.int32), np.array([AS_IT_STANDS], np.int32))
        if number < 1999:
            pool.end(np.array([place], np.int32))
    assert Path(f"/proc/{first.pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T", (
        "somebody waited for it"
    )
    rescue.cancel()
    assert bool(worker.unsent) == (most > 4096)
    while most == 4096 and not worker.died:
        pool.look(0.001)
    os.kill(first.pid, signal.SIGCONT)
    while pool.wait(0.01):
        pass
    expected = compiler.compile(grammar_text(DIGITS)).matcher().mask().tobytes()
    assert pool.board.words[place].tobytes() == (bytes(4 * WORDS) if most == 4096 else expected)
    pool.end(np.array([place], np.int32))
    assert _made(pool, [pool.sample(digits)]) == [expected]
    pool.close()


def test_where_no_process_can_be_started_forms_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object, **more: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    pool = MaskPool(folder, VOCABULARY, (END,), processes=1)
    monkeypatch.setattr("subprocess.Popen", none)
    with pytest.raises(
        UsageError, match="could not be started: Resource temporarily unavailable: free memory"
    ):
        pool.compiled(LETTERS)
    monkeypatch.undo()
    assert pool.compiled(DIGITS).refusal is None
    pool.close()


def test_a_process_that_has_grown_says_so_and_few_forms_are_kept(
    pool: MaskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = mask_process.Growth()
    assert not growth.is_much(), "it was looked at just now"
    monkeypatch.setattr(mask_process, "TELLING", 0.0)
    assert not growth.is_much()
    monkeypatch.setattr(mask_process, "GROWN", -(1 << 40))
    assert growth.is_much()
    monkeypatch.setattr(mask_pool, "FEW", 2)
    asked = [StructuredOutputsParams(regex=f"grown[{letter}]") for letter in "abcd"]
    for each in asked:
        pool.compiled(each)
    pool._take(pool.processes[0], mask_process.Grown())
    kept = list(pool._forms.values())
    assert [form.asked for form in kept] == asked[-2:]
    assert pool.processes[0].forms <= {form.number for form in kept}
