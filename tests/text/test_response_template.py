"""Answers read by a model's own response_template: as transformers reads them, however the text is
cut; what no template is, and what takes too long, is said."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fuzz_inputs import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import qwen2

from penstock.errors import TokenizerError
from penstock.text.parsers.response_template import TemplateReader, read_template
from penstock.text.parsers.tool import Tool
from penstock.text.tokenizer import Tokenizer

# Three ways to write a call: JSON in marks, tags in marks, a dialect of JSON whose name stands in
# the mark.
QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}
TAGS = {
    **QWEN,
    "fields": {
        **QWEN["fields"],  # type: ignore[dict-item]
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}
DIALECT = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": ["<turn|>", "<eos>"], "content": "text"},
    },
}
LIST = {
    "start_anchor": "[/INST]",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close": "</s>",
            "content": "json",
            "transform_each": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
        },
        "content": {"content": "text"},
    },
}
TEMPLATES: dict[str, Any] = {"json": QWEN, "tags": TAGS, "dialect": DIALECT, "list": LIST}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [Tool(name="w", parameters=SCHEMA)]
CASES = [
    ("json", "<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nHello!"),
    ("json", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nHello!<|im_end|>"),
    (
        "json",
        "",
        (
            'Well.\n<tool_call>\n{"name": "w", "arguments": {"city": "Köln", "days":'
            ' 3}}\n</tool_call>\n<tool_call>{"name": "w", "arguments": {}}</tool_call>'
        ),
    ),
    (
        "tags",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        (
            "Well.\n\n<tool_call>\n<function=w>\n<parameter=city>\nOslo\n"
            "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
        ),
    ),
    (
        "dialect",
        "<|turn>model\n",
        (
            '<|channel>thought\nhm\n<channel|>Yes<|tool_call>call:w{city:<|"|>O "x"<|"|>,days:3}'
            "<tool_call|>"
        ),
    ),
    (
        "list",
        "[/INST]",
        (
            'So:[TOOL_CALLS][{"name": "w", "arguments": {"city": "a"}}, {"name": "w", "arguments":'
            " {}}]</s>"
        ),
    ),
    ("list", "[/INST]", "  Only text, [TOO"),
]


def read(
    name: str, prompt: str, text: str, cuts: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    stopped = more.pop("stopped", False)
    reader = TemplateReader(
        read_template(TEMPLATES[name]),
        prompt,
        more.pop("tools", TOOLS),
        **{"parallel": True, **more},
    )
    ends = [0, *sorted(cuts or []), len(text)]
    pieces = [piece for begin, end in pairwise(ends) for piece in reader.feed(text[begin:end])]
    pieces += reader.end(stopped=stopped)
    found: dict[str, Any] = {"calls": []}
    for piece in pieces:
        if piece.kind == "name":
            found["calls"].append([piece.text, ""])
        elif piece.kind == "arguments":
            found["calls"][-1][1] += piece.text
        else:
            found[piece.kind] = found.get(piece.kind, "") + piece.text
    assert reader.called == len(found["calls"])
    return found


@pytest.mark.torch
@pytest.mark.parametrize("name, prompt, text", CASES, ids=lambda value: repr(value)[:30])
def test_it_is_read_as_transformers_reads_it(name: str, prompt: str, text: str) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    want = parsing.parse_response(
        text, TEMPLATES[name], prefix=prompt, tools=[tool.told() for tool in TOOLS]
    )
    found = read(name, prompt, text)
    assert found.get("content") == want.get("content")
    assert found.get("reasoning") == want.get("reasoning_content", want.get("thinking"))
    calls = [
        (each["function"]["name"], each["function"]["arguments"])
        for each in want.get("tool_calls", [])
    ]
    assert [(each, json.loads(arguments)) for each, arguments in found["calls"]] == calls
    assert read(name, prompt, text, list(range(1, len(text)))) == found
    assert calls or found.get("content"), "there is something to read"


_BITS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "w"',
    ', "arguments": {}}',
    "\n",
    " ",
    "a",
    "<|im_end|>",
    "<function=w>",
    "<parameter=city>",
    "</parameter>",
    "</function>",
    "<|tool_call>call:w",
    "<tool_call|>",
    "{city:",
    "}",
    '<|"|>',
    "<|channel>thought\n",
    "<channel|>",
    "[TOOL_CALLS]",
    "</s>",
    '[{"name": "w", "arguments": 3}]',
    "<",
]


@settings(max_examples=examples(100), deadline=None)
@given(
    bits=st.lists(st.sampled_from(_BITS), max_size=12),
    name=st.sampled_from([*TEMPLATES]),
    data=st.data(),
)
def test_any_text_is_read_alike_however_it_is_cut(
    bits: list[str], name: str, data: st.DataObject
) -> None:
    text = "".join(bits)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    assert read(name, "", text, cuts) == read(name, "", text)


def test_what_is_no_call_is_text() -> None:
    call = '<tool_call>{"name": "w", "arguments": {}}</tool_call>'
    assert read("json", "", "a " + call, tools=[]) == {"calls": [], "content": "a" + " " + call}
    assert read("json", "", "<tool_call>nothing</tool_call>") == {
        "calls": [],
        "content": "<tool_call>nothing</tool_call>",
    }
    assert read("json", "", '<tool_call>{"name": "w"') == {
        "calls": [],
        "content": '<tool_call>{"name": "w"',
    }
    assert len(read("json", "", call + call, parallel=False)["calls"]) == 1
    for other in ('{"name": "no", "arguments": {}}', '{"name": "w", "arguments": [1]}'):
        text = f"<tool_call>{other}</tool_call>"
        assert read("json", "", text) == {"calls": [], "content": text}


def test_only_json_leaves_as_arguments() -> None:
    call = (
        '<tool_call>{"name": "w", "arguments": {"city": "\\ud800", "days": NaN, "x":'
        " [1e999]}}</tool_call>"
    )
    ((_, arguments),) = read("json", "", call)["calls"]
    assert arguments.encode() and json.loads(arguments, parse_constant=pytest.fail) == {
        "city": "\ud800",
        "days": "NaN",
        "x": ["Infinity"],
    }
    text = '<tool_call>{"name": "w", "arguments": "{\'city\': None}"}</tool_call>'
    assert read("json", "", text)["calls"] == [["w", '{"city": null}']]


def test_a_call_whose_end_the_model_left_out() -> None:
    text = '[TOOL_CALLS][{"name": "w", "arguments": {"days": 1}}]'
    assert read("list", "[/INST]", text, stopped=True)["calls"] == [["w", '{"days": 1}']]
    assert read("list", "[/INST]", text) == {"calls": [], "content": text}


@pytest.mark.parametrize(
    "spec, says",
    [
        ([], "must be an object of version 1"),
        ({**QWEN, "version": 2}, "must be an object of version 1"),
        ({**QWEN, "extra": 1}, "a key 'extra' that is not known"),
        ({"fields": {}}, "must have a start_anchor"),
        ({**QWEN, "fields": {"a": {}, "b": {}}}, "at most one field without open"),
        ({**QWEN, "fields": {"a": {"open": ""}}}, "a open that is no text"),
        ({**QWEN, "fields": {"a": {"open_pattern": "("}}}, "is no regex"),
        ({**QWEN, "fields": {"a": {"content": "yaml"}}}, "a content in a that is none of"),
        ({**QWEN, "fields": {"a": {"opens": "x"}}}, "a key 'opens' in a"),
    ],
)
def test_what_is_no_template_is_said(spec: Any, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        read_template(spec)


def test_a_regex_that_runs_away_ends_its_answer() -> None:
    spec = {**QWEN, "fields": {"content": {}, "a": {"open_pattern": "(x+x+)+y"}}}
    reader = TemplateReader(read_template(spec), "", [], parallel=True)
    with pytest.raises(TokenizerError, match="takes too long on this answer"):
        reader.feed("x" * 5_000)


def test_marks_without_text_come_to_an_end() -> None:
    fields = {"content": {}, "reasoning": {"open_pattern": "(?=a)", "close_pattern": "(?=a)"}}
    reader = TemplateReader(read_template({**QWEN, "fields": fields}), "", [], parallel=True)
    with pytest.raises(TokenizerError, match="comes to no end"):
        reader.feed("abc")


def test_a_tokenizer_has_its_models_template(tmp_path: Path) -> None:
    folder = qwen2(tmp_path / "m")
    assert Tokenizer.load(folder).response_template is None
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": QWEN}))
    template = Tokenizer.load(folder).response_template
    assert template is not None and [region.name for region in template.regions] == [
        *QWEN["fields"]
    ]
