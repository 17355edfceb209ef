"""The load against servers that behave and servers that don't: each outcome by name, open and
closed loops, windows."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from growing_patience import patiently
from hostile_server import SENDS, HostileServer
from timed_server import Draw, TimedPlan, timed_server

from penstock.almanac.samples import Samples
from penstock.bench import worker_pool
from penstock.bench.endpoint import Endpoint, target_of
from penstock.bench.run_load import ClientReport, run_load, shares
from penstock.bench.worker_pool import WorkerProcess
from penstock.bench.worker_protocol import Load, PlannedRequest
from penstock.errors import EngineError, UsageError

EXPECTED = {
    "status": ["503", "500 without a length", "an error in the stream"],
    "cut": [
        "closed at once",
        "closed after two events",
        "ended after two events",
        "ended within a line",
    ],
    "broken": [
        "garbage",
        "a page",
        "a line of nothing",
        "no JSON",
        "no UTF-8",
        "a deep one",
        "a list",
        "text that is a number",
        "an event after DONE",
        "a bad chunk",
        "an endless line",
        "an endless head",
        "heads without end",
        "an endless trailer",
        "continue without end",
    ],
    "usage": [
        "events without end",
        "no usage",
        "fewer tokens than events",
        "a wrong sum",
        "more cached than sent",
        "a negative usage",
        "a usage of words",
        "a usage past all ends",
        "tokens without events",
    ],
    "length": ["more out than asked", "fewer out than asked", "another prompt"],
}
GOOD = [name for name in SENDS if name.startswith("good")] + [
    "good, byte by byte",
    "good, in pieces of 7",
]


def asks_for(names: list[str], intended: float = 0.0) -> list[PlannedRequest]:
    return [PlannedRequest(intended, json.dumps({"behave": name}).encode(), 4, 3) for name in names]


def load_of(asks: list[PlannedRequest], **changed: object) -> Load:
    return Load(
        **{
            "asks": asks,
            "closed": None,
            "stop_after": 600.0,
            "stall": 600.0,
            "window": (0.0, 600.0),
            **changed,
        }
    )


def sent(target: Endpoint, load: Load, processes: int = 1) -> tuple[Samples, ClientReport]:
    return run_load(target, load, point="p", start=2, processes=processes, progress=None)


# --- what servers do


def test_every_fault_of_a_server_is_told_by_its_word() -> None:
    """One load that meets them all; the good ones beside them are whole, however they are framed
    and chopped."""
    names = [name for group in EXPECTED.values() for name in group] + GOOD
    with HostileServer() as server:
        samples, seen = sent(target_of(server.url), load_of(asks_for(names)), 2)
    found = dict(zip(names, samples.outcome, strict=True))
    expected = {name: word for word, group in EXPECTED.items() for name in group} | dict.fromkeys(
        GOOD, "ok"
    )
    assert found == expected
    assert set(seen.troubles) == set(EXPECTED)
    good = samples.of(samples.outcome == "ok")
    assert good.events.tolist() == [3] * len(GOOD) and all(len(gaps) == 2 for gaps in good.gaps)
    assert (
        (good.prompt_tokens == 4).all()
        and (good.output_tokens == 3).all()
        and (good.cached_tokens == 2).all()
    )
    assert (
        (good.first <= good.end).all()
        and (good.intended <= good.actual).all()
        and (good.actual < good.first).all()
    )


def test_a_silent_server_is_told_with_what_came_before() -> None:
    def trial(stall: float) -> Samples:
        asks = asks_for(["nothing", "nothing after two events"])
        with HostileServer() as server:
            samples, seen = sent(target_of(server.url), load_of(asks, stall=stall))
        assert samples.outcome.tolist() == ["stalled"] * 2
        assert f"no byte for {stall:g} s" in seen.troubles["stalled"]
        assert samples.events.tolist() == [0, 2] and samples.prompt_tokens[1] == -1
        assert samples.end[1] - samples.first[1] > stall
        return samples

    patiently(trial)


def test_a_server_that_cannot_be_reached_refuses_every_ask() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        samples, seen = sent(target_of(f"127.0.0.1:{port}"), load_of(asks_for(["good"] * 3)))
    assert samples.outcome.tolist() == ["refused"] * 3 and np.isnan(samples.actual).all()
    assert f"no connection to 127.0.0.1:{port}" in seen.troubles["refused"]
    samples, seen = sent(target_of("http://no.such.host.invalid"), load_of(asks_for(["good"])))
    assert (
        samples.outcome.tolist() == ["refused"]
        and "no.such.host.invalid" in seen.troubles["refused"]
    )


def test_connections_are_kept_and_carry_the_key() -> None:
    with HostileServer() as server:
        target = target_of(server.url, api_key="secret")
        samples, _ = sent(target, load_of(asks_for(["good"] * 3, math.nan), closed=1))
    assert samples.outcome.tolist() == ["ok"] * 3 and server.connections == 1
    assert all(b"authorization: Bearer secret" in head for head in server.seen)


def test_https_is_spoken_and_a_stranger_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj"
        " /CN=localhost -addext"
    )
    command = [
        "openssl",
        *words.split(),
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with HostileServer(tls=context) as server:
        stranger, seen = sent(target_of(server.url), load_of(asks_for(["good"])))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusted, _ = sent(target_of(server.url), load_of(asks_for(["good"] * 2)))
    assert trusted.outcome.tolist() == ["ok"] * 2 and trusted.events.tolist() == [3, 3]
    assert (
        stranger.outcome.tolist() == ["refused"]
        and "certificate" in seen.troubles["refused"].lower()
    )


# --- when requests go


def body(tokens: int) -> bytes:
    return json.dumps({"prompt": [1, 2, 3, 4], "max_tokens": tokens, "stream": True}).encode()


def test_an_open_loop_waits_for_no_answer() -> None:
    """All are sent before the first is answered, in order of the plan: the server answers none
    before it has all."""
    asks = [ask for at in (5, 3, 1, 4, 2, 0) for ask in asks_for(["good"], 0.01 * at)]
    with HostileServer(crowd=6) as server:
        samples, _ = sent(target_of(server.url), load_of(asks), 2)
    assert samples.outcome.tolist() == ["ok"] * 6
    assert np.allclose(samples.intended, np.arange(6) * 0.01, atol=1e-9)
    assert samples.actual.max() <= samples.first.min()
    assert (samples.actual >= samples.intended).all()
    assert (samples.start == 2).all() and set(samples.point) == {"p"}


def test_a_closed_loop_sends_when_a_slot_is_free() -> None:
    asks = [PlannedRequest(math.nan, body(4), 4, 4) for _ in range(23)]
    with timed_server(
        TimedPlan(first=Draw("exponential", 0.015), gap=Draw("exponential", 0.004), seed=1)
    ) as server:
        samples, _ = sent(target_of(f"127.0.0.1:{server.port}"), load_of(asks, closed=5), 2)
    assert (
        len(samples) == 23 and set(samples.outcome) == {"ok"} and (samples.intended[:5] == 0).all()
    )
    assert set(samples.intended[5:]) <= set(samples.end)
    # By the intended times five run at once. A busy machine may send one after another has ended.
    for begins, most in ((samples.intended, [5]), (samples.actual, [1, 2, 3, 4, 5])):
        steps = sorted([(at, 1) for at in begins] + [(at, -1) for at in samples.end])
        assert max(np.cumsum([step for _, step in steps])) in most


def test_what_has_not_ended_in_time_is_unfinished_and_what_was_not_due_has_no_line() -> None:
    def trial(stop_after: float) -> None:
        asks = [PlannedRequest(at, body(10**6), 4, 10**6) for at in (0.0, 0.1, 1e6)]
        with timed_server(TimedPlan(gap=Draw("fixed", 0.01))) as server:
            target = target_of(f"127.0.0.1:{server.port}")
            samples, _ = sent(target, load_of(asks, stop_after=stop_after))
        assert samples.outcome.tolist() == ["unfinished"] * 2 and (samples.events > 0).all()
        assert (samples.output_tokens == -1).all()

    patiently(trial)


# --- what the client says of itself


def seen_with(**changed: object) -> ClientReport:
    fine = {
        "lag_p99": 0.001,
        "busy": 0.2,
        "late_p99": 0.001,
        "late_limit": 0.005,
        "events_per_second": 1000.0,
        "requests_per_second": 10.0,
        "cpu": 1.0,
        "seconds": 5.0,
        "begin": 0.0,
    }
    return ClientReport(**{**fine, **changed})


def test_a_client_that_was_short_says_so() -> None:
    assert not seen_with().look(None, None).short and seen_with().look(None, None).headroom is None
    assert (
        seen_with(busy=0.6).look(None, None).short
        and not seen_with(busy=0.6).look(50_000.0, 1000.0).short
    )
    assert (
        seen_with().look(50_000.0, 15.0).headroom == pytest.approx(1.5)
        and seen_with().look(50_000.0, 15.0).short
    )
    assert seen_with(lag_p99=0.006).look(50_000.0, 1000.0).short
    assert seen_with(late_p99=0.006).look(50_000.0, 1000.0).short
    assert not seen_with(late_p99=0.006, late_limit=0.05).look(50_000.0, 1000.0).short


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("localhost:8000", "http://localhost:8000/v1/completions"),
        ("http://h", "http://h:80/v1/completions"),
        ("https://h/v1/", "https://h:443/v1/completions"),
        ("https://h:1/proxy", "https://h:1/proxy/v1/completions"),
        ("http://[::1]:8/v1/chat/completions", "http://[::1]:8/v1/chat/completions"),
    ],
)
def test_targets_are_read_from_what_users_type(url: str, whole: str) -> None:
    assert target_of(url).url == whole


def test_nothing_is_smuggled_into_a_head() -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        Endpoint("h", 1, api_key="a\r\nb: c")
    with pytest.raises(UsageError, match="no path"):
        Endpoint("h", 1, path="/a b")


# --- client processes


def test_asks_are_shared_out_and_none_is_lost() -> None:
    load = load_of(asks_for(["good"] * 11), closed=5)
    for count in (1, 2, 3, 9):
        specs = shares(target_of("h"), load, count)
        assert len(specs) == min(count, 5) and sum(spec.load.closed or 0 for spec in specs) == 5
        assert sorted(number for spec in specs for number in spec.number) == list(range(11))
        assert sum(spec.connections for spec in specs) == 5


def test_a_client_process_that_dies_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[WorkerProcess] = []
    real = worker_pool.start_worker
    monkeypatch.setattr(worker_pool, "start_worker", lambda: started.append(real()) or started[-1])

    def kill(_: object) -> None:
        started[0].errors.write(b"trace\nno more memory\n")
        started[0].errors.flush()
        started[0].process.kill()

    load = load_of(asks_for(["nothing"] * 2))
    with (
        HostileServer() as server,
        pytest.raises(EngineError, match="was killed by signal 9: no more memory"),
    ):
        run_load(target_of(server.url), load, point="p", start=0, processes=2, progress=kill)


WORKER = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
    " time.sleep(600)"
)
SERVER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
while True:
    time.sleep(1)
"""


def test_a_worker_that_heeds_no_signal_ends_with_the_server_of_a_killed_run() -> None:
    """The run is gone: its pipe ends. The worker holds the guard's stdout open for as long as it
    lives."""
    held = [sys.executable, "-m", "penstock.bench.process_guard", "all"]
    command = [*held, sys.executable, "-c", SERVER, WORKER]
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert guard.stdout is not None and guard.stdout.readline() == b"up\n"
        guard.communicate(timeout=600)  # closes the pipe; ends when nobody is left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
