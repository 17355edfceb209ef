"""Bad inputs, made by hand: the bytes that are sent, and the status that each must have.

A case's bytes are its request line, headers and body. Where they show, CANARY and NUMBER stand for
what a client may hold secret: no answer may say them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bare_http import CHAT, CLOSE, COMPLETIONS, request

CANARY = "zq7canary"
NUMBER = 81_920_373  # a canary too
BATCHES, FILES = "/v1/batches", "/v1/files"
CONTEXT = 256  # tokens of the fake model, whose vocabulary has as many
MAX_BODY = 1_000_000  # bytes: the limit that the server under test is given
HUGE, LONG = 10**30, CANARY * 2000
BOMB = (
    "root ::= a0\n"
    + "".join(f"a{i} ::= a{i + 1} a{i + 1} a{i + 1}\n" for i in range(24))
    + 'a24 ::= "x"'
)


@dataclass(frozen=True)
class Case:
    """param: what the error must name; `...` where that is not fixed."""

    name: str
    data: bytes
    status: int
    param: Any = ...
    code: Any = ...


def _raw(
    name: str, body: bytes, code: str | None = "invalid_json", param: Any = None
) -> list[Case]:
    """A body that is no form on either route."""
    routes = (COMPLETIONS, CHAT)
    return [
        Case(f"{route[4:]}: {name}", request(body, CLOSE, path=route), 400, param, code)
        for route in routes
    ]


def _completion(status: int, param: Any, code: Any = ..., **fields: Any) -> Case:
    data = request({"prompt": "x", **fields}, CLOSE)
    return Case(f"completion {str(fields)[:70]}", data, status, param, code)


def _text(status: int, param: Any, more: bytes, code: Any = ...) -> Case:
    """A completion's fields as they stand on the wire."""
    data = request(b'{"prompt": "x", ' + more + b"}", CLOSE)
    return Case(f"completion {more[:60]!r}", data, status, param, code)


def _chat(status: int, param: Any, code: Any = ..., **fields: Any) -> Case:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    return Case(f"chat {str(fields)[:70]}", request(body, CLOSE, path=CHAT), status, param, code)


def _get(path: str, status: int, code: Any = ..., method: str = "GET") -> Case:
    return Case(
        f"{method} {path[:70]}", request(b"", CLOSE, path=path, method=method), status, ..., code
    )


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
        "zipped": (
            b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab\xae\x05\x00C\xbf\xa6\xa3\x02\x00\x00\x00"
        ),
    }
    numbers = {
        "n of 1e400": b'"n": 1e400',
        "n of -1e400": b'"n": -1e400',
        "n of 5,000 digits": b'"n": ' + b"9" * 5000,
        "temperature of 1e999999": b'"temperature": 1e999999',
        "seed of 100,000 digits": b'"seed": -' + b"1" * 100_000,
        "a list of huge numbers": b'"prompt": [' + b"9" * 5000 + b"," + b"9" * 5000 + b"]",
    }
    cases = [case for name, body in bodies.items() for case in _raw(name, body)]
    for name, field in numbers.items():
        cases += _raw(name, b'{"prompt": "x", ' + field + b"}", None, ...)
    return cases


# Field -> values that a completion refuses with 400, the error naming that field.
FIELDS: dict[str, list[Any]] = {
    "prompt": [
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
        [HUGE],
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
        [NUMBER],
        [[1], [-NUMBER]],
    ],
    "n": [0, -1, 65_537, 2**63 - 1, HUGE, 1.5, "1", CANARY, True, [1], {}, 1e300, NUMBER],
    "max_tokens": [0, -1, CANARY, 1.5, [], HUGE, -NUMBER],
    "min_tokens": [-1, 17, 2**62, 2**63, CANARY, -NUMBER],
    "temperature": [-0.1, 100.1, 1e300, CANARY, [1], True, "1", NUMBER + 0.5],
    "top_p": [0, -1, 1.0001, CANARY, -NUMBER],
    "top_k": [-2, 0.5, CANARY, -(2**62), -NUMBER],
    "min_p": [-1, 2, NUMBER],
    "repetition_penalty": [0, -1, 1e-38, 9e-7, 101, -NUMBER],
    "presence_penalty": [2.1, NUMBER],
    "frequency_penalty": [-3, -NUMBER],
    "seed": [2**63, -(2**63) - 1, 1.5, CANARY, NUMBER * 10**14],
    "stop": [
        "",
        ["a", ""],
        7,
        {},
        [CANARY] * 65,
        ["s" * 32] * 65,
        ["s" * 1025, "t" * 1024],
        LONG,
        [LONG],
    ],
    "logprob_token_ids": [[-1], [256], [NUMBER], [1, 1], list(range(21)), 7, CANARY, {}],
    "stop_when": [
        CANARY,
        [],
        {},
        {"pattern": ""},
        {"pattern": "("},
        {"pattern": CANARY, "agree": 0},
        {"pattern": "x", "agree": 2},
        {"pattern": "[ab]{" + str(NUMBER) + "}"},
        {"pattern": "(" * 2000},
        {"pattern": "s" * 2049},
        {"pattern": "x", "agree": NUMBER},
    ],
    "stop_token_ids": [[-1], [256], 3, [1] * 70_000, [NUMBER], [-NUMBER]],
    "logit_bias": [
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
        {str(NUMBER): 1},
        {"1": NUMBER},
    ],
    "allowed_token_ids": [[], [-1], [256], [NUMBER], [1] * 257, 7, CANARY, {}],
    "bad_words": [[""], [" "], CANARY, [CANARY] * 65, ["s" * 1025, "t" * 1024], [CANARY * 10], {}],
    "logprobs": [21, -1, True, CANARY, NUMBER],
    "prompt_logprobs": [21, -NUMBER],
    "best_of": [2, NUMBER],
    "echo": [CANARY, 1],
    "stream": [1, "true", CANARY, [], NUMBER],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "truncate_prompt_tokens": [0, -NUMBER],
    "cache_salt": ["", 7, [CANARY], {}, CANARY * 1000],
    "timeout": [0, -1, 1e12, CANARY, True, NUMBER],
    "structured_outputs": [
        {"regex": CANARY, "json_object": True},
        {"structural_tag": CANARY},
        {
            "structural_tag": {
                "structures": [{"begin": CANARY, "schema": {}, "end": ""}],
                "triggers": ["<"],
            }
        },
        {"choice": [""]},
        {"choice": []},
        {"regex": "("},
        {"regex": "a" * 300_000},
        {"grammar": "nonsense"},
        [7],
        {"json": {"$ref": "https://example.com/a"}},
        {"json": {"minLength": 5, "maxLength": 2, "type": "string"}},
        {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"json": {"type": "string", "format": "nonsense"}},
        {"json": '{"a":' * 5_000 + "1" + "}" * 5_000},
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(6)]}
                    for i in range(8)
                ]
            }
        },
        {"grammar": BOMB},
        {"regex": "(?=a)b"},
        {"choice": ["x" * 30] * 10_000},
    ],
    "user": [7],
    "metadata": ["x"],
    "ignore_eos": [0],
    "skip_special_tokens": ["no"],
    "return_token_ids": [1],
    "model": [7],
    "messages": [[{"role": "user", "content": "hi"}]],
    "top_logprobs": [1],
}
# What no answer gets, on either route: refused by its name.
UNSERVED: dict[str, Any] = {
    "suffix": CANARY,
    "guided_json": {},
    "guided_regex": CANARY,
    "guided_choice": [],
    "logits_processors": ["os.system"],
    "prompt_embeds": CANARY,
    "use_beam_search": True,
    "service_tier": CANARY,
    "store": True,
    "priority": 1,
    "vllm_xargs": {CANARY: 1},
    "kv_transfer_params": {CANARY: {}},
    "request_id": CANARY,
    "truncation_side": "right",
    "thinking_token_budget": 0,
    "watermarking": 0,
}
UNSERVED_IN_CHAT: dict[str, Any] = {
    "functions": [{}],
    "function_call": {"name": CANARY},
    "chat_template": "{{ 'a' * 300000000 }}",
    "documents": [CANARY],
    "audio": {},
    "modalities": ["audio"],
    "reasoning_effort": "high",
    "web_search_options": {},
    "prediction": {},
    "best_of": 1,
    "verbosity": "low",
}


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


_NAMED = {"type": "function", "function": {"name": CANARY}}
# Tools and which is to be called, and the field that the error must name.
TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": CANARY}),
    ("tools[0]", {"tools": [7]}),
    ("tools[0]", {"tools": [{}]}),
    ("tools[0].type", {"tools": [{**_tool(), "type": "web_search"}]}),
    ("tools[0].function", {"tools": [{"type": "function", "function": {}}]}),
    ("tools[0].function.name", {"tools": [_tool(name=CANARY + " x")]}),
    ("tools[0].function.name", {"tools": [_tool(name="")]}),
    ("tools[0].function.name", {"tools": [_tool(name=7)]}),
    ("tools[0].function.name", {"tools": [_tool(name="x" * 129)]}),
    ("tools[1].function.name", {"tools": [_tool(), _tool()]}),
    ("tools[0].function.parameters", {"tools": [_tool(parameters={"type": "array"})]}),
    ("tools[0].function.parameters", {"tools": [_tool(parameters=[CANARY])]}),
    ("tools[0].function.strict", {"tools": [_tool(strict=CANARY)]}),
    ("tool_choice", {"tools": [_tool()]}),
    ("tool_choice", {"tools": [_tool()], "tool_choice": "auto"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [_tool()], "tool_choice": CANARY}),
    ("tool_choice", {"tools": [_tool()], "tool_choice": _NAMED}),
    ("tool_choice", {"tool_choice": _NAMED}),
    (
        "tool_choice.function",
        {"tools": [_tool()], "tool_choice": {"type": "function", "function": {}}},
    ),
    ("tool_choice.type", {"tools": [_tool()], "tool_choice": {"type": "allowed_tools"}}),
    (
        "tools",
        {
            "tools": [
                _tool(strict=True, parameters={"properties": {"a": {"$ref": "http://10.0.0.1/x"}}})
            ],
            "tool_choice": "required",
        },
    ),
    (
        "tools",
        {
            "tools": [_tool(strict=True, parameters={"properties": {"a": {"format": "nonsense"}}})],
            "tool_choice": "required",
        },
    ),
    (
        "tools",
        {
            "tools": [
                _tool(
                    parameters={
                        "required": ["a"],
                        "properties": {"a": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
                    }
                )
            ],
            "tool_choice": "required",
        },
    ),
    ("tools", {"tools": [_tool()], "tool_choice": "required", "ignore_eos": True}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    ("include_reasoning", {"include_reasoning": 1}),
    ("reasoning_effort", {"reasoning_effort": CANARY}),
]


def _fields() -> list[Case]:
    options = {
        "include_obfuscation": True,
        "include_usage": 1,
        "continuous_usage_stats": 1,
        CANARY: 1,
    }
    return [
        *(
            _completion(400, name, **{name: value})
            for name, values in FIELDS.items()
            for value in values
        ),
        _completion(400, "stop_when.pattern", stop_when={"pattern": 7}),
        _completion(
            400, "stop_when.answer", "unknown_parameter", stop_when={"pattern": CANARY, "answer": 1}
        ),
        *(
            _completion(400, name, "unsupported_parameter", **{name: value})
            for name, value in UNSERVED.items()
        ),
        *(
            _completion(400, f"stream_options.{name}", stream=True, stream_options={name: value})
            for name, value in options.items()
        ),
        Case("completion without prompt", request(b'{"n": 1}', CLOSE), 400, "prompt"),
        _completion(400, "n", n=65_536, prompt=["a", "b"]),
        _completion(400, "min_tokens", min_tokens=CONTEXT, max_tokens=2**62),
        _completion(400, "min_tokens", min_tokens=NUMBER, max_tokens=NUMBER),
        _completion(400, "stop[0]", stop=[7]),
        _completion(400, "stop_token_ids[0]", stop_token_ids=[CANARY]),
        _completion(400, "logit_bias[...]", logit_bias={"1": None}),
        _completion(400, "bad_words[0]", bad_words=[7]),
        _completion(400, "structured_outputs.json", structured_outputs={"json": [1]}),
        _completion(
            400, f"structured_outputs.{CANARY}", "unknown_parameter", structured_outputs={CANARY: 1}
        ),
        _completion(
            400,
            "structured_outputs",
            structured_outputs={"regex": "a"},
            response_format={"type": "json_object"},
        ),
        _completion(400, "response_format.type", response_format={"type": CANARY}),
        _completion(400, "response_format.json_schema", response_format={"type": "json_schema"}),
        _completion(400, "response_format", response_format={}),
        _completion(400, ..., logit_bias={"1": CANARY}),
        *(_text(400, ..., b'"temperature": ' + value) for value in (b"1e309", b"-1e400")),
        _text(400, ..., b'"logit_bias": {"1": 1e400}'),
        _text(400, ..., b'"prompt": ' + b"[" * 900 + b"]" * 900),
        _completion(400, "prompt_logprobs", prompt_logprobs=1, stream=True),
        _completion(400, "best_of", best_of=1, n=2),
        _completion(400, "stream_options", stream=True, stream_options=CANARY),
        *(
            _completion(400, name, "unknown_parameter", **{name: CANARY})
            for name in ("unheard_of", "", "\x00")
        ),
        _completion(400, "__proto__", "unknown_parameter", __proto__={"n": 2}),
        _completion(400, "x" * 80, "unknown_parameter", **{"x" * 5000: None}),
        *(
            _completion(404, "model", "model_not_found", model=name)
            for name in (CANARY, "../../etc/passwd")
        ),
        # Told before its prompt is tokenised, amid which its time would be over.
        _completion(
            400,
            "cache_salt",
            prompt="x" * 90_000,
            truncate_prompt_tokens=5,
            timeout=1e-9,
            cache_salt="",
        ),
        Case(
            "a body above the limit",
            request(b'{"prompt": "' + b"x" * MAX_BODY + b'"}', CLOSE),
            413,
            None,
        ),
        Case("one that says so", request(b"", CLOSE, "content-length: 99999999999"), 413, None),
    ]


def _many() -> list[Case]:
    """More of something than a body may hold, in few bytes; and what is refused by its length
    alone."""
    message = {"role": "user", "content": ""}
    return [
        *(
            _completion(400, "prompt", None, prompt=[each] * 8_193)
            for each in ("", "x", [1], [], None, 0.5, {})
        ),
        _completion(400, None, None, prompt=[[1]] * 131_073),
        _completion(400, None, None, prompt=[{}] * 131_073),
        _completion(400, None, None, user={"a": [[]] * 131_073}),
        _text(400, None, b'"metadata": {"a": [' + b"{}," * 131_073 + b"{}]}", None),
        Case(
            "lists without an end",
            request(b'{"prompt": [' + b"[1]," * 140_000, CLOSE),
            400,
            None,
            None,
        ),
        Case("open lists beyond the bound", request(b"[" * 200_000, CLOSE), 400, None, None),
        Case("brackets behind a fault", request(b'\\" [' + b"[1]," * 140_000, CLOSE), 400, None),
        _chat(400, "messages", None, messages=[message] * 16_385),
        _chat(400, "messages", None, messages=[None] * 16_385),
        _chat(400, None, None, messages=[{**message, "content": [{}] * 131_073}]),
        _completion(400, "n", None, n=9, prompt=["x"] * 8_192),
        _completion(400, "prompt", "context_length_exceeded", prompt=[1] * 300_000),
        _completion(
            400, "prompt", "context_length_exceeded", prompt=[NUMBER] * CONTEXT
        ),  # too long, whatever it holds
        _completion(400, "prompt", "context_length_exceeded", prompt=[[1], [1] * 100_000]),
        _completion(
            400,
            "prompt",
            "context_length_exceeded",
            prompt=[1] * 1000,
            truncate_prompt_tokens=CONTEXT,
        ),
    ]


def _message(param: Any, *more: dict[str, Any], **fields: Any) -> Case:
    """A chat whose last message has such fields."""
    return _chat(400, param, messages=[*more, {"role": "user", "content": "hi", **fields}])


def _chats() -> list[Case]:
    image = {"type": "image_url", "image_url": {"url": f"http://169.254.169.254/{CANARY}"}}
    part, whole = "messages[0].content[0]", [{"role": "system"}, {"role": "user"}, {"content": "x"}]
    audio, file = (
        {"type": "input_audio", "input_audio": {"data": CANARY}},
        {"type": "file", "file": {"file_id": "../x"}},
    )
    long = {"messages": [{"role": "user", "content": CANARY}], "shout": {"a": [1] * 400}}
    return [
        Case("chat without messages", request(b'{"n": 1}', CLOSE, path=CHAT), 400, "messages"),
        *(
            _chat(400, "messages", messages=value)
            for value in (None, [], {}, CANARY, 7, "x" * (2 * CONTEXT))
        ),
        *(_chat(400, "messages[0]", messages=[value]) for value in (None, CANARY, 7, [], whole[2])),
        *(_chat(400, "messages[0].content", messages=[value]) for value in whole[:2]),
        _chat(400, ..., messages=[{}]),
        _message(..., role=None),
        *(
            _message("messages[0].role", role=value)
            for value in (CANARY, "", 7, "USER", ["user"], "system\x00")
        ),
        *(_message("messages[0].content", content=value) for value in (None, 7, {})),
        *(
            _message(part, content=[value])
            for value in (CANARY, 7, {}, {"type": "text"}, {"text": CANARY})
        ),
        *(
            _message(f"{part}.type", content=[value])
            for value in (image, audio, file, {"type": "image_url"})
        ),
        _message(f"{part}.text", content=[{"type": "text", "text": 7}]),
        _message(part, content=[{"type": "text", "text": "x", CANARY[:3]: 1}]),
        _message("messages[1].content", {"role": "user", "content": "hi"}, content=7),
        _message("messages[0].name", name=7),
        _message("messages[0].tool_calls", tool_calls=[{"id": CANARY}]),
        _message("messages[0].tool_calls[0]", role="assistant", content="", tool_calls=[{}]),
        _message(
            "messages[0].tool_calls[0].function.arguments",
            role="assistant",
            tool_calls=[{"function": {"name": "f", "arguments": {}}}],
        ),
        *(_chat(400, param, **fields) for param, fields in TOOLS),
        _message("messages[0].content", role="developer", content=None),
        _message("messages[0].tool_call_id", tool_call_id=CANARY),
        _message("messages[0].unheard_of", unheard_of=CANARY),
        _message("messages[0].refusal", refusal=CANARY),
        _message("messages", content="x" * CONTEXT),
        *(
            _chat(400, name, "unsupported_parameter", **{name: value})
            for name, value in UNSERVED_IN_CHAT.items()
        ),
        *(
            _chat(400, "chat_template_kwargs", chat_template_kwargs=value)
            for value in (CANARY, [1], 7)
        ),
        _chat(400, "messages", chat_template_kwargs={"shout": "x" * 500}),
        _chat(400, ..., chat_template_kwargs=long),
        _chat(400, "continue_final_message", continue_final_message=True),
        _chat(
            400,
            "continue_final_message",
            continue_final_message=CANARY,
            add_generation_prompt=False,
        ),
        *(_chat(400, "top_logprobs", top_logprobs=value) for value in (5, -1)),
        *(_chat(400, "top_logprobs", logprobs=True, top_logprobs=value) for value in (21, NUMBER)),
        _chat(400, "logprobs", logprobs=5),
        _chat(400, "max_completion_tokens", max_completion_tokens=7),
        _chat(400, "max_completion_tokens", max_completion_tokens=NUMBER),
        _chat(400, "max_tokens", max_completion_tokens=-NUMBER, max_tokens=None),
        _chat(400, ..., max_completion_tokens=0, max_tokens=0),
        *(_chat(400, "n", n=value) for value in (0, NUMBER)),
        _chat(400, "echo", echo=True),
        _chat(400, "prompt", prompt="x"),
        _chat(404, "model", "model_not_found", model=CANARY),
    ]


# What /v1/responses refuses, and the field that the error must name.
RESPONSES: list[tuple[Any, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": 7}),
    ("input", {"input": []}),
    ("input", {"input": "x" * CONTEXT}),
    ("input[0]", {"input": [7]}),
    ("input[0].type", {"input": [{"type": CANARY}]}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": CANARY}]}),
    ("input[0]", {"input": [{"role": "user"}]}),
    ("input[0].role", {"input": [{"role": CANARY, "content": "x"}]}),
    (
        "input[0].content[0]",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": CANARY}]}]},
    ),
    ("input[0].content[0]", {"input": [{"role": "user", "content": [7]}]}),
    ("input[0]", {"input": [{"type": "function_call", "call_id": CANARY}]}),
    (
        "input[0].output[0]",
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [{}]}]},
    ),
    ("instructions", {"instructions": 7}),
    ("max_output_tokens", {"max_output_tokens": -NUMBER}),
    ("max_output_tokens", {"max_output_tokens": CANARY}),
    ("temperature", {"temperature": NUMBER}),
    ("tools[0].type", {"tools": [{"type": "web_search_preview"}]}),
    ("tools[0]", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "name": CANARY + " x"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": CANARY}),
    ("text.format.type", {"text": {"format": {"type": CANARY}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    (
        "text.format",
        {"text": {"format": {"type": "json_schema", "schema": {"format": "no"}, "strict": True}}},
    ),
    ("reasoning.effort", {"reasoning": {"effort": "high"}}),
    ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
    ("store", {"store": True}),
    ("background", {"background": True}),
    ("conversation", {"conversation": CANARY}),
    ("previous_response_id", {"previous_response_id": CANARY}),
    ("include", {"include": [CANARY]}),
    ("truncation", {"truncation": "auto"}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("prompt", {"prompt": {"id": CANARY}}),
    (..., {"n": NUMBER}),
    (..., {"messages": []}),
    (CANARY, {CANARY: 1}),
]


def _responses() -> list[Case]:
    def case(status: int, param: Any, fields: dict[str, Any], code: Any = ...) -> Case:
        data = request(
            {"input": "hi", "max_output_tokens": 2, **fields}, CLOSE, path="/v1/responses"
        )
        return Case(f"responses {str(fields)[:70]}", data, status, param, code)

    return [
        *(case(400, param, fields) for param, fields in RESPONSES),
        case(404, "model", {"model": CANARY}, "model_not_found"),
        case(200, ..., {"store": False, "metadata": {"a": CANARY}, "include": []}),
        case(
            200,
            ...,
            {"input": [{"role": "user", "content": []}], "text": {"format": {"type": "text"}}},
        ),
        case(
            200,
            ...,
            {
                "input": [
                    {"type": "reasoning", "summary": []},
                    {"role": "assistant", "content": "x"},
                ]
            },
        ),
        Case(
            "responses: no JSON",
            request(b"{", CLOSE, path="/v1/responses"),
            400,
            None,
            "invalid_json",
        ),
        Case(
            "responses by GET",
            request(b"", CLOSE, path="/v1/responses", method="GET"),
            405,
            ...,
            ...,
        ),
    ]


# What /generative_scoring refuses, and the field that the error must name.
SCORING: list[tuple[Any, dict[str, Any]]] = [
    ("query", {"query": None}),
    ("query", {"query": ""}),
    ("query", {"query": []}),
    ("query", {"query": 7}),
    ("query", {"query": [CANARY]}),
    ("query", {"query": [NUMBER]}),
    ("items", {"query": "x" * CONTEXT}),
    ("items", {"items": []}),
    ("items", {"items": [""]}),
    ("items", {"items": [[]]}),
    ("items", {"items": [[256]]}),
    ("items", {"items": CANARY}),
    ("items", {"items": ["a", [1]]}),
    ("items", {"items": ["x" * CONTEXT]}),
    ("items", {"items": ["a"] * 8193}),
    ("items", {"items": ["x" * (CONTEXT - 5)]}),
    ("items", {"items": [1, 2]}),
    ("label_token_ids", {"label_token_ids": None}),
    ("label_token_ids", {"label_token_ids": []}),
    ("label_token_ids", {"label_token_ids": [1, 1]}),
    ("label_token_ids", {"label_token_ids": list(range(21))}),
    ("label_token_ids", {"label_token_ids": [256]}),
    ("label_token_ids", {"label_token_ids": [-NUMBER]}),
    ("label_token_ids[0]", {"label_token_ids": [CANARY]}),
    ("apply_softmax", {"apply_softmax": CANARY}),
    ("priority", {"priority": NUMBER}),
    ("request_id", {"request_id": CANARY}),
    (CANARY, {CANARY: 1}),
    ("temperature", {"temperature": 1.0}),
    ("timeout", {"timeout": -NUMBER}),
    ("cache_salt", {"cache_salt": ""}),
]


def _scoring() -> list[Case]:
    def case(status: int, param: Any, fields: dict[str, Any]) -> Case:
        body = {"query": "query", "items": ["item"], "label_token_ids": [1, 2], **fields}
        data = request(body, CLOSE, path="/generative_scoring")
        return Case(f"scoring {str(fields)[:70]}", data, status, param)

    return [
        *(case(400, param, fields) for param, fields in SCORING),
        case(404, "model", {"model": CANARY}),
    ]


# What /inference/v1/generate refuses, and the field that the error must name.
GENERATE: list[tuple[Any, dict[str, Any]]] = [
    ("token_ids", {"token_ids": []}),
    ("token_ids", {"token_ids": None}),
    ("token_ids", {"token_ids": CANARY}),
    ("token_ids", {"token_ids": [1] * CONTEXT}),
    ("token_ids", {"token_ids": [NUMBER]}),
    ("token_ids", {"token_ids": [-1]}),
    ("token_ids[0]", {"token_ids": [CANARY]}),
    ("token_ids", {"prompt": CANARY}),
    ("sampling_params", {"sampling_params": [CANARY]}),
    ("sampling_params.stream", {"sampling_params": {"stream": True}}),
    (f"sampling_params.{CANARY}", {"sampling_params": {CANARY: 1}}),
    ("sampling_params.output_kind", {"sampling_params": {"output_kind": 0}}),
    ("max_tokens", {"sampling_params": {"max_tokens": 0}}),
    ("n", {"sampling_params": {"n": HUGE}}),
    ("temperature", {"sampling_params": {"temperature": CANARY}}),
    ("request_id", {"request_id": "\r\nx: y"}),
    ("request_id", {"request_id": LONG}),
    ("logprobs_format", {"logprobs_format": CANARY}),
    ("features", {"features": {"mm_hashes": {}}}),
    ("priority", {"priority": NUMBER}),
    (CANARY, {CANARY: 1}),
]
SHARED = {"memories": [], "tensors": []}
# What /update_weights refuses before an engine hears of it.
WEIGHTS: list[dict[str, Any]] = [
    {},
    {"model_path": None},
    {"model_path": "x", "shared": SHARED},
    {"shared": CANARY},
    {"shared": {}},
    {"shared": SHARED | {"colour": 1}},
    {"shared": SHARED | {"memories": [CANARY]}},
    {"model_path": "x", "mode": "drop"},
    {"shared": SHARED | {"memories": [{"kind": "pickle", "size": 1}]}},
    {"model_path": ["x"]},
    {"shared": SHARED | {"memories": [{"kind": "cuda", "size": 1, "handle": "%%"}]}},
    {"shared": SHARED | {"tensors": [{"name": "a", "dtype": "F32", "shape": ["1"]}]}},
    {"shared": SHARED, "colour": 1},
]


def _of_loops() -> list[Case]:
    """Routes of training loops, and of bulk as a whole."""
    tokens = {"token_ids": [97, 98], "sampling_params": {"max_tokens": 2}}

    def generate(status: int, param: Any, fields: dict[str, Any], code: Any = ...) -> Case:
        data = request(tokens | fields, CLOSE, path="/inference/v1/generate")
        return Case(f"generate {str(fields)[:70]}", data, status, param, code)

    def bulk(name: str, body: bytes, status: int) -> Case:
        return Case(f"bulk: {name}", request(body, CLOSE, path="/v1/bulk"), status)

    return [
        *(generate(400, param, fields) for param, fields in GENERATE),
        generate(404, "model", {"model": CANARY}, "model_not_found"),
        generate(200, ..., {"priority": 0, "kv_transfer_params": None, "features": None}),
        *(Case(f"weights {f}", request(f, CLOSE, path="/update_weights"), 400) for f in WEIGHTS),
        Case(
            "weights: no JSON",
            request(b"{", CLOSE, path="/update_weights"),
            400,
            None,
            "invalid_json",
        ),
        *(
            _get(f"/sleep?{query}", 400, method="POST")
            for query in ("level=0", "level=", "mode=drop", "colour=1")
        ),
        _get("/wake_up?level=1", 400, method="POST"),
        *(
            _get(path, 405, method="GET")
            for path in ("/sleep", "/wake_up", "/v1/bulk", "/inference/v1/generate")
        ),
        bulk("nothing", b"", 400),
        bulk("blanks", b" \n\n\t\n", 400),
        bulk("too large", b"{}" + b" " * MAX_BODY, 413),
        *(
            bulk(f"a broken line, {line[:20]!r}", line, 200)
            for line in (b"{", b"\xff", b"\x1f\x8b\x08", b"[" * 9000)
        ),
    ]


def _routes() -> list[Case]:
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
    nowhere = (
        "/none",
        "/v1",
        "/v1/chat",
        "/admin",
        "/docs",
        "/v1/completions/",
        "//v1/models",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/../../etc/passwd",
        "/v1/models/../../x",
        "/v1/models/" + CANARY,
        "/v1/models/..%2f..%2fx",
        "/v1/models/%00",
        "/v1/models/%ff%00",
    )
    wrong = (
        ("GET", COMPLETIONS),
        ("GET", CHAT),
        ("PUT", CHAT),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/models"),
        ("PUT", COMPLETIONS),
        ("OPTIONS", COMPLETIONS),
        ("POST", "/metrics"),
        ("DELETE", "/metrics"),
        ("POST", "/health"),
        ("TRACE", "/health"),
        ("PUT", FILES),
    )
    limits = ("0", "-1", "x", "1e400", "9" * 5000, "", str(NUMBER), f"-{NUMBER}")
    return [
        *(_get(path, 404, "not_found" if path == "/none" else ...) for path in nowhere),
        _get("/v1/embeddings", 404, method="POST"),
        *(_get(path, 405, "method_not_allowed", method=method) for method, path in wrong),
        *(_get(f"{room}/{name}", 404) for name in ids for room in (FILES, BATCHES)),
        *(_get(f"{FILES}/{name}/content", 404) for name in ids),
        *(_get(f"{FILES}/{name}", 404, method="DELETE") for name in ids),
        *(_get(f"{BATCHES}/{name}/cancel", 404, method="POST") for name in ids),
        *(_get(f"{path}?limit={limit}", 400) for path in (FILES, BATCHES) for limit in limits),
        *(_get(f"{BATCHES}?{query}", 400) for query in ("limit=101", "order=asc", "foo=1")),
        *(
            _get(f"{path}?after={after}", 404, "not_found")
            for path in (FILES, BATCHES)
            for after in ("..%2f..%2fx", "x" * 5000, "", "%00", "%ff")
        ),
    ]


def _uploads() -> list[Case]:
    batch = {"input_file_id": "x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    bodies: list[Any] = [
        b"",
        b"[]",
        b"{}",
        b'{"input_file_id": 7}',
        b'{"input_file_id": "x"}',
        b'{"n": 1e400}',
        b"[" * 50_000,
        {**batch, "completion_window": "1h"},
        {**batch, "endpoint": "/etc/passwd"},
        {**batch, "input_file_id": "\ud800"},
    ]
    form, part = "multipart/form-data", b"--b\r\ncontent-disposition: form-data; name="
    forms = (
        (form, b""),
        (f"{form}; boundary=", b"--"),
        (f"{form}; boundary=b", b""),
        ("application/json", b"{}"),
        (f"{form}; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n"),
        (f"{form}; boundary={'b' * 5000}", b"--b--"),
        (f"{form}; boundary=b", part + b'"file"; filename="x"\r\n\r\nx'),
        (f"{form}; boundary=b", part + b'"purpose"\r\n\r\nbatch\r\n--b--\r\n'),
    )
    none = {**batch, "input_file_id": "../../x"}
    return [
        *(
            Case(f"batch {str(body)[:50]}", request(body, CLOSE, path=BATCHES), 400)
            for body in bodies
        ),
        Case("batch of no file", request(none, CLOSE, path=BATCHES), 404),
        *(
            Case(
                f"upload {body[:40]!r}",
                request(body, CLOSE, f"content-type: {kind}", path=FILES),
                400,
            )
            for kind, body in forms
        ),
    ]


def _http() -> list[Case]:
    """What the parser of HTTP refuses, and what it may not."""
    chunked, body = "transfer-encoding: chunked", b'{"prompt": "x", "max_tokens": 1}'
    ones = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    big = (b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 20 + b"0\r\n\r\n"
    get = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    strange = b"GET /v1/models HTTP/1.1\r\nhost: zq7canary.example\r\nconnection: close\r\n\r\n"

    def models(*headers: str, path: str = "/v1/models") -> bytes:
        return request(b"", CLOSE, *headers, path=path, method="GET")

    large = (
        models("x: " + "y" * 4_000_000),
        models("x: " + "y" * 70_000),
        models(*("x: y",) * 20_000),
        get + b"y" * 100_000,
        models(path="/" + "x" * 100_000),
        models(path="/v1/models?" + "x=y&" * 25_000),
    )
    no_http = (
        b"\x00\x01\x02\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1e3\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: \x00\r\n\r\n",
        request(body, CLOSE, "content-length: 3", "content-length: 4"),
        request(ones, CLOSE, chunked, "content-length: 3"),
    )
    return [
        *(
            Case(f"a large head: {data[:60]!r}", data, 431, ..., "headers_too_large")
            for data in large
        ),
        *(Case(f"no HTTP: {data[:60]!r}", data, 400, ..., "invalid_http") for data in no_http),
        Case("one-byte chunks are a request", request(ones, CLOSE, chunked), 200),
        Case("chunks above the limit", request(big, CLOSE, chunked), 413),
        Case("a bad chunk", request(b"zz\r\nx\r\n", CLOSE, chunked), 400),
        Case("a chunk of 2^64", request(b"fffffffffffffffff\r\n", CLOSE, chunked), 400),
        Case("a foreign host", strange, 403),
        Case("two hosts", models("host: 127.0.0.1"), 403),
        Case("a foreign page", request(body, CLOSE, "origin: https://zq7canary.example"), 403),
        Case("a page from nowhere", request(body, CLOSE, "origin: null"), 403),
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
        _completion(
            200, ..., structured_outputs={"choice": [f"number {i}" for i in range(10_000)]}
        ),
        _completion(200, ..., structured_outputs={"regex": "(a{1,1000}){1,1000}"}),
        _completion(200, ..., structured_outputs={"regex": "(.*a){20}.{200}"}),
        _completion(200, ..., structured_outputs={"json": {"properties": {"next": {"$ref": "#"}}}}),
        _completion(200, ..., n=None, user=None, timeout=None),
        _completion(200, ..., seed=-(2**63)),
        _completion(200, ..., temperature=0, top_k=10**12),
        _completion(200, ..., stop=[]),
        _completion(200, ..., stop=["\x00" * 32] * 64),
        _completion(200, ..., logit_bias={}),
        _completion(200, ..., allowed_token_ids=[7, 255, 7]),
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
        *(
            _chat(200, ..., messages=[{"role": role, "content": None}])
            for role in ("assistant", "tool")
        ),
        _chat(
            200,
            ...,
            messages=[
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
            ],
        ),
        _chat(200, ..., messages=[{"role": "user", "content": ""}] * 30),
        _chat(
            200, ..., messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 200}]
        ),
        _chat(200, ..., chat_template_kwargs={}),
        _chat(200, ..., continue_final_message=True, add_generation_prompt=False),
        _chat(200, ..., chat_template_kwargs={"shout": "\x00"}),
        _chat(200, ..., messages=[{"role": "user", "content": "\x00\ud83d\ude00"}]),
    ]


CORPUS: list[Case] = [
    *_no_json(),
    *_fields(),
    *_many(),
    *_chats(),
    *_responses(),
    *_scoring(),
    *_of_loops(),
    *_routes(),
    *_uploads(),
    *_http(),
    *_served(),
]
