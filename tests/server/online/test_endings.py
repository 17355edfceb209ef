"""How exchanges and servers end: clients that go away, an engine that dies, a shutdown, a port, a
signal, work that never comes back. Whole services that end under load are test_deaths'."""

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
from bare_http import COMPLETIONS, connect, read_one, request
from server_fake import Running, make_tokenizer, running_server

from penstock.errors import CapacityError, UsageError
from penstock.server.api_server.port import bind
from penstock.server.api_server.shutdown import signals

pytestmark = pytest.mark.torch

SUPPORT = str(Path(server_fake.__file__).parent)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running_server(make_tokenizer(tmp_path)) as running:
        yield running


@pytest.fixture
def asking(server: Running) -> Iterator[Any]:
    """A plain request in a thread of its own; what it gives is called when its answer is wanted."""
    threads = []

    def ask(**body: Any) -> Any:
        answers: list[httpx.Response] = []
        body = {"prompt": "x", **body}
        threads.append(
            threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=600)))
        )
        threads[-1].start()
        return lambda thread=threads[-1]: thread.join(600) or answers[0]

    url = server.url + COMPLETIONS
    yield ask
    for thread in threads:
        thread.join(600)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
def test_a_client_that_goes_away_frees_its_streams(
    server: Running, stream: bool, prompt: Any
) -> None:
    """Cut at any moment: test_overload."""
    server.hold(True)
    count = 1 if isinstance(prompt, str) else 3
    with connect(server.url) as connection:
        connection.sendall(request({"prompt": prompt, "n": 2, "max_tokens": 5, "stream": stream}))
        server.wait_for(lambda: len(server.engine.open) == count)
    server.wait_for(lambda: not server.engine.open)
    assert (
        all(made.cancelled for made in server.engine.submitted)
        and len(server.engine.submitted) == count
    )
    server.hold(False)
    assert (
        httpx.post(
            server.url + COMPLETIONS, json={"prompt": ["x", "y"], "stream": stream}
        ).status_code
        == 200
    )
    assert not any(made.cancelled for made in server.engine.submitted[count:]), (
        "what is finished is not cancelled"
    )


def test_a_later_prompt_that_cannot_be_submitted_cancels_the_earlier(server: Running) -> None:
    plain = server.engine.submit

    def second_fails(ids: list[int], sampling: Any, *, stream: bool, **more: Any) -> Any:
        if server.engine.submitted:
            raise UsageError("no more of these", param="prompt")
        return plain(ids, sampling, stream=stream, **more)

    server.engine.submit = second_fails  # type: ignore[method-assign]
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": ["x", "y"]})
    assert (
        answer.status_code == 400
        and server.engine.submitted[0].cancelled
        and not server.engine.open
    )


def test_a_dead_engine_ends_who_waits_and_who_comes(server: Running, asking: Any) -> None:
    server.hold(True)
    whole, streamed = asking(), asking(stream=True)
    server.wait_for(lambda: len(server.engine.open) == 2)
    server.engine.alive = False
    server.hold(False)
    assert whole().status_code == 500 and whole().json()["error"]["code"] == "engine_dead"
    assert "told to" not in whole().text + streamed().text, "the engine's own words are for the log"
    assert (
        streamed().status_code == 200
        and '"engine_dead"' in streamed().text
        and "[DONE]" not in streamed().text
    )
    for path, status in (("/health/ready", 503), ("/health", 503), ("/health/live", 200)):
        assert httpx.get(server.url + path).status_code == status
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
    assert (
        'finished_reason="numerical_error",model_name="fake"} 2.0'
        in httpx.get(server.url + "/metrics").text
    )


def test_a_shutdown_tells_who_waits(server: Running, asking: Any) -> None:
    server.hold(True)
    waiter = asking()
    server.wait_for(lambda: server.engine.open)
    server.loop.call_soon_threadsafe(server.service.close)
    assert waiter().status_code == 503 and waiter().json()["error"]["code"] == "shutting_down"
    assert not server.engine.open and httpx.get(server.url + "/health/ready").status_code == 503


@pytest.mark.parametrize("more_comes", [False, True])
def test_a_shutdown_tells_who_still_sends_a_body(server: Running, more_comes: bool) -> None:
    with connect(server.url) as sender:
        sender.sendall(request(b"{", "content-length: 9000"))
        server.wait_for(lambda: server.service.intake.receiving.bytes == 1)
        server.loop.call_soon_threadsafe(server.service.close)
        if more_comes:
            sender.sendall(b" ")
        head, body = read_one(sender)
        assert head.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in body
    assert (
        httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).json()["error"]["code"]
        == "shutting_down"
    )


def test_a_fault_of_ours_is_a_500_in_shape(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    server.engine.submit = broken  # type: ignore[method-assign]
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "x"})
    assert (
        answer.status_code == 500
        and answer.json()["error"]["code"] == "internal"
        and "secret" not in answer.text
    )
    # Logged behind the answer, so it may come a moment later.
    server.wait_for(
        lambda: any(r.exc_info and r.exc_info[0] is ZeroDivisionError for r in caplog.records)
    )


def test_who_goes_away_while_it_is_tokenised_leaves_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun goes on in the sandbox, of which there are few; what wasn't is dropped with
    its text."""
    going, tokenizer = threading.Event(), server.engine.tokenizer
    assert tokenizer is not None
    plain = tokenizer.encode_batch

    def encode(texts: list[str], **more: Any) -> list[list[int]]:
        going.wait(600)
        return plain(texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    long, limits = (
        {"prompt": "x" * 10_000, "truncate_prompt_tokens": 9},
        server.service.request_limits,
    )
    with connect(server.url) as connection:
        connection.sendall(request(long))
        server.wait_for(lambda: limits.reqs.total == 1)
    late = httpx.post(server.url + COMPLETIONS, json={**long, "timeout": 0.1}, timeout=600)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout"), late.text
    server.wait_for(lambda: limits.reqs.total == limits.tokens.total == 0)
    going.set()
    assert not server.engine.submitted


# -- serve(): a process of its own, its engine a fake one

SERVE = """
import asyncio, json, sys, threading, types
from pathlib import Path
how = json.loads(sys.argv[1])
sys.path.insert(0, how["support"])
from server_fake import FakeEngine, make_tokenizer
LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
made = []
async def launch(config, engine, step_timeout):
    print("loading", flush=True)
    await asyncio.sleep(how.get("load", 0))
    tokenizer = make_tokenizer(Path(how["folder"]), **({"template": LOOPS} if how.get("busy") else {}))
    made.append(FakeEngine(tokenizer))
    loop, broken = asyncio.get_running_loop(), asyncio.Event()
    async def held():
        made[0].going.clear()
        while not Path(how["held"]).exists():
            await asyncio.sleep(0.01)
        made[0].going.set()
    if how.get("held"):
        made.append(asyncio.ensure_future(held()))
    async def breaks(*_, **__):
        if how.get("busy"):
            await broken.wait()
        raise RuntimeError("uvicorn broke")
    if how.get("harm"):
        import penstock.server.api_server.site as room
        setattr(room._Server, how["harm"], breaks)
    def works():
        print("works", flush=True)
        if how["busy"] == "dies":
            loop.call_soon_threadsafe(setattr, made[0], "alive", False)
        elif how["busy"] == "breaks":
            loop.call_soon_threadsafe(broken.set)
    def stop_strings(stops, **more):
        works()
        threading.Event().wait()
    if how.get("busy"):
        from penstock.sandbox.sandbox import Sandbox
        begin, tokenizer.stop_strings = Sandbox.begin, stop_strings
        def begin_and_say(sandbox, job):
            works()
            return begin(sandbox, job)
        Sandbox.begin = begin_and_say
    return made[0]
sys.modules["penstock.engine.launch"] = types.SimpleNamespace(launch=launch, ENGINE=())  # so that no torch is loaded
sys.argv = ["penstock", "serve", "some/model", "--served-model-name", "fake", *how["options"]]
from penstock.cli import main
main()
"""


class Serving:
    """load: the engine's seconds. held: a file until which it gives nothing. harm: a method of
    uvicorn's server that breaks. busy: what becomes of it while a text takes for ever; of a disk
    that does, test_ends tells."""

    def __init__(self, folder: Path, *options: str, port: int = 0, **how: Any) -> None:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how.pop("streams", {})}
        said = {
            "support": SUPPORT,
            "folder": str(folder),
            "options": ["--port", str(port), *options],
            **how,
        }
        command = [sys.executable, "-c", SERVE, json.dumps(said)]
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
        try:
            out, err = self.process.communicate(timeout=600)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_asks_once_and_under_nohup_not_at_all(ignored: bool) -> None:
    async def hear() -> None:
        with signals() as stop:
            for _ in range(3):
                signal.raise_signal(signal.SIGHUP)
            if ignored:
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(stop.first.wait(), 600)
            assert not stop.second.is_set()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(stop.second.wait(), 600)

    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda number, frame: None)
    try:
        asyncio.run(hear())
    finally:
        signal.signal(signal.SIGHUP, usual)


def broken_streams(how: str) -> dict[str, Any]:
    """Standard output and error that take nothing, as Popen is told: full, closed, or pipes that
    nobody reads."""
    if how == "closed":
        return {
            "stdout": None,
            "stderr": None,
            "preexec_fn": lambda: [os.close(number) for number in range(3)],
        }
    if how == "left":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    return {"stdout": write, "stderr": write}


@pytest.mark.parametrize("how", ["full", "closed", "left"])
def test_streams_that_take_nothing_end_no_server_and_no_drain(tmp_path: Path, how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    streams = broken_streams(how)
    go_on = tmp_path / "go on"
    serving = Serving(tmp_path, port=port, held=str(go_on), streams=streams)
    if streams["stdout"] is not None:
        os.close(streams["stdout"])
    url, answers = f"http://127.0.0.1:{port}", []
    while not ready(url):
        assert serving.process.poll() is None
        time.sleep(0.02)
    waiter = threading.Thread(
        target=lambda: answers.append(
            httpx.post(url + COMPLETIONS, json={"prompt": "x"}, timeout=600)
        )
    )
    waiter.start()
    while 'num_requests_running{model_name="fake"} 1.0' not in httpx.get(url + "/metrics").text:
        pass
    serving.process.send_signal(signal.SIGTERM)
    go_on.touch()
    serving.end()
    waiter.join(600)
    assert answers[0].status_code == 200 and serving.process.returncode == 0


def ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/health").status_code == 200
    return False


def test_a_signal_while_loading(tmp_path: Path) -> None:
    serving = Serving(tmp_path, load=1000)
    assert serving.line() == "loading"
    assert serving.end(signal.SIGTERM) == (0, "", "")


def test_a_server_that_breaks_as_it_starts_says_so(tmp_path: Path) -> None:
    """Later: test_work_aside_holds_no_end_up."""
    status, out, err = Serving(tmp_path, harm="startup").end()
    assert (
        status == 1
        and err.endswith("RuntimeError: uvicorn broke\n")
        and "penstock serves" not in out
    )


@pytest.mark.parametrize(
    ("end", "where"), [("signal", "thread"), ("dies", "sandbox"), ("breaks", "sandbox")]
)
def test_work_aside_holds_no_end_up(tmp_path: Path, end: str, where: str) -> None:
    """It never ends here; who waits for it hears of the end all the same, but where the server
    itself broke."""
    asked: tuple[str, dict[str, Any]] = (COMPLETIONS, {"prompt": "x", "stop": ["y"]})
    if where == "sandbox":
        asked = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    serving = Serving(
        tmp_path, "--shutdown-timeout", "0", busy=end, harm="main_loop" if end == "breaks" else ""
    )
    url, answers = serving.url(), []

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            answers.append(httpx.post(url + asked[0], json=asked[1], timeout=600))

    waiter = threading.Thread(target=ask)
    waiter.start()
    assert serving.line() == "works"
    status, _, err = serving.end(signal.SIGTERM if end == "signal" else None)
    waiter.join(600)
    if end == "breaks":
        assert status == 1 and err.endswith("RuntimeError: uvicorn broke\n")
        return
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
    begun, last = err.splitlines()[:2], err.splitlines()[2]
    assert [line.split()[1] for line in begun] == ["fake:", "listens"]
    if end == "dies":
        assert status == 1 and last.startswith("penstock: the engine died while serving")
    else:
        assert status == 0 and last.startswith(
            "penstock: lets 1 running request end, for 0 s at most;"
        )
        assert err.count("\n") == 3


def test_a_port_in_use_is_said_before_anything_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = Serving(tmp_path, port=port).end()
    said = f"cannot serve on 127.0.0.1 port {port} (Address already in use): give another --port\n"
    assert (status, out) == (2, "") and err.endswith(said) and err.count("\n") == 1


def test_hosts_and_ports_that_cannot_be() -> None:
    for host, port in (("127.0.0.1", 65_536), ("127.0.0.1", -1), ("no such host", 0), ("", -1)):
        with pytest.raises(UsageError):
            bind(host, port)
    with pytest.raises(CapacityError):
        bind("203.0.113.7", 0)
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
