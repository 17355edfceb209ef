"""How exchanges and servers end: clients that go away, an engine that dies, a shutdown, a key, a port, a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import server_fake
from server_fake import Running, make_tokenizer, read_error, running_server

from penstock.errors import CapacityError, UsageError
from penstock.server.online import handlers
from penstock.server.openai import forms
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.process.signals import signals

pytestmark = pytest.mark.torch

SUPPORT = str(Path(server_fake.__file__).parent)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running_server(make_tokenizer(tmp_path)) as running:
        yield running


def send_raw(server: Running, body: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own, which the test closes when it likes."""
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
def test_a_client_that_goes_away_frees_its_streams(server: Running, stream: bool, prompt: Any) -> None:
    server.hold(True)
    connection = send_raw(server, {"prompt": prompt, "n": 2, "max_tokens": 5, "stream": stream})
    count = 1 if isinstance(prompt, str) else 3
    server.wait_for(lambda: len(server.engine.open) == count)
    connection.close()
    server.wait_for(lambda: not server.engine.open)
    assert all(made.cancelled for made in server.engine.submitted) and len(server.engine.submitted) == count
    server.hold(False)
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).status_code == 200


def test_a_client_that_goes_away_in_mid_stream(server: Running) -> None:
    server.engine.step_seconds = 0.01
    with httpx.stream(
        "POST", server.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 200, "stream": True}
    ) as answer:
        pieces = answer.iter_raw()  # kept: dropping it would close the connection
        next(pieces)
        assert len(server.engine.open) == 1
    server.wait_for(lambda: not server.engine.open)
    assert server.engine.submitted[0].cancelled


def test_a_client_that_goes_away_in_its_body(server: Running) -> None:
    connection = send_raw(server, {"prompt": "x"})
    connection.close()
    host, port = server.url.removeprefix("http://").split(":")
    half = socket.create_connection((host, int(port)))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    half.close()
    assert httpx.get(server.url + "/health/ready").status_code == 200


def test_finished_answers_cancel_nothing(server: Running) -> None:
    for stream in (False, True):
        body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 2, "stream": stream}
        assert httpx.post(server.url + COMPLETIONS, json=body).status_code == 200
    assert not server.engine.open and not any(made.cancelled for made in server.engine.submitted)


def test_a_later_prompt_that_cannot_be_submitted_cancels_the_earlier(server: Running) -> None:
    plain = server.engine.submit

    def second_fails(ids: list[int], sampling: Any, *, stream: bool, **more: Any) -> Any:
        if server.engine.submitted:
            raise UsageError("no more of these", param="prompt")
        return plain(ids, sampling, stream=stream, **more)

    server.engine.submit = second_fails  # type: ignore[method-assign]
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": ["x", "y"]})
    assert answer.status_code == 400 and server.engine.submitted[0].cancelled and not server.engine.open


def test_a_dead_engine_ends_who_waits_and_who_comes(server: Running) -> None:
    server.hold(True)
    answers: dict[bool, httpx.Response] = {}

    def ask(stream: bool) -> None:
        answers[stream] = httpx.post(server.url + COMPLETIONS, json={"prompt": "x", "stream": stream}, timeout=30)

    waiters = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for waiter in waiters:
        waiter.start()
    server.wait_for(lambda: len(server.engine.open) == 2)
    server.engine.alive = False
    server.hold(False)
    for waiter in waiters:
        waiter.join(30)
    assert answers[False].status_code == 500 and answers[False].json()["error"]["code"] == "engine_dead"
    assert "told to" not in answers[False].text + answers[True].text, "the engine's own words are for the log"
    assert (
        answers[True].status_code == 200
        and '"engine_dead"' in answers[True].text
        and "[DONE]" not in answers[True].text
    )
    assert httpx.get(server.url + "/health/ready").status_code == 503
    assert httpx.get(server.url + "/health").status_code == 503
    assert httpx.get(server.url + "/health/live").status_code == 200
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).status_code == 500


def test_a_sample_that_fails_ends_its_request_alone(server: Running) -> None:
    server.engine.fail_with = "this row went wrong"
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": ["x", "y"]})
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "this row went wrong"
    assert answer.json()["error"]["code"] == "numerical_error"
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError, match="this row went wrong"),
    ):
        list(client.completions.create(model="fake", prompt="x", stream=True))
    server.engine.fail_with = None
    assert not server.engine.open
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).status_code == 200
    assert 'finished_reason="numerical_error",model_name="fake"} 2.0' in httpx.get(server.url + "/metrics").text


def test_a_shutdown_tells_who_waits(server: Running) -> None:
    server.hold(True)
    answers: list[httpx.Response] = []
    waiter = threading.Thread(
        target=lambda: answers.append(httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}, timeout=30))
    )
    waiter.start()
    server.wait_for(lambda: server.engine.open)
    server.loop.call_soon_threadsafe(server.service.close)
    waiter.join(30)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
    assert not server.engine.open and httpx.get(server.url + "/health/ready").status_code == 503


@pytest.mark.parametrize("more_comes", [False, True])
def test_a_shutdown_tells_who_still_sends_a_body(server: Running, more_comes: bool) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sender:
        sender.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n\r\n{")
        server.wait_for(lambda: server.service.intake.bytes == 1)
        server.loop.call_soon_threadsafe(server.service.close)
        if more_comes:
            sender.sendall(b" ")
        answer = read_error(sender)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in answer
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).json()["error"]["code"] == "shutting_down"


def test_what_a_body_had_beyond_its_call_goes_while_it_is_answered(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def read(body: bytearray, limits: HttpLimits) -> Any:
        seen.append(forms.read_completion(body, limits))
        return seen[-1]

    monkeypatch.setattr(handlers, "read_completion", read)
    server.hold(True)
    asking = threading.Thread(
        target=httpx.post, args=(server.url + COMPLETIONS,), kwargs={"json": {"prompt": "x"}, "timeout": 30}
    )
    asking.start()
    server.wait_for(lambda: server.engine.open)
    held = sys.getrefcount(seen[0])
    assert held == 2, "by this test's list, and by the call that counts"
    server.hold(False)
    asking.join(30)


def test_a_fault_of_ours_is_a_500_in_shape(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    server.engine.submit = broken  # type: ignore[method-assign]
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "x"})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal" and "secret" not in answer.text
    # Logged behind the answer, so it may come a moment later.
    server.wait_for(lambda: any(r.exc_info and r.exc_info[0] is ZeroDivisionError for r in caplog.records))


# -- serve(): a process of its own, its engine a fake one

SERVE = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import types
from server_fake import FakeEngine, make_tokenizer
async def launch(config, engine, step_timeout):
    print("loading", flush=True)
    await asyncio.sleep({load})
    engine = FakeEngine(make_tokenizer(Path({folder!r})))
    engine.step_seconds = {step}
    asyncio.get_running_loop().call_later({die}, lambda: setattr(engine, "alive", False))
    plain = engine.close
    async def close(hurry):
        await plain()
        print("closed now" if hurry.is_set() else "closed", flush=True)
    engine.close = close
    return engine
sys.modules["penstock.engine.launch"] = types.SimpleNamespace(launch=launch, ENGINE=())  # so that no torch is loaded
import penstock.server.process.site as room
from penstock.server.process.serve import serve
from penstock.config import Config
from penstock.errors import PenstockError
async def breaks(*_, **__):
    raise RuntimeError("uvicorn broke")
plain_end = room._end
async def end(service, *rest):
    asyncio.get_running_loop().call_later(0.1, setattr, service.client, "alive", False)
    await plain_end(service, *rest)
if {harm!r} == "drain":
    room._end = end
elif {harm!r}:
    setattr(room._Server, {harm!r}, breaks)
try:
    serve(Config.of(model="some/model"), port={port}, served_model_name="fake")
except PenstockError as error:
    print("error:", error, flush=True)
    sys.exit(error.exit_code)
"""


class Serving:
    """harm: a method of uvicorn's server that breaks; of "drain" the engine dies amid it."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        load: float = 0,
        step: float = 0,
        die: float = 1e6,
        harm: str = "",
        **streams: Any,
    ) -> None:
        script = SERVE.format(tests=SUPPORT, folder=str(folder), port=port, load=load, step=step, die=die, harm=harm)
        command = [sys.executable, "-c", script]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        self.process = subprocess.Popen(command, text=True, **streams)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def url(self) -> str:
        assert self.line() == "loading"
        said = self.line()
        assert said.startswith("penstock serves fake at http://127.0.0.1:") and said.endswith("/v1")
        return said.split()[-1].removesuffix("/v1")

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        if number is not None:
            os.kill(self.process.pid, number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_server_and_engine(tmp_path: Path, number: int) -> None:
    serving = Serving(tmp_path)
    url = serving.url()
    assert httpx.post(url + COMPLETIONS, json={"prompt": "x", "model": "fake"}).status_code == 200
    assert serving.end(number) == (0, "closed\n", "")


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_asks_once_and_under_nohup_not_at_all(ignored: bool) -> None:
    async def hear() -> None:
        with signals() as stop:
            for _ in range(3):
                signal.raise_signal(signal.SIGHUP)
            if ignored:
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(stop.first.wait(), 30)
            assert not stop.second.is_set()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(stop.second.wait(), 30)

    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda number, frame: None)
    try:
        asyncio.run(hear())
    finally:
        signal.signal(signal.SIGHUP, usual)


def broken_streams(how: str) -> dict[str, Any]:
    """Standard output and error that take nothing, as Popen is told: full, closed, or pipes that nobody reads."""
    if how == "closed":
        return {"stdout": None, "stderr": None, "preexec_fn": lambda: [os.close(number) for number in range(3)]}
    if how == "left":
        read, write = os.pipe()
        os.close(read)
        return {"stdout": write, "stderr": write}
    full = open("/dev/full", "w")  # noqa: SIM115  the process's own from here on
    return {"stderr": full} if how == "error full" else {"stdout": full, "stderr": full}


@pytest.mark.parametrize("how", ["full", "closed", "left", "error full"])
def test_streams_that_take_nothing_end_no_server_and_no_drain(tmp_path: Path, how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    streams = broken_streams(how)
    serving = Serving(tmp_path, port=port, step=0.5, **streams)
    for stream in {streams.get("stdout"), streams["stderr"]} - {None}:
        stream.close() if how.endswith("full") else os.close(stream)
    url = f"http://127.0.0.1:{port}"
    while not answers(url):
        assert serving.process.poll() is None
    waiter, got = running_request(url)
    os.kill(serving.process.pid, signal.SIGTERM)
    serving.end()
    waiter.join(30)
    assert got[0].status_code == 200 and serving.process.returncode == 0


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/health").status_code == 200
    return False


def test_a_signal_while_loading(tmp_path: Path) -> None:
    serving = Serving(tmp_path, load=1000)
    assert serving.line() == "loading"
    assert serving.end(signal.SIGTERM) == (0, "", "")


def test_a_second_signal_does_not_wait_for_running_requests(tmp_path: Path) -> None:
    serving = Serving(tmp_path, step=1000)
    waiter, answers = running_request(serving.url())
    os.kill(serving.process.pid, signal.SIGINT)
    assert serving.process.stderr is not None
    assert serving.process.stderr.readline().startswith("penstock: lets 1 running request end, for 30 s at most;")
    status, out, err = serving.end(signal.SIGTERM)
    waiter.join(30)
    assert (status, out, err) == (0, "closed now\n", "") and answers[0].status_code == 503


class _Stuck:
    """An engine's process that ends when it is killed."""

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    async def wait(self) -> None:
        await self.killed.wait()

    def kill(self) -> None:
        self.killed.set()


def test_a_second_signal_shortens_the_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engine import async_client

    monkeypatch.setattr(async_client, "HURRIED", 0.01)
    client = async_client.AsyncClient.__new__(async_client.AsyncClient)

    async def run() -> None:
        client._process = process = _Stuck()  # type: ignore[assignment]
        hurry = asyncio.Event()
        ending = asyncio.create_task(client._end_process(1e6, hurry))
        await asyncio.sleep(0.05)
        assert not process.killed.is_set()
        hurry.set()
        await ending
        assert process.killed.is_set()

    asyncio.run(run())


def running_request(url: str) -> tuple[threading.Thread, list[httpx.Response]]:
    """Who waits for one that is at the engine, and the answer once that thread has ended."""
    answers: list[httpx.Response] = []
    waiter = threading.Thread(
        target=lambda: answers.append(httpx.post(url + COMPLETIONS, json={"prompt": "x"}, timeout=60))
    )
    waiter.start()
    while 'num_requests_running{model_name="fake"} 1.0' not in httpx.get(url + "/metrics").text:
        pass
    return waiter, answers


def test_the_first_signal_lets_a_running_request_end(tmp_path: Path) -> None:
    serving = Serving(tmp_path, step=0.4)
    waiter, answers = running_request(serving.url())
    status, out, err = serving.end(signal.SIGTERM)
    waiter.join(30)
    assert (status, out) == (0, "closed\n") and answers[0].status_code == 200
    assert err == "penstock: lets 1 running request end, for 30 s at most; a second signal ends it at once\n"


def test_an_engine_that_dies_ends_the_process(tmp_path: Path) -> None:
    serving = Serving(tmp_path, die=0.2)
    serving.url()
    status, out, _ = serving.end()
    assert status == 1 and out.startswith("closed\nerror: the engine died")


def test_an_engine_that_dies_while_requests_end_is_no_clean_end(tmp_path: Path) -> None:
    serving = Serving(tmp_path, step=0.5, harm="drain")
    waiter, answers = running_request(serving.url())
    status, out, _ = serving.end(signal.SIGTERM)
    waiter.join(30)
    assert status == 1 and out.startswith("closed\nerror: the engine died") and answers[0].status_code == 500


@pytest.mark.parametrize("harm", ["startup", "main_loop"])
def test_a_server_that_breaks_says_so(tmp_path: Path, harm: str) -> None:
    status, out, err = Serving(tmp_path, harm=harm).end()
    assert status == 1 and err.endswith("RuntimeError: uvicorn broke\n")
    assert out.endswith("closed\n") and ("penstock serves" in out) <= (harm == "main_loop")


BUSY = """
import sys, threading, types
from pathlib import Path
sys.path.insert(0, {tests!r})
from server_fake import FakeEngine, make_tokenizer
from penstock.text.sandbox import Sandbox
LOOPS = "{{% for i in range(99999) %}}" * 3 + "{{% endfor %}}" * 3
async def launch(config, engine, step_timeout):
    import asyncio
    tokenizer = make_tokenizer(Path({folder!r}), template=LOOPS)
    made = FakeEngine(tokenizer)
    loop, broken = asyncio.get_running_loop(), asyncio.Event()
    async def main_loop(server):
        await broken.wait()
        raise RuntimeError("uvicorn broke")
    if {end!r} == "breaks":
        import penstock.server.process.site as room
        room._Server.main_loop = main_loop
    def works():
        print("works", flush=True)
        if {end!r} == "dies":
            loop.call_soon_threadsafe(setattr, made, "alive", False)
        elif {end!r} == "breaks":
            loop.call_soon_threadsafe(broken.set)
    def stop_strings(stops, **more):
        works()
        threading.Event().wait()
    tokenizer.stop_strings = stop_strings
    begin = Sandbox.begin
    def begin_and_say(sandbox, job):
        works()
        return begin(sandbox, job)
    Sandbox.begin = begin_and_say
    return made
sys.modules["penstock.engine.launch"] = types.SimpleNamespace(launch=launch, ENGINE=())
sys.argv = ["penstock", "serve", "some/model", "--port", "0", "--served-model-name", "fake", "--shutdown-timeout", "0"]
from penstock.cli import main
main()
"""


@pytest.mark.parametrize("where", ["thread", "sandbox"])
@pytest.mark.parametrize("end", ["signal", "dies", "breaks"])
def test_work_aside_holds_no_end_up(tmp_path: Path, end: str, where: str) -> None:
    """It never ends here; who waits for it hears of the end all the same, but where the server itself broke."""
    asked: tuple[str, dict[str, Any]] = ("/completions", {"prompt": "x", "stop": ["y"]})
    if where == "sandbox":
        asked = ("/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    script = BUSY.format(tests=SUPPORT, folder=str(tmp_path), end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    answers: list[httpx.Response] = []

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            answers.append(httpx.post(url + asked[0], json=asked[1], timeout=60))

    waiter = threading.Thread(target=ask)
    waiter.start()
    assert process.stdout.readline() == "works\n"
    if end == "signal":
        os.kill(process.pid, signal.SIGTERM)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    waiter.join(60)
    if end == "breaks":
        assert process.returncode == 1 and err.endswith("RuntimeError: uvicorn broke\n")
        return
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
    if end == "dies":
        assert process.returncode == 1 and err.startswith("penstock: the engine died while serving")
    else:
        assert process.returncode == 0 and err.startswith("penstock: lets 1 running request end, for 0 s at most;")
        assert err.count("\n") == 1


STUCK = """
import io, sys, threading, types
from pathlib import Path
sys.path.insert(0, {tests!r})
from server_fake import FakeEngine, make_tokenizer
made = FakeEngine.__new__(FakeEngine)
async def launch(config, engine, step_timeout):
    made.__init__(make_tokenizer(Path({folder!r})))
    return made
sys.modules["penstock.engine.launch"] = types.SimpleNamespace(launch=launch, ENGINE=())
from penstock import journal
from penstock.server.batch import input_file
plain = journal._write
def stick():
    print("sticks", flush=True)
    made.alive = not {dies}
    threading.Event().wait()
def write(file, data):
    if b"custom_id" in data:
        stick()
    plain(file, data)
class Stuck(io.RawIOBase):
    def readable(self):
        return True
    def readinto(self, room):
        stick()
if {at!r} == "write":
    journal._write = write
else:
    input_file._opened = lambda path: io.BufferedReader(Stuck())
sys.argv = ["penstock", "serve", "some/model", "--port", "0", "--served-model-name", "fake", "--state-dir", {state!r}]
from penstock.cli import main
main()
"""


@pytest.mark.parametrize(("at", "dies"), [("write", True), ("write", False), ("read", False)])
def test_a_disk_that_does_not_answer_holds_no_end_up(tmp_path: Path, at: str, dies: bool) -> None:
    """A thread writes a batch's rows for ever: a second signal ends the process all the same, and an engine's death.
    One that reads holds nothing up: nothing of it has to be brought to an end."""
    state = str(tmp_path / "state")
    script = STUCK.format(tests=SUPPORT, folder=str(tmp_path), state=state, at=at, dies=dies)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with openai.OpenAI(base_url=process.stdout.readline().split()[-1], api_key="x", max_retries=0) as client:
        body = {"model": "fake", "prompt": "a"}
        row = json.dumps({"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": body})
        file_id = client.files.create(file=("in", row.encode()), purpose="batch").id
        client.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h")
    assert process.stdout.readline() == "sticks\n"
    if not dies:
        os.kill(process.pid, signal.SIGTERM)
    if at == "write" and not dies:
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (1 if dies else 0)
    if at == "read":
        assert err == ""
        return
    assert err.startswith("penstock: the state folder's disk takes too long") and "Traceback" not in err


def test_who_goes_away_while_it_is_tokenised_leaves_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun goes on in the sandbox, of which there are few; what wasn't is dropped with its text."""
    going, tokenizer = threading.Event(), server.engine.tokenizer
    assert tokenizer is not None
    plain = tokenizer.encode_batch

    def encode(texts: list[str], **more: Any) -> list[list[int]]:
        going.wait(30)
        return plain(texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    connection = send_raw(server, {"prompt": "x" * 10_000, "truncate_prompt_tokens": 9})
    server.wait_for(lambda: server.service.request_limits.reqs.total == 1)
    connection.close()
    late = httpx.post(
        server.url + COMPLETIONS, json={"prompt": "x" * 10_000, "truncate_prompt_tokens": 9, "timeout": 0.1}, timeout=30
    )
    assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout"), late.text
    server.wait_for(lambda: server.service.request_limits.reqs.total == server.service.request_limits.tokens.total == 0)
    going.set()
    assert not server.engine.submitted


def test_a_port_in_use_is_said_before_anything_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = Serving(tmp_path, port=port).end()
    assert status == 2 and err == ""
    assert out == f"error: cannot serve on 127.0.0.1 port {port} (Address already in use): give another --port\n"


def test_hosts_and_ports_that_cannot_be() -> None:
    import penstock.server.process.serve as room

    for host, port in (("127.0.0.1", 65_536), ("127.0.0.1", -1), ("no such host", 0), ("", -1)):
        with pytest.raises(UsageError):
            room.bind(host, port)
    with pytest.raises(CapacityError):
        room.bind("203.0.113.7", 0)
    with room.bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_until_gone_ends_its_work_before_it_raises() -> None:
    from penstock.server.online.active_call import ClientGoneError, until_gone

    async def run() -> list[str]:
        seen: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                seen.append("ended")

        async def receive() -> dict[str, str]:
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGoneError):
            await until_gone(work(), receive, asyncio.Event())
        return seen

    assert asyncio.run(run()) == ["ended"]
