"""Inputs for fuzzing, made by hypothesis: valid JSON bodies, lines and forms, bent a little or a
lot.

What is drawn is bytes. A tree is written out by `render`, not by json.dumps, so that it may hold
what no Python value is: a key twice, NaN, 1e400, half a surrogate pair, 5,000 digits, 3,000
brackets. It knows the shapes of good inputs; not what becomes of them (fuzz_targets.py).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

SCALE = float(os.environ.get("PENSTOCK_FUZZ", "1"))  # `make reliability` asks for more
CANARY = (
    "zq7canary"  # what a client may hold secret: values alone have it, and no error says it again
)


def examples(usual: int) -> int:
    return max(1, round(usual * SCALE))


@dataclass(frozen=True)
class Raw:
    """A piece of JSON as it stands on the wire, good or not."""

    text: bytes


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may come twice."""

    pairs: tuple[tuple[str, Any], ...]


def render(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, list):
        return b"[" + b",".join(map(render, value)) + b"]"
    if isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value.pairs
        return (
            b"{"
            + b",".join(json.dumps(name).encode() + b":" + render(each) for name, each in pairs)
            + b"}"
        )
    return json.dumps(value).encode()


ODD = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"-0",
    b"-0.0",
    b"1E+2",
    b"01",
    b"+1",
    b".5",
    b"9" * 5_000,
    b"0." + b"9" * 5_000,
    b"1" + b"0" * 310,
    b'"\\ud800"',
    b'"\\udc00x"',
    b'"\\ud83d\\ude00"',
    b'"\\u0000"',
    b'"\x01"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"\xe2\x80\xa8"',
    b"[" * 3_000,
    b"[" * 900 + b"]" * 900,
    b'{"a":' * 500 + b"1" + b"}" * 500,
    b"[" * 40 + b"]" * 40,
    b"'x'",
    b"nul",
    b"",
    b"/*x*/1",
    b'"\\x"',
    b"1 2",
)
TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        "",
        " ",
        "\x00",
        "\u2028",
        "\ufeff",
        CANARY,
        CANARY * 40,
        f"x' - at `$.{CANARY}`",
        "a" * 300,
        "<assistant>",
        "{{ 7 * 7 }}",
        "user",
        "text",
        "fake",
        "\U0001f600" * 9,
        "a\nb",
        "%s",
        "../../etc",
    ]
)
NUMBERS = (
    st.integers(-3, 40)
    | st.sampled_from(
        [
            255,
            256,
            257,
            300,
            65_537,
            2**31,
            2**32,
            2**53,
            2**63 - 1,
            2**63,
            2**64,
            10**30,
            -(2**63) - 1,
        ]
    )
    | st.floats(allow_nan=False, allow_infinity=False)
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS | st.sampled_from(ODD).map(Raw)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(st.tuples(st.sampled_from(["a", "type", "text", ""]), inner), max_size=3).map(
            lambda pairs: Pairs(tuple(pairs))
        )
    ),
    max_leaves=6,
)


@st.composite
def bent(draw: st.DrawFn, base: dict[str, Any], known: dict[str, st.SearchStrategy[Any]]) -> Pairs:
    """`base` with some fields more, of `known` names: mostly what they may be, now and then
    anything. Or one is gone, or stands there twice."""
    pairs = list(base.items())
    for name in draw(st.lists(st.sampled_from(sorted(known)), max_size=5)):
        pairs.append((name, draw(VALUES if draw(st.integers(0, 4)) == 4 else known[name])))
    if draw(st.integers(0, 9)) == 9:
        pairs.pop(draw(st.integers(0, len(pairs) - 1)))
    if draw(st.integers(0, 9)) == 9:
        pairs.append((draw(st.text(max_size=20)), draw(VALUES)))
    return Pairs(tuple(pairs))


@st.composite
def mangled(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes cut, changed, doubled or put in; the rest stays."""
    whole = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(whole)))
        size = draw(st.integers(0, 12))
        how = draw(st.sampled_from(["cut", "end", "put", "change", "double", "far"]))
        if how == "cut":
            del whole[at : at + size]
        elif how == "end":
            del whole[at:]
        elif how == "put":
            whole[at:at] = draw(st.binary(max_size=12))
        elif how == "change" and at < len(whole):
            whole[at] = draw(st.integers(0, 255))
        elif how == "double":
            whole[at:at] = whole[at : at + size]
        elif how == "far":
            whole[at:at] = draw(st.sampled_from(ODD))
    return bytes(whole)


def sometimes_mangled(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """As drawn, three times of four."""
    return st.tuples(data, st.integers(0, 3)).flatmap(
        lambda pair: st.just(pair[0]) if pair[1] < 3 else mangled(pair[0])
    )


@st.composite
def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The same bytes as they may come: cut anywhere, some pieces empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    return [data[low:high] for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# --- bodies

_NAMES_OF_IDS = st.sampled_from(["0", "7", "255", "256", "-1", "01", "٣", "x", "9" * 30])
_FORM: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["fake", "gpt-4", ""]),
    "n": st.integers(-1, 4),
    "temperature": st.floats(-0.5, 3),
    "top_p": st.floats(0, 1.1),
    "top_k": st.integers(-2, 300),
    "min_p": st.floats(-0.1, 1.1),
    "repetition_penalty": st.floats(0, 3),
    "presence_penalty": st.floats(-2.1, 2.1),
    "frequency_penalty": st.floats(-2.1, 2.1),
    "logit_bias": st.dictionaries(_NAMES_OF_IDS, st.floats(-101, 101), max_size=3),
    "allowed_token_ids": st.lists(st.integers(-1, 257), max_size=10),
    "bad_words": st.lists(TEXTS, max_size=3),
    "min_tokens": st.integers(-1, 5),
    "max_tokens": st.integers(-1, 6),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 257), max_size=10),
    "ignore_eos": st.booleans(),
    "seed": st.integers(-(2**64), 2**64),
    "prompt_logprobs": st.integers(-1, 21),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "add_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.integers(-1, 9),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "x": LEAVES}
    ),
    "timeout": st.sampled_from([-1, 0, 1e-9, 60, 1e300]),
    "cache_salt": TEXTS,
    "user": TEXTS,
    "metadata": st.dictionaries(st.sampled_from("ab"), LEAVES, max_size=2),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {}]),
}
_PROMPTS = (
    TEXTS
    | st.lists(TEXTS, max_size=3)
    | st.lists(st.integers(-1, 257), max_size=6)
    | st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=3)
    | st.lists(st.integers(0, 255), min_size=250, max_size=260)
)
_COMPLETION = {
    **_FORM,
    "prompt": _PROMPTS,
    "echo": st.booleans(),
    "logprobs": st.integers(-1, 21),
    "best_of": st.integers(-1, 4),
    "suffix": TEXTS,
}
_PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": TEXTS}),
    max_size=3,
)
_SCHEMAS = st.sampled_from(
    [
        {},
        {"type": "object", "properties": {"a": {"type": "string"}}},
        {"type": "array"},
        {"properties": {"a": 7}},
        {"properties": {"a": {"$ref": "#"}}},
        {"oneOf": [{}, {}]},
        {"x-guidance": {"lenient": 1}},
        {"properties": []},
    ]
)
_FUNCTION = {
    "name": st.sampled_from(["f", "g", "", "a b"]) | TEXTS,
    "parameters": _SCHEMAS,
    "strict": st.booleans(),
}
_TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": bent({"name": "f"}, _FUNCTION)})
    | LEAVES,
    max_size=2,
)
_CHOICES = (
    st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
    | LEAVES
)
_EFFORTS = st.sampled_from(["none", "low", "x"])
_CALLS = st.lists(
    bent(
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"function": LEAVES},
    ),
    max_size=2,
)
_MESSAGE = bent(
    {"role": "user", "content": "hi"},
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "king"]),
        "content": TEXTS | _PARTS,
        "name": TEXTS,
        "tool_calls": _CALLS,
        "tool_call_id": TEXTS,
        "reasoning": TEXTS,
        "refusal": LEAVES,
    },
)
_CHAT = {
    **_FORM,
    "messages": st.lists(_MESSAGE, max_size=4),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "max_completion_tokens": st.integers(-1, 6),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(
            ["shout", "messages", "range", "raise_exception", "self", "loop", "a b", "documents"]
        ),
        LEAVES,
        max_size=3,
    ),
    "tools": _TOOLS,
    "tool_choice": _CHOICES,
    "parallel_tool_calls": st.booleans(),
    "include_reasoning": st.booleans(),
    "reasoning_effort": _EFFORTS,
}
_ITEM = bent(
    {"role": "user", "content": "hi"},
    {
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
        ),
        "role": st.sampled_from(["user", "assistant", "tool"]),
        "content": TEXTS
        | st.lists(
            st.fixed_dictionaries({"type": st.just("input_text"), "text": TEXTS}), max_size=2
        ),
        **dict.fromkeys(
            ("id", "status", "call_id", "name", "arguments", "output", "summary"), TEXTS | LEAVES
        ),
    },
)
_RESPONSE = {
    "input": TEXTS | st.lists(_ITEM, max_size=3),
    "instructions": TEXTS,
    "max_output_tokens": st.integers(-1, 6),
    "temperature": NUMBERS,
    "stream": st.booleans(),
    "tools": st.lists(bent({"type": "function", "name": "f"}, _FUNCTION), max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "name": "f"}])
    | LEAVES,
    "text": st.fixed_dictionaries(
        {
            "format": st.fixed_dictionaries(
                {"type": TEXTS | st.just("json_schema")}, optional={"schema": _SCHEMAS}
            )
        }
    ),
    "reasoning": st.fixed_dictionaries({}, optional={"effort": _EFFORTS, "summary": LEAVES}),
    "store": st.booleans(),
    "metadata": st.dictionaries(st.sampled_from("ab"), LEAVES, max_size=2),
    "include": st.lists(TEXTS, max_size=1),
}
_SHORT = {"model": "fake", "max_tokens": 3}


def completions() -> st.SearchStrategy[bytes]:
    return bent({"prompt": "ab", **_SHORT}, _COMPLETION).map(render)


def chats() -> st.SearchStrategy[bytes]:
    return bent({"messages": [{"role": "user", "content": "hi"}], **_SHORT}, _CHAT).map(render)


def responses() -> st.SearchStrategy[bytes]:
    return bent({"input": "hi", "max_output_tokens": 3}, _RESPONSE).map(render)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """One line of a batch's input, mostly one that can be run."""
    chat = draw(st.booleans())
    body = draw(chats() if chat else completions())
    url = "/v1/chat/completions" if chat else "/v1/completions"
    known: dict[str, st.SearchStrategy[Any]] = {
        "custom_id": TEXTS,
        "method": st.sampled_from(["POST", "GET"]),
        "url": st.sampled_from([url, "/v1/embeddings"]),
        "body": VALUES,
    }
    name = draw(st.text(min_size=1, max_size=12))
    base = {"custom_id": name, "method": "POST", "url": url, "body": Raw(body)}
    return render(draw(bent(base, known))) if draw(st.integers(0, 3)) == 3 else render(base)


def rows() -> st.SearchStrategy[bytes]:
    """A row that `penstock run` reads, of either form."""
    own = {
        name: each
        for name, each in _FORM.items()
        if name not in ("stream", "stream_options", "timeout", "model")
    }
    own |= {"id": TEXTS | NUMBERS, "prompt": _PROMPTS, "messages": st.lists(_MESSAGE, max_size=2)}
    return bent({"id": "a", "prompt": "x"}, own).map(render) | lines()


# --- uploads

BOUNDARY = "x-limit"
_HEADER_VALUES = st.sampled_from(
    [
        'form-data; name="file"; filename="in.jsonl"',
        'form-data; name="purpose"',
        'form-data; name="file"',
        "form-data; name=purpose",
        'form-data; name="expires_after[anchor]"',
        'form-data; name="x"',
        "form-data",
        "",
        "form-data; name*=a; name*0=b",
        'attachment; name="file"',
        'form-data; name="file"; filename="\xff\u0100"',
        'form-data; name="file"; filename="..\\..\\a/b/../\x7f"',
        'form-data; name="; filename=";',
        "form-data;;;=;name",
    ]
)


@st.composite
def uploads(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(content type, body) of a form: a good one, with parts more, fewer, or odd."""
    content = b"\n".join(draw(st.lists(lines() | st.binary(max_size=30), max_size=3)))
    parts = [
        ('form-data; name="purpose"', b"batch"),
        (
            'form-data; name="file"; filename="in.jsonl"',
            draw(st.sampled_from([content, b"", b"\r\n--x-limi", b"\r"])),
        ),
    ]
    if draw(st.booleans()):
        parts.append((draw(_HEADER_VALUES), draw(st.binary(max_size=40))))
    if draw(st.integers(0, 5)) == 5:
        parts.pop(draw(st.integers(0, len(parts) - 1)))
    body = b""
    for value, data in draw(st.permutations(parts)):
        body += f"--{BOUNDARY}\r\nContent-Disposition: {value}\r\n\r\n".encode() + data + b"\r\n"
    body += draw(
        st.sampled_from([f"--{BOUNDARY}--\r\n", f"--{BOUNDARY}--", "", f"--{BOUNDARY}\r\n"])
    ).encode()
    kind = draw(
        st.sampled_from(
            [f"multipart/form-data; boundary={BOUNDARY}"] * 6
            + [
                "multipart/form-data",
                "application/json",
                "",
                'multipart/form-data; boundary=""',
                'a;b;c;=;"',
                "multipart/form-data; boundary=\xff",
                f"multipart/form-data; boundary*=a; boundary*0={BOUNDARY}",
                f"multipart/form-data; boundary*{'9' * 5_000}*=x; boundary={BOUNDARY}",
            ]
        )
    )
    return kind.encode("latin-1"), body
