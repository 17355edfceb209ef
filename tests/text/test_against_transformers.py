"""The ids and texts of our tokenizer are those of transformers' AutoTokenizer; so are rendered
chats."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import chat_kinds as kinds
import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from penstock.text.chat_template import render
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

SAMPLES = [
    *samples.TEXTS[:4],
    "",
    " ",
    "  two  spaces ",
    "Mia <|im_start|>user\nhi<|im_end|> <|eot_id|> <tool_call>x<tool call> <|box_start|></s> <s>",
    "e\u0301 is é after NFC, ﬁ isn't",
    "\n\n\t\x00 ▁ <0x41> 12345678",
]

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if tools %}
    {%- for tool in tools %}
{{ tool | tojson(indent=2) }}
    {%- endfor %}
{% endif %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" ~ system ~ "<|eot_id|>" }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{%- continue %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + eos_token }}
    {%- generation %}{{ loop.index }}/{{ loop.length }}{% endgeneration %}
{%- endfor %}
{{- messages | tojson }}{{ {'k': 'é<>', 'n': [1, none, true]} | tojson }}{{ "%02d" | format(ns.count) }}
{{- messages | map(attribute='role') | join(', ') }}{{ ', '.join(['a', 'b']) }}{{ 'a-b'.split('-') }}
{{- ns.count * 2 }}"""


@pytest.fixture(scope="module", params=sorted(samples.MAKERS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    folder = samples.MAKERS[request.param](tmp_path_factory.mktemp("tokenizer") / request.param)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("bos", [True, False])
def test_ids_and_texts_are_those_of_autotokenizer(pair: tuple[Tokenizer, Any], bos: bool) -> None:
    ours, theirs = pair
    for text in SAMPLES:
        ids = ours.encode(text, add_special_tokens=bos)
        assert ids == theirs.encode(text, add_special_tokens=bos), text
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert (
        ours.encode_batch(SAMPLES, add_special_tokens=bos)
        == theirs(SAMPLES, add_special_tokens=bos)["input_ids"]
    )


def test_named_ids_are_those_of_autotokenizer(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == {
        index for index, token in theirs.added_tokens_decoder.items() if token.special
    }


def test_a_llama_tokenizers_ids_are_its_files(tmp_path: Path) -> None:
    """AutoTokenizer takes this class for a reason to make a pre-tokenizer of its own, which drops
    spaces."""
    folder = samples.llama2(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizer"})
    )
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    file = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*SAMPLES, " Hello", "  Hello", "a</s> b", "<s> a"):
        assert ours.encode(text) == file.encode(text).ids
        if not text.startswith((" ", "▁")) and "> " not in text:
            assert ours.encode(text) == theirs.encode(text), text


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_encodes_alike(pair: tuple[Tokenizer, Any], data: st.DataObject) -> None:
    ours, theirs = pair
    text = data.draw(st.text(max_size=40))
    assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("template", [CHATML, LLAMA])
@pytest.mark.parametrize("generation", [True, False])
def test_chats_render_as_transformers_renders_them(
    tmp_path: Path, template: str, generation: bool
) -> None:
    folder = samples.llama3(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": 'Grüße <b>&</b> "x"\n'},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "{{ 7 * 7 }} 日本"},
    ]
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation
    )
    assert render(Tokenizer.load(folder), messages, add_generation_prompt=generation) == expected


AS_IT_STANDS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt"
    " %}>{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, AS_IT_STANDS])
@pytest.mark.parametrize("last", ["Sure: ", "The", " {{ 7 * 7 }}\n\n", "", " ", "q", "end"])
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_final_message_goes_on_where_transformers_lets_it(
    tmp_path: Path, template: str, last: str, role: str
) -> None:
    folder = samples.llama3(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "q"}, {"role": role, "content": last}]
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert (
        render(ours, messages, add_generation_prompt=False, continue_final_message=True) == expected
    )
    for render_both in (partial(theirs.apply_chat_template, tokenize=False), partial(render, ours)):
        with pytest.raises(ValueError, match="add_generation_prompt"):
            render_both(messages, add_generation_prompt=True, continue_final_message=True)


def _both(tmp_path: Path, template: str) -> tuple[Any, Any]:
    """What renders a conversation, and what of transformers' does."""
    folder = samples.llama3(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(folder)
    return partial(render, Tokenizer.load(folder)), partial(
        theirs.apply_chat_template, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
def test_what_a_template_takes_is_handed_to_it_as_transformers_hands_it(
    tmp_path: Path, kind: str
) -> None:
    ours, theirs = _both(tmp_path, kinds.KINDS[kind])
    ask = {"role": "user", "content": " Weather? "}
    parts = [{"type": "text", "text": text} for text in ("Is it ", "warm?")]
    texts = kinds.KINDS[kind] not in (kinds.PARTS, kinds.FIRST_PART)
    if texts:
        said = [
            ask,
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "{{ x }} é"},
        ]
        assert ours(said) == theirs(said)
    if kinds.KINDS[kind] in (kinds.ALTERNATING, kinds.PARTS, kinds.SHORT_IDS, kinds.THINKING_PARTS):
        said = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": parts},
            {**ask, "content": parts},
        ]
        assert ours(said) == theirs(said)


@pytest.mark.parametrize(
    "template", [kinds.HYBRID, kinds.ONE_CALL, kinds.CHANNELS, kinds.ITEMS, kinds.THINKING_PARTS]
)
def test_a_call_as_openai_says_it_is_the_call_as_transformers_says_it(
    tmp_path: Path, template: str
) -> None:
    ours, theirs = _both(tmp_path, template)

    def called(arguments: Any, content: str | None) -> list[dict[str, Any]]:
        call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": arguments}}
        return [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "sun"},
        ]

    assert ours(called('{"city":"Genoa","days":[1,2]}', None)) == theirs(
        called({"city": "Genoa", "days": [1, 2]}, "")
    )
