"""The sandbox: the same ids as the tokenizer's, and whatever a template, a tokenizer or a text
takes, it costs that job alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock.demo
from penstock.errors import (
    ContextLengthError,
    FaultError,
    PenstockError,
    TokenizerError,
    UsageError,
)
from penstock.sandbox.sandbox import RETRY, SHORT, Sandbox, SandboxPool
from penstock.sandbox.sandbox_process import Bounds, ChatJob, TellJob, TextJob, TokensJob
from penstock.text.tokenizer import Tokenizer

DEMO = Path(penstock.demo.__file__).parent / "model"
LIMIT = 2304
TIGHT = Bounds(memory=128 * 2**20, seconds=1, grown=16 * 2**20)
HI = [{"role": "user", "content": "hi"}]
PROSE = "".join(random.Random(1).choices("a word, and 12 more; Nine\nlines ofit. ", k=200_000))


def with_template(folder: Path, template: str) -> Tokenizer:
    """The demo's tokenizer with another template."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


# What a message says is what the template does: a sandbox's start costs more than most of these.
SAYS = {
    "long text": "{{ 'x' * 10000000000 }}",
    "long list": "{{ [1] * 99999999999 }}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "doubling": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{%"
        " endfor %}"
    ),
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "deep": (
        "{% set ns = namespace(a=(1,)) %}{% for i in range(99999) %}{% set ns.a = (ns.a,) %}{%"
        " endfor %}{{ ns.a | string | length }}"
    ),
    "power": "{{ 10 ** (10 ** 9) }}",  # one of those in C, that hear no signal's handler
    "select": "{% set l = ['y'] * 100000 %}{{ l | select('in', ['x'] * 100000) | list | length }}",
    "digits": "{{ 10 ** 5000 }}",
}
SLOW = "{% for i in range(2000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% set say = messages[0].content %}"
    + "".join(f"{{% if say == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in SAYS.items())
    + f"{{% if say == 'slow' %}}{SLOW}{{% endif %}}<{{{{ say }}}}>"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_template(tmp_path_factory.mktemp("sandbox") / "model", TEMPLATE)


@pytest.fixture(scope="module")
def sandbox(tokenizer: Tokenizer) -> Iterator[Sandbox]:
    sandbox = Sandbox.open(tokenizer, LIMIT)
    yield sandbox
    sandbox.close()


def test_it_gives_the_tokenizers_ids(tokenizer: Tokenizer, sandbox: Sandbox) -> None:
    texts = ["", "x", "Theo has 12 pebbles.", PROSE[:3000], "é😀\n" * 50]
    for special in (True, False):
        done = sandbox.run(TextJob(texts, special))
        assert done.ids == tokenizer.encode_batch(texts, add_special_tokens=special)
        told = json.loads(sandbox.run(TellJob(PROSE, special, spelt=not special)).told)
        # of more text than the context holds
        ids = tokenizer.encode(PROSE, add_special_tokens=special)
        spelt = None if special else [tokenizer.token_text(token) for token in ids]
        assert told == {
            "count": len(ids),
            "max_model_len": LIMIT,
            "tokens": ids,
            "token_strs": spelt,
        }
        assert sandbox.run(TokensJob(np.array(ids, np.int32).tobytes())).text == tokenizer.decode(
            ids, skip_special_tokens=False
        )
    done = sandbox.run(ChatJob(messages=HI))
    assert (done.text, done.ids) == ("<hi>", [tokenizer.encode("<hi>", add_special_tokens=False)])


@pytest.mark.parametrize("value", [2**70, "\ud800"])
def test_what_no_frame_can_hold_is_a_fault_of_its_field(sandbox: Sandbox, value: object) -> None:
    held: list[dict[str, Any]] = [{"a": value}]
    # the text of a chat is a prompt until its body is known
    whole = "prompt" if isinstance(value, str) else "messages"
    for job, field in (
        (ChatJob(messages=held), whole),
        (ChatJob(messages=HI, tools=held), "tools"),
        (ChatJob(messages=HI, template_kwargs=held[0]), "chat_template_kwargs"),
    ):
        with pytest.raises(UsageError) as refused:
            sandbox.run(job)
        assert refused.value.param == field and (
            isinstance(value, str) or field in refused.value.rule
        )


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the system doesn't say what a process has"
)
def test_what_a_long_text_took_is_given_back_and_the_process_stays(tokenizer: Tokenizer) -> None:
    sandbox = Sandbox.open(tokenizer, LIMIT, Bounds(grown=32 * 2**20))
    process = sandbox._process.pid
    for _ in range(3):
        assert sandbox.run(TellJob("\u0301" * 200_000, spelt=True)).told
    assert sandbox.usable and sandbox._process.pid == process
    sandbox.close()


def test_no_more_of_a_text_is_tokenised_than_the_context_needs(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    plain = tokenizer.encode_batch

    def looked(texts: Any, **more: Any) -> list[list[int]]:
        seen.append(len(texts[0]))
        return plain(texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", looked)
    for text in (PROSE, " " * 100_000, "a" * 100_000, "x" * 40_000_000):
        with pytest.raises(
            ContextLengthError, match="context length is 100 tokens and the prompt is too long"
        ):
            tokenizer.encode_prompt(text, 100)
    assert sum(seen) < 10_000
    seen.clear()
    whole = plain([PROSE])[0]
    for keep in (1, 7, 99):
        assert tokenizer.encode_prompt(PROSE, 100, keep=keep)[-keep:] == whole[-keep:]
        assert len(tokenizer.encode_prompt(PROSE, 100, keep=keep)) == keep + 1
    assert sum(seen) < 20_000
    seen.clear()
    one_word = "\U0001f600\u200d" * 20_000 + "<end>\n<start>"  # words end behind it alone
    assert (
        tokenizer.encode_prompt(one_word, 100, keep=50)[-50:] == plain([one_word[-200:]])[0][-50:]
    )
    assert sum(seen) < 2_000
    assert tokenizer.encode_prompt("a b c", 100, keep=50) == plain(["a b c"])[0]
    assert tokenizer.encode_prompt(PROSE[:200], 100) == plain([PROSE[:200]])[0]


def test_a_bomb_ends_its_own_job(tokenizer: Tokenizer) -> None:
    """By an answer of the template's, at the memory's end or at the time's; the next job has a
    process again."""

    async def tried() -> None:
        pool = SandboxPool(tokenizer, LIMIT, 1, TIGHT)
        try:
            for bomb in SAYS:
                with pytest.raises(
                    UsageError, match=r"too long to render|more memory|fails on these messages"
                ):
                    await pool.run(says(bomb))
                assert (await pool.run(says("hi")))[0].text == "<hi>", bomb
        finally:
            pool.close()

    asyncio.run(tried())


def test_a_template_that_bombs_as_it_is_compiled_is_told_at_the_start(tmp_path: Path) -> None:
    for number, template in enumerate(("{% break %}", "{{ 'x' * 10000000000 }}")):
        tokenizer = with_template(tmp_path / str(number), template)
        sandbox = Sandbox.open(tokenizer, LIMIT, TIGHT)
        with pytest.raises(PenstockError, match="outside loop" if number == 0 else "more memory"):
            raise sandbox.chat_fault or sandbox.run(ChatJob(messages=HI))  # type: ignore[misc]
        sandbox.close()


@pytest.mark.parametrize(
    ("pattern", "content", "times", "served"),
    [
        ({"String": "a"}, "aa", 30, False),
        ({"Regex": ""}, "b", 30, False),
        ({"Regex": "a+"}, "a" * 300, 1, False),
        ({"String": "  "}, "\u2581\u2581", 30, True),
        ({"Regex": " {2,}"}, "\u2581", 3, True),
    ],
)
def test_a_tokenizer_whose_normalizer_explodes_is_refused(
    tmp_path: Path, pattern: dict[str, str], content: str, times: int, served: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    spec = json.loads((folder / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": pattern, "content": content}
    spec["normalizer"] = {"type": "Sequence", "normalizers": [replace] * times}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    if served:
        assert Tokenizer.load(folder).encode("aa  aa")
    else:
        with pytest.raises(TokenizerError, match="may make texts over 256 times as long"):
            Tokenizer.load(folder)


def test_a_text_that_takes_too_much_ends_by_memory_or_time(tmp_path: Path) -> None:
    """As where the library's regular expressions meet what they were not made for."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    spec = json.loads((folder / "tokenizer.json").read_text())
    slow = {
        "type": "Split",
        "pattern": {"Regex": "(a|a)*(a|a)*(a|a)*b"},
        "behavior": "Isolated",
        "invert": False,
    }
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, spec["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(folder)
    for text, bounds in (
        ("a" * 2000 + "cb", TIGHT),
        ("".join(map(chr, range(32, 50_000))), Bounds(memory=2**20)),
    ):
        sandbox = Sandbox.open(tokenizer, 10_000, bounds)
        with pytest.raises(
            (UsageError, TokenizerError), match=r"more memory|too long|library failed"
        ):
            sandbox.run(TextJob([text]))
        sandbox.close()


def test_what_ended_from_outside_is_started_again(tokenizer: Tokenizer) -> None:
    async def tried() -> None:
        pool = SandboxPool(tokenizer, LIMIT, 1)
        try:
            await pool.begin()
            (sandbox,) = pool._open
            os.kill(sandbox._process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, sandbox._process.pid, os.WEXITED | os.WNOWAIT)
            with pytest.raises(FaultError, match="was killed by signal 9: send it again"):
                await pool.run([ChatJob(messages=HI)])
            assert (await pool.run([ChatJob(messages=HI)]))[0].text == "<hi>"
        finally:
            pool.close()

    asyncio.run(tried())


def test_many_jobs_share_few_processes_and_abandoned_ones_are_dropped(tokenizer: Tokenizer) -> None:
    async def tried() -> None:
        pool = SandboxPool(tokenizer, LIMIT, 2)
        try:
            jobs = [TextJob([f"job {number}"]) for number in range(300)]
            left = pool.run(jobs)
            await asyncio.sleep(0)
            left.cancel()
            done = await pool.run(jobs)
            assert [each.ids[0] for each in done] == [
                tokenizer.encode(f"job {number}") for number in range(300)
            ]
            assert 1 <= len(pool._open) <= 2
            with pytest.raises(ContextLengthError):
                await pool.run([TextJob(["fine"]), TextJob([PROSE]), TextJob(["fine"])])
        finally:
            pool.close()
        assert not pool._open

    asyncio.run(tried())


def says(content: str) -> list[ChatJob]:
    return [ChatJob(messages=[{"role": "user", "content": content}])]


@pytest.mark.parametrize("hold", [0.0, 60.0])
def test_a_short_job_is_answered_on_the_spot(tokenizer: Tokenizer, hold: float) -> None:
    async def tried() -> None:
        pool = SandboxPool(tokenizer, LIMIT, 1, hold=hold)
        try:
            await pool.begin()
            for content, short in (
                ("slow", True),
                ("digits", True),
                ("a\ud800", True),
                ("x" * SHORT, False),
                ("b", True),
            ):
                future = pool.run(says(content))
                if hold:
                    assert future.done() == short
                if content in ("digits", "a\ud800"):
                    with pytest.raises(UsageError, match=r"fails on these messages|surrogate"):
                        await future
                else:
                    assert (await future)[0].text == f"<{content}>"
        finally:
            pool.close()

    asyncio.run(tried())


def test_a_late_answer_is_read_whoever_has_gone_and_the_next_jobs_are_not_held_for(
    tokenizer: Tokenizer,
) -> None:
    async def tried() -> None:
        pool = SandboxPool(tokenizer, LIMIT, 1, hold=0.001)
        try:
            await pool.begin()
            (sandbox,) = pool._open
            os.kill(sandbox._process.pid, signal.SIGSTOP)
            late = pool.run(says("slow"))
            assert not late.done()
            os.kill(sandbox._process.pid, signal.SIGCONT)
            late.cancel()
            sandbox._hold = 60.0  # so that whatever is held for is there
            assert (await pool.run(says("next")))[0].text == "<next>"
            on_the_spot = []
            for number in range(10, 10 + RETRY):
                future = pool.run(says(f"no{number}"))
                on_the_spot.append(future.done())
                assert (await future)[0].text == f"<no{number}>"
            assert on_the_spot == [False] * (RETRY - 1) + [True]
            assert pool._open == {sandbox}
        finally:
            pool.close()

    asyncio.run(tried())


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (TextJob(["a\ud800"]), "half a surrogate pair at character 1"),
        (ChatJob(messages=HI, template_kwargs={"x": {1, 2}.__iter__()}), "no word for"),
        (ChatJob(messages=HI, template_kwargs={"x": 10**400}), "too large a number"),
    ],
)
def test_what_cannot_be_said_is_refused(sandbox: Sandbox, job: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        sandbox.run(job)
    assert sandbox.usable


def test_it_ends_with_who_started_it(tokenizer: Tokenizer) -> None:
    sandbox = Sandbox.open(tokenizer, LIMIT)
    sandbox._channel.close()
    assert sandbox._process.wait(600) == 0
    sandbox.close()
