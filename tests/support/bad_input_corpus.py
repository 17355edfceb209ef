"""Bad inputs, made by hand: the bytes that are sent, and the status that each must have. test_bad_input_corpus.py and
the reliability harness send them.

A case's bytes are its request line, headers and body. Where they show, CANARY and NUMBER stand for what a client may
hold secret: no answer may say them again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CANARY = "zq7canary"
NUMBER = 81_920_373  # a canary too
COMPLETIONS, CHAT, BATCHES, FILES = "/v1/completions", "/v1/chat/completions", "/v1/batches", "/v1/files"
CONTEXT = 256  # tokens of the fake model, whose vocabulary has as many
MAX_BODY = 1_000_000  # bytes: the limit that the server under test is given


@dataclass(frozen=True)
class Case:
    """param: what the error must name; `...` where that is not fixed."""

    name: str
    data: bytes
    status: int
    param: Any = ...
    code: Any = ...


def request(path: str, body: bytes = b"", method: str = "POST", headers: tuple[str, ...] = ()) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + body


def _raw(name: str, body: bytes, code: str | None = "invalid_json", param: Any = None) -> list[Case]:
    """A body that is no form on either route."""
    return [Case(f"{route[4:]}: {name}", request(route, body), 400, param, code) for route in (COMPLETIONS, CHAT)]


def _completion(status: int, param: Any, code: Any = ..., **fields: Any) -> Case:
    body = json.dumps({"prompt": "x", **fields}).encode()
    return Case(f"completion {str(fields)[:70]}", request(COMPLETIONS, body), status, param, code)


def _text(status: int, param: Any, more: bytes, code: Any = ...) -> Case:
    """A completion's fields as they stand on the wire."""
    return Case(
        f"completion {more[:60]!r}", request(COMPLETIONS, b'{"prompt": "x", ' + more + b"}"), status, param, code
    )


def _chat(status: int, param: Any, code: Any = ..., **fields: Any) -> Case:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}).encode()
    return Case(f"chat {str(fields)[:70]}", request(CHAT, body), status, param, code)


def _get(path: str, status: int, code: Any = ..., method: str = "GET") -> Case:
    return Case(f"{method} {path[:70]}", request(path, method=method), status, ..., code)


def _no_json() -> list[Case]:
    bodies = {
        "nothing": b"",
        "a space": b" ",
        "an open brace": b"{",
        "a word": b"nonsense",
        "a lone quote": b'"',
        "null": b"null",
        "a list": b"[]",
        "text": b'"x"',
        "a number": b"7",
        "true": b"true",
        "NaN alone": b"NaN",
        "two objects": b"{}{}",
        "behind it": b'{"prompt": "x"} trailing',
        "a BOM": b"\xef\xbb\xbf{}",
        "NUL": b"\x00",
        "single quotes": b"{'prompt': 'x'}",
        "a comma at the end": b'{"prompt": "x",}',
        "no colon": b'{"prompt" "x"}',
        "a comment": b'{"prompt": "x" /* y */}',
        "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
        "bytes": b"\xff\xfe\xfd",
        "UTF-8 cut short": b'{"prompt": "\xe2\x82"}',
        "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
        "a surrogate as UTF-8": b'{"prompt": "\xed\xa0\x80"}',
        "beyond Unicode": b'{"prompt": "\xf5\x80\x80\x80"}',
        "a high surrogate": b'{"prompt": "\\ud800"}',
        "a low surrogate": b'{"prompt": "\\udc00"}',
        "two high surrogates": b'{"prompt": "\\ud800\\ud800"}',
        "a surrogate as a name": b'{"\\ud800": 1}',
        "a raw NUL in text": b'{"prompt": "\x00"}',
        "a raw line end in text": b'{"prompt": "\n"}',
        "a bad escape": b'{"prompt": "\\x41"}',
        "half an escape": b'{"prompt": "\\u12"}',
        "NaN": b'{"temperature": NaN}',
        "Infinity": b'{"temperature": Infinity}',
        "minus Infinity": b'{"temperature": -Infinity}',
        "a leading zero": b'{"n": 01}',
        "a plus": b'{"n": +1}',
        "hexadecimal": b'{"n": 0x10}',
        "half a number": b'{"n": 1.}',
        "100,000 open lists": b"[" * 100_000,
        "50,000 open objects": b'{"a":' * 50_000,
        "a form": b"prompt=x&n=1",
        "multipart": b'--b\r\ncontent-disposition: form-data; name="prompt"\r\n\r\nx\r\n--b--',
        "zipped": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab\xae\x05\x00C\xbf\xa6\xa3\x02\x00\x00\x00",
    }
    cases = [case for name, body in bodies.items() for case in _raw(name, body)]
    for name, body in {
        "n of 1e400": b'{"prompt": "x", "n": 1e400}',
        "n of -1e400": b'{"prompt": "x", "n": -1e400}',
        "n of 5,000 digits": b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
        "temperature of 1e999999": b'{"prompt": "x", "temperature": 1e999999}',
        "seed of 100,000 digits": b'{"prompt": "x", "seed": -' + b"1" * 100_000 + b"}",
        "a list of huge numbers": b'{"prompt": [' + b"9" * 5000 + b"," + b"9" * 5000 + b"]}",
    }.items():
        cases += _raw(name, body, None, ...)
    return cases


def _fields() -> list[Case]:
    far, long = 10**30, CANARY * 2000
    return [
        *(
            _completion(400, "prompt", prompt=prompt)
            for prompt in (
                None,
                7,
                1.5,
                True,
                {},
                {"text": CANARY},
                "",
                [],
                [[]],
                [""],
                ["a", 1],
                ["a", [1]],
                [[1], []],
                [1, True],
                [1.5],
                [[1, CANARY]],
                [256],
                [-1],
                [far],
                [[0], [10**9]],
                [None],
                [[None]],
                [[[1]]],
                [{}],
                [1] * CONTEXT,
                "x" * CONTEXT,
                CANARY * 1000,
                ["x", "y" * CONTEXT],
                [[1] * CONTEXT, [1]],
            )
        ),
        Case("completion without prompt", request(COMPLETIONS, b'{"n": 1}'), 400, "prompt"),
        *(_completion(400, "n", n=n) for n in (0, -1, 65_537, 2**63 - 1, far, 1.5, "1", CANARY, True, [1], {}, 1e300)),
        _completion(400, "n", n=65_536, prompt=["a", "b"]),
        *(_completion(400, "max_tokens", max_tokens=value) for value in (0, -1, CANARY, 1.5, [], far)),
        *(_completion(400, "min_tokens", min_tokens=value) for value in (-1, 17, 2**62, CANARY)),
        _completion(400, "min_tokens", min_tokens=CONTEXT, max_tokens=2**62),
        *(_completion(400, "temperature", temperature=value) for value in (-0.1, 100.1, 1e300, CANARY, [1], True)),
        _text(400, ..., b'"temperature": 1e309'),
        _text(400, ..., b'"temperature": -1e400'),
        *(_completion(400, "top_p", top_p=value) for value in (0, -1, 1.0001, CANARY)),
        *(_completion(400, "top_k", top_k=value) for value in (-2, 0.5, CANARY, -(2**62))),
        *(_completion(400, "min_p", min_p=value) for value in (-1, 2)),
        *(_completion(400, "repetition_penalty", repetition_penalty=value) for value in (0, -1, 1e-38, 9e-7, 101)),
        _completion(400, "presence_penalty", presence_penalty=2.1),
        _completion(400, "frequency_penalty", frequency_penalty=-3),
        *(_completion(400, "seed", seed=value) for value in (2**63, -(2**63) - 1, 1.5, CANARY)),
        *(
            _completion(400, param, stop=value)
            for value, param in (
                ("", "stop"),
                (["a", ""], "stop"),
                (7, "stop"),
                ([7], "stop[0]"),
                ({}, "stop"),
                ([CANARY] * 65, "stop"),
                (["s" * 32] * 65, "stop"),
                (["s" * 1025, "t" * 1024], "stop"),
                (long, "stop"),
                ([long], "stop"),
            )
        ),
        *(
            _completion(400, param, stop_token_ids=value)
            for value, param in (
                ([-1], "stop_token_ids"),
                ([256], "stop_token_ids"),
                (3, "stop_token_ids"),
                ([CANARY], "stop_token_ids[0]"),
                ([1] * 70_000, "stop_token_ids"),
            )
        ),
        *(
            _completion(400, "logit_bias", logit_bias=value)
            for value in (
                {CANARY: 1},
                {"256": 1},
                {"-1": 1},
                {"1": 101},
                {"٣": 1},
                {"9" * 5000: 1},
                [],
                {" 1": 1},
                {"1_0": 1},
                {"": 1},
            )
        ),
        _completion(400, ..., logit_bias={"1": None}),
        _completion(400, ..., logit_bias={"1": CANARY}),
        _text(400, ..., b'"logit_bias": {"1": 1e400}'),
        *(_completion(400, "logprobs", logprobs=value) for value in (21, -1, True, CANARY)),
        _completion(400, "prompt_logprobs", prompt_logprobs=21),
        _completion(400, "prompt_logprobs", prompt_logprobs=1, stream=True),
        _completion(400, "best_of", best_of=2),
        _completion(400, "echo", echo=CANARY),
        _completion(400, "echo", echo=1),
        *(_completion(400, "stream", stream=value) for value in (1, "true", CANARY, [])),
        _completion(400, "stream_options", stream_options={"include_usage": True}),
        _completion(400, "stream_options", stream=True, stream_options=CANARY),
        _completion(400, f"stream_options.{CANARY}", stream=True, stream_options={CANARY: 1}),
        _completion(400, "truncate_prompt_tokens", truncate_prompt_tokens=0),
        *(_completion(400, "cache_salt", cache_salt=value) for value in ("", 7, [CANARY], {}, CANARY * 1000)),
        *(_completion(400, "timeout", timeout=value) for value in (0, -1, 1e12, CANARY, True)),
        _completion(400, "unheard_of", "unknown_parameter", unheard_of=CANARY),
        _completion(400, "__proto__", "unknown_parameter", __proto__={"n": 2}),
        _completion(400, "", "unknown_parameter", **{"": CANARY}),
        _completion(400, "\x00", "unknown_parameter", **{"\x00": CANARY}),
        *(
            _completion(400, name, "unsupported_parameter", **{name: value})
            for name, value in (
                ("suffix", CANARY),
                ("guided_json", {}),
                ("guided_regex", CANARY),
                ("structured_outputs", {"regex": CANARY}),
                ("logits_processors", ["os.system"]),
                ("prompt_embeds", CANARY),
                ("use_beam_search", True),
                ("response_format", {"type": CANARY}),
                ("service_tier", CANARY),
                ("store", True),
                ("priority", 1),
                ("bad_words", [CANARY]),
                ("vllm_xargs", {CANARY: 1}),
                ("kv_transfer_params", {CANARY: {}}),
                ("request_id", CANARY),
            )
        ),
        _completion(404, "model", "model_not_found", model=CANARY),
        _completion(400, "model", model=7),
        _completion(404, "model", "model_not_found", model="../../etc/passwd"),
        Case("a body above the limit", request(COMPLETIONS, b'{"prompt": "' + b"x" * MAX_BODY + b'"}'), 413, None),
        Case("one that says so", request(COMPLETIONS, b"", headers=("content-length: 99999999999",)), 413, None),
    ]


def _numbers() -> list[Case]:
    """Values that an error could say again: each is wrong by its size alone."""
    return [
        _completion(400, "n", n=NUMBER),
        _completion(400, "max_tokens", max_tokens=-NUMBER),
        _completion(400, "min_tokens", min_tokens=NUMBER, max_tokens=NUMBER),
        _completion(400, "min_tokens", min_tokens=-NUMBER),
        _completion(400, "temperature", temperature=NUMBER + 0.5),
        _completion(400, "top_p", top_p=-NUMBER),
        _completion(400, "top_k", top_k=-NUMBER),
        _completion(400, "min_p", min_p=NUMBER),
        _completion(400, "repetition_penalty", repetition_penalty=-NUMBER),
        _completion(400, "presence_penalty", presence_penalty=NUMBER),
        _completion(400, "frequency_penalty", frequency_penalty=-NUMBER),
        _completion(400, "seed", seed=NUMBER * 10**14),
        _completion(400, "logprobs", logprobs=NUMBER),
        _completion(400, "prompt_logprobs", prompt_logprobs=-NUMBER),
        _completion(400, "stop_token_ids", stop_token_ids=[NUMBER]),
        _completion(400, "stop_token_ids", stop_token_ids=[-NUMBER]),
        _completion(400, "logit_bias", logit_bias={str(NUMBER): 1}),
        _completion(400, "logit_bias", logit_bias={"1": NUMBER}),
        _completion(400, "best_of", best_of=NUMBER),
        _completion(400, "truncate_prompt_tokens", truncate_prompt_tokens=-NUMBER),
        _completion(400, "timeout", timeout=NUMBER),
        _completion(400, "prompt", prompt=[NUMBER]),
        _completion(400, "prompt", prompt=[[1], [-NUMBER]]),
        _completion(400, "stream", stream=NUMBER),
        _chat(400, "n", n=NUMBER),
        _chat(400, "max_tokens", max_completion_tokens=-NUMBER, max_tokens=None),
        _chat(400, "max_completion_tokens", max_completion_tokens=NUMBER),
        _chat(400, "logprobs", logprobs=True, top_logprobs=NUMBER),
        _get(f"{FILES}?limit={NUMBER}", 400),
        _get(f"{BATCHES}?limit=-{NUMBER}", 400),
    ]


def _many() -> list[Case]:
    """More of something than a body may hold, in few bytes; and what is refused by its length alone."""
    message = {"role": "user", "content": ""}
    return [
        *(_completion(400, "prompt", None, prompt=[each] * 8_193) for each in ("", "x", [1], [], None, 0.5, {})),
        _completion(400, None, None, prompt=[[1]] * 131_073),
        _completion(400, None, None, prompt=[{}] * 131_073),
        _completion(400, None, None, user={"a": [[]] * 131_073}),
        _text(400, None, b'"metadata": {"a": [' + b"{}," * 131_073 + b"{}]}", None),
        Case("lists without an end", request(COMPLETIONS, b'{"prompt": [' + b"[1]," * 140_000), 400, None, None),
        Case("open lists beyond the bound", request(COMPLETIONS, b"[" * 200_000), 400, None, None),
        Case("brackets behind a fault", request(COMPLETIONS, b'\\" [' + b"[1]," * 140_000), 400, None),
        _chat(400, "messages", None, messages=[message] * 16_385),
        _chat(400, "messages", None, messages=[None] * 16_385),
        _chat(400, None, None, messages=[{**message, "content": [{}] * 131_073}]),
        _completion(400, "n", None, n=9, prompt=["x"] * 8_192),
        _completion(400, "prompt", "context_length_exceeded", prompt=[1] * 300_000),
        _completion(400, "prompt", "context_length_exceeded", prompt=[NUMBER] * CONTEXT),  # too long, whatever it holds
        _completion(400, "prompt", "context_length_exceeded", prompt=[[1], [1] * 100_000]),
        _completion(400, "prompt", "context_length_exceeded", prompt=[1] * 1000, truncate_prompt_tokens=CONTEXT),
    ]


def _chats() -> list[Case]:
    def message(status: int, param: Any, **fields: Any) -> Case:
        return _chat(status, param, messages=[{"role": "user", "content": "hi", **fields}])

    image = {"type": "image_url", "image_url": {"url": f"http://169.254.169.254/{CANARY}"}}
    return [
        Case("chat without messages", request(CHAT, b'{"n": 1}'), 400, "messages"),
        *(_chat(400, "messages", messages=value) for value in (None, [], {}, CANARY, 7, "x" * (2 * CONTEXT))),
        *(_chat(400, ..., messages=[value]) for value in (None, CANARY, 7, [], {}, {"role": "user"}, {"content": "x"})),
        *(message(400, ..., role=value) for value in (CANARY, "", None, 7, "USER", ["user"], "system\x00")),
        *(
            message(400, ..., content=value)
            for value in (
                None,
                7,
                {},
                [CANARY],
                [{}],
                [{"type": "text"}],
                [{"text": CANARY}],
                [{"type": "text", "text": 7}],
                [image],
                [{"type": "input_audio", "input_audio": {"data": CANARY}}],
                [{"type": "text", "text": "x", CANARY[:3]: 1}],
                [{"type": "file", "file": {"file_id": "../../x"}}],
            )
        ),
        message(400, ..., name=7),
        message(400, ..., tool_calls=[{"id": CANARY}]),
        message(400, ..., tool_call_id=CANARY),
        message(400, ..., unheard_of=CANARY),
        message(400, "messages", content="x" * CONTEXT),
        message(400, ..., refusal=CANARY),
        *(
            _chat(400, name, "unsupported_parameter", **{name: value})
            for name, value in (
                ("tools", [{"type": "function", "function": {"name": CANARY}}]),
                ("tool_choice", "required"),
                ("functions", [{}]),
                ("chat_template", "{{ 'a' * 300000000 }}"),
                ("documents", [CANARY]),
                ("audio", {}),
                ("modalities", ["audio"]),
                ("reasoning_effort", "high"),
                ("web_search_options", {}),
                ("prediction", {}),
                ("best_of", 1),
                ("verbosity", "low"),
            )
        ),
        _chat(400, "continue_final_message", continue_final_message=True),
        _chat(400, "continue_final_message", continue_final_message=CANARY, add_generation_prompt=False),
        _chat(400, "chat_template_kwargs", chat_template_kwargs=CANARY),
        _chat(400, "chat_template_kwargs", chat_template_kwargs=[1]),
        _chat(400, "messages", chat_template_kwargs={"shout": "x" * 500}),
        _chat(
            400,
            ...,
            chat_template_kwargs={"messages": [{"role": "user", "content": CANARY}], "shout": {"a": [1] * 400}},
        ),
        _chat(400, "top_logprobs", top_logprobs=5),
        _chat(400, ..., logprobs=True, top_logprobs=21),
        _chat(400, "logprobs", logprobs=5),
        _chat(400, "max_completion_tokens", max_completion_tokens=7),
        _chat(400, ..., max_completion_tokens=0, max_tokens=0),
        _chat(400, "n", n=0),
        _chat(400, "echo", echo=True),
    ]


def _routes() -> list[Case]:
    chunked = ("transfer-encoding: chunked",)
    body = b'{"prompt": "x", "max_tokens": 1}'
    ones = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    big = b"".join((b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 20 for _ in range(1)) + b"0\r\n\r\n"
    ids = (
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e%2f",
        "file-%00",
        "file-" + "a" * 5000,
        "%ff%fe",
        "file-zz",
        "-",
        "%0d%0aset-cookie:x",
    )
    return [
        _get("/", 404, "not_found"),
        _get("/v1", 404),
        _get("/v1/chat", 404),
        _get("/admin", 404),
        _get("/docs", 404),
        _get("/v1/completions/", 404),
        _get("//v1/models", 404),
        _get("/v1/embeddings", 404, method="POST"),
        _get("/%2e%2e/%2e%2e/etc/passwd", 404),
        _get("/../../etc/passwd", 404),
        _get("/v1/models/../../x", 404),
        _get("/v1/models/" + CANARY, 404),
        _get("/v1/models/..%2f..%2fx", 404),
        _get("/v1/models/%00", 404),
        _get(COMPLETIONS, 405, "method_not_allowed"),
        _get(CHAT, 405),
        _get("/v1/models", 405, method="DELETE"),
        _get(COMPLETIONS, 405, method="PUT"),
        _get(COMPLETIONS, 405, method="OPTIONS"),
        _get("/metrics", 405, method="POST"),
        _get("/health", 405, method="POST"),
        _get("/health", 405, method="TRACE"),
        _get(FILES, 405, method="PUT"),
        *(_get(f"{FILES}/{name}", 404) for name in ids),
        *(_get(f"{BATCHES}/{name}", 404) for name in ids),
        *(_get(f"{FILES}/{name}/content", 404) for name in ids),
        *(_get(f"{FILES}/{name}", 404, method="DELETE") for name in ids),
        *(_get(f"{BATCHES}/{name}/cancel", 404, method="POST") for name in ids),
        *(
            _get(f"{path}?limit={limit}", 400)
            for path in (FILES, BATCHES)
            for limit in ("0", "-1", "x", "1e400", "9" * 5000, "")
        ),
        *(
            _get(f"{path}?after={after}", 404, "not_found")
            for path in (FILES, BATCHES)
            for after in ("..%2f..%2fx", "x" * 5000, "", "%00", "%ff")
        ),
        *(
            Case(f"batch {body[:50]!r}", request(BATCHES, body), 400)
            for body in (
                b"",
                b"[]",
                b"{}",
                b'{"input_file_id": 7}',
                b'{"input_file_id": "x"}',
                b'{"n": 1e400}',
                b"[" * 50_000,
                b'{"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "1h"}',
                b'{"input_file_id": "x", "endpoint": "/etc/passwd", "completion_window": "24h"}',
                b'{"input_file_id": "\\ud800", "endpoint": "/v1/completions", "completion_window": "24h"}',
            )
        ),
        Case(
            "batch of no file",
            request(
                BATCHES, b'{"input_file_id": "../../x", "endpoint": "/v1/completions", "completion_window": "24h"}'
            ),
            404,
        ),
        *(
            Case(f"upload {body[:40]!r}", request(FILES, body, headers=(f"content-type: {kind}",)), 400)
            for kind, body in (
                ("multipart/form-data", b""),
                ("multipart/form-data; boundary=", b"--"),
                ("multipart/form-data; boundary=b", b""),
                ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n"),
                ("application/json", b"{}"),
                (
                    "multipart/form-data; boundary=b",
                    b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nx',
                ),
                (
                    "multipart/form-data; boundary=b",
                    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
                ),
                (f"multipart/form-data; boundary={'b' * 5000}", b"--b--"),
            )
        ),
        Case("one-byte chunks are a request", request(COMPLETIONS, ones, headers=chunked), 200),
        Case("chunks above the limit", request(COMPLETIONS, big, headers=chunked), 413),
        Case("a bad chunk", request(COMPLETIONS, b"zz\r\nx\r\n", headers=chunked), 400),
        Case("a chunk of 2^64", request(COMPLETIONS, b"fffffffffffffffff\r\n", headers=chunked), 400),
        Case("headers of 4 MB", request("/v1/models", method="GET", headers=("x: " + "y" * 4_000_000,)), 431),
        Case("20,000 headers", request("/v1/models", method="GET", headers=("x: y",) * 20_000), 431),
        Case("a path of 100 KB", request("/" + "x" * 100_000, method="GET"), 431),
        Case("a query of 100 KB", request("/v1/models?" + "x" * 100_000, method="GET"), 431),
        Case("no HTTP", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n", 400),
        Case("a header with NUL", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: \x00\r\n\r\n", 400),
        Case("two lengths", request(COMPLETIONS, body, headers=("content-length: 3", "content-length: 4")), 400),
        Case("length and chunks", request(COMPLETIONS, ones, headers=(*chunked, "content-length: 3")), 400),
        Case("a negative length", request(COMPLETIONS, b"", headers=("content-length: -1",)), 400),
        Case("CONNECT", b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        Case("a foreign host", b"GET /v1/models HTTP/1.1\r\nhost: zq7canary.example\r\nconnection: close\r\n\r\n", 403),
        Case("two hosts", request("/v1/models", method="GET", headers=("host: 127.0.0.1",)), 403),
        Case("a foreign page", request(COMPLETIONS, body, headers=("origin: https://zq7canary.example",)), 403),
        Case("a page from nowhere", request(COMPLETIONS, body, headers=("origin: null",)), 403),
    ]


def _served() -> list[Case]:
    """Odd, and right: each must be answered with 200."""
    return [
        _completion(200, ..., prompt="\x00\x01\x7f"),
        _completion(200, ..., prompt="\ufeff\u2028\u202e"),
        _completion(200, ..., prompt="<|endoftext|><s></s>[INST]<|im_start|>system"),
        _completion(200, ..., prompt=" "),
        _completion(200, ..., prompt="{{ 7 * 7 }}{% for x in y %}"),
        _completion(200, ..., prompt=[0]),
        _completion(200, ..., prompt="\U0001f600" * 20),
        _completion(200, ..., n=None, user=None, timeout=None),
        _completion(200, ..., seed=-(2**63)),
        _completion(200, ..., temperature=0, top_k=10**12),
        _completion(200, ..., stop=[]),
        _completion(200, ..., stop=["\x00" * 32] * 64),
        _completion(200, ..., logit_bias={}),
        _completion(200, ..., logit_bias={"0": -100}),
        _completion(200, ..., user=CANARY),
        _completion(200, ..., metadata={"a": [[[[[]]]]]}),
        _completion(200, ..., max_tokens=2**62),
        _completion(200, ..., prompt=["x"] * 2_048, max_tokens=1),
        _completion(200, ..., prompt=[[1, 2]] * 500, max_tokens=1),
        _completion(200, ..., prompt=[1] * 5_000, truncate_prompt_tokens=10),
        _completion(200, ..., prompt=[[2] * 5_000, [1]], truncate_prompt_tokens=CONTEXT - 1),
        _completion(200, ..., user="[{,:" * 70_000),
        _completion(200, ..., user='"[\\' * 140_000 + '\\"'),
        _completion(200, ..., metadata={"[" * 150_000: "{" * 150_000}),
        _text(200, ..., b'"n": 2, "n": 1'),
        _text(200, ..., b'"temperature": 1e-400'),
        _text(200, ..., b'"temperature": -0.0'),
        _chat(200, ..., messages=[{"role": "user", "content": "{{ messages }}{% raw %}</s>"}]),
        _chat(200, ..., messages=[{"role": "user", "content": ""}]),
        _chat(200, ..., messages=[{"role": "user", "content": []}]),
        _chat(200, ..., messages=[{"role": "user", "content": ""}] * 30),
        _chat(200, ..., messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 200}]),
        _chat(200, ..., chat_template_kwargs={}),
        _chat(200, ..., continue_final_message=True, add_generation_prompt=False),
        _chat(200, ..., chat_template_kwargs={"shout": "\x00"}),
        _chat(200, ..., messages=[{"role": "user", "content": "\x00\ud83d\ude00"}]),
    ]


CORPUS: list[Case] = [*_no_json(), *_fields(), *_numbers(), *_many(), *_chats(), *_routes(), *_served()]
