"""The processes that make masks: what one does first, what its death costs, what is kept, and what comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_model import END, VOCABULARY, make_folder

from penstock.engine import mask_pool
from penstock.engine.mask_pool import HeldSample, MaskPool
from penstock.errors import UsageError
from penstock.request import SamplingParams, StructuredOutputsParams
from penstock.schedule.guides import Guide
from penstock.text.grammar import GrammarCompiler, grammar_text
from penstock.text.mask_process import Begin, Compile, End, MaskDesk, Next
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


def _guides(pool: MaskPool, form: StructuredOutputsParams, count: int) -> list[Guide]:
    made = MaskPool.factory(pool, SamplingParams(structured_outputs=form))
    return [Guide(made(index), np.full(WORDS, -1, np.int32)) for index in range(count)]


def _made(pool: MaskPool, guides: list[Guide], tokens: list[int] | None = None) -> list[bytes]:
    pool.start(guides, tokens)
    while any(guide.words is None for guide in guides):
        pool.wait(0.01)
    return [guide.words.tobytes() for guide in guides if guide.words is not None]


def _process_of(guide: Guide) -> int:
    assert isinstance(guide.constraint, HeldSample)
    return guide.constraint.process.index


def _allowed(words: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")).tolist()


def test_masks_are_the_librarys(pool: MaskPool, compiler: GrammarCompiler) -> None:
    guides = _guides(pool, LETTERS, 4)
    matcher = compiler.compile(grammar_text(LETTERS)).matcher()
    assert {_process_of(guide) for guide in guides} == {0, 1}
    assert set(_made(pool, guides)) == {matcher.mask().tobytes()}
    token = _allowed(matcher.mask().tobytes())[0]
    matcher.accept(token)
    assert set(_made(pool, guides, [token] * 4)) == {matcher.mask().tobytes()}


def test_places_come_back(pool: MaskPool) -> None:
    for _ in range(3):  # of 8 places
        guides = _guides(pool, LETTERS, 8)
        _made(pool, guides)
        pool.start(guides)
        pool.end(guides)  # the masks of all of them are under way
        assert pool.held == 0
    assert len(set(_made(pool, _guides(pool, DIGITS, 2)))) == 1


def test_a_process_that_dies_costs_its_own_samples(pool: MaskPool) -> None:
    guides = _guides(pool, LETTERS, 4)
    _made(pool, guides)
    (first,) = pool._children
    children = [int(text) for text in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
    assert len(children) == 1
    os.kill(children[0], signal.SIGKILL)  # the forked one: process 1
    token = _allowed(_made(pool, [guide for guide in guides if _process_of(guide) == 0])[0])[0]
    masks = _made(pool, guides, [token] * 4)
    ended = [not any(words) for words in masks]
    assert ended == [_process_of(guide) == 1 for guide in guides]
    assert all(not any(words) for words in _made(pool, [guide for guide in guides if _process_of(guide) == 1]))
    pool.end(guides)
    again = _guides(pool, LETTERS, 4)  # another has taken its place
    assert {_process_of(guide) for guide in again} == {0, 1}
    assert all(any(words) for words in _made(pool, again))


def test_a_form_whose_process_dies_goes_to_another_and_is_refused_then(folder: Path) -> None:
    pool = MaskPool(folder, VOCABULARY, (END,), processes=1)
    assert pool.compiled(LETTERS).known
    (first,) = pool._children
    first.kill()
    first.wait()  # it has gone, and nobody has looked yet
    assert any(_made(pool, _guides(pool, LETTERS, 1))[0])
    for asked, deaths in ((StructuredOutputsParams(regex="a{2,3}"), 1), (StructuredOutputsParams(regex="b{2,3}"), 2)):
        os.kill(pool._children[-1].pid, signal.SIGSTOP)
        form = pool.ask(asked)
        while form.deaths < deaths:
            os.kill(pool._children[-1].pid, signal.SIGKILL)
            before = form.deaths
            while form.deaths == before:
                pool.look()
                time.sleep(0.001)
            if form.deaths < deaths:
                os.kill(pool._children[-1].pid, signal.SIGSTOP)
        if deaths == 1:
            assert pool.compiled(asked).refusal is None
        else:
            with pytest.raises(UsageError, match="the processes that compiled it ended"):
                pool.compiled(asked)
    assert any(_made(pool, _guides(pool, LETTERS, 2))[0])
    pool.close()


def test_few_forms_are_kept(pool: MaskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_pool, "KEPT", 1)
    before = _guides(pool, LETTERS, 1)
    letters = pool.compiled(LETTERS)
    pool.compiled(DIGITS)
    assert not any(letters.number in process.forms for process in pool.processes)
    late = MaskPool.factory(pool, SamplingParams(structured_outputs=DIGITS))
    pool.compiled(LETTERS)
    digits = [Guide(late(0), np.full(WORDS, -1, np.int32))]  # of a form that was let go meanwhile
    assert _made(pool, before) != _made(pool, digits)


def test_a_form_that_was_let_go_is_handed_to_the_next_process_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_pool, "KEPT", 1)
    pool = MaskPool(folder, VOCABULARY, (END,), processes=1)
    late = MaskPool.factory(pool, SamplingParams(structured_outputs=DIGITS))
    pool.compiled(LETTERS)
    for _ in range(2):  # the second time of another process, the first having died
        guide = Guide(late(0), np.full(WORDS, -1, np.int32))
        assert any(_made(pool, [guide])[0])
        pool.end([guide])
        pool._children[-1].kill()
        pool._children[-1].wait()
        pool.look()
    pool.close()


def test_slow_samples_come_last(compiler: GrammarCompiler) -> None:
    places = np.zeros((3, WORDS), np.int32)
    desk = MaskDesk(compiler, places)
    assert desk.take(Compile(7, LETTERS)) is not None
    for number in range(3):
        desk.take(Begin(number, number, 7, 0, (), True))
    desk._seconds = {0: 0.5, 1: 0.1}  # as measured
    desk.take(Next(np.arange(3, dtype=np.int64).tobytes(), np.full(3, -1, np.int32).tobytes()))
    assert [desk.make() for _ in range(3)] == [(2, []), (1, []), (0, [])]
    assert not desk.is_due and not desk._seconds and places.any(1).all()
    desk.take(Next(np.array([1], np.int64).tobytes(), np.array([-1], np.int32).tobytes()))
    desk.take(End(np.array([1], np.int64).tobytes()))
    assert desk.make() is None


def test_where_no_process_can_be_started_forms_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object, **more: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    pool = MaskPool(folder, VOCABULARY, (END,), processes=1)
    monkeypatch.setattr("subprocess.Popen", none)
    with pytest.raises(UsageError, match="could not be started: Resource temporarily unavailable: free memory"):
        pool.compiled(LETTERS)
    monkeypatch.undo()
    assert pool.compiled(DIGITS).refusal is None
    pool.close()
