"""get_tokenizer() by transformers' names, against transformers' own over the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.demo import model_folder
from penstock.errors import UsageError
from penstock.llm.hf_tokenizer import HfTokenizer
from penstock.sandbox.sandbox import Sandbox
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if loud %}LOUD{% endif %}{% if add_generation_prompt %}>{% endif %}"
)
CHAT = [{"role": "user", "content": "Tom has 3 apples."}]
TEXTS = ["Tom has 3 apples.", "a b", "naïve – 12 + 30 = 42\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, with a template."""
    made = tmp_path_factory.mktemp("model")
    for path in model_folder().iterdir():
        (made / path.name).symlink_to(path)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[Any]:
    tokenizer = Tokenizer.load(folder)
    sandbox = Sandbox.open(tokenizer, 512)
    yield HfTokenizer.over(tokenizer, sandbox.run)
    sandbox.close()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_texts(ours: Any, theirs: Any) -> None:
    for text in (TEXTS[0], TEXTS):
        for special in (True, False):
            made, wanted = (
                ours(text, add_special_tokens=special),
                theirs(text, add_special_tokens=special),
            )
            assert made == {name: wanted[name] for name in ("input_ids", "attention_mask")}
    ids = ours(TEXTS)["input_ids"]
    assert ours.batch_decode(ids) == theirs.batch_decode(ids, skip_special_tokens=True)
    assert ours.convert_ids_to_tokens(ids[0]) == theirs.convert_ids_to_tokens(ids[0])
    assert ours.convert_tokens_to_ids(ours.convert_ids_to_tokens(ids[0])) == ids[0]
    assert ours.convert_ids_to_tokens(ids[0][0]) == theirs.convert_ids_to_tokens(ids[0][0])


def test_what_it_is(ours: Any, theirs: Any) -> None:
    names = ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert len(ours) == len(theirs) and ours.all_special_ids == sorted(theirs.all_special_ids)


def test_chats(ours: Any, theirs: Any) -> None:
    for how in ({}, {"add_generation_prompt": True}, {"loud": True}):
        text = ours.apply_chat_template(CHAT, tokenize=False, **how)
        assert text == theirs.apply_chat_template(CHAT, tokenize=False, **how)
        ids = ours.apply_chat_template(CHAT, **how)
        assert ids == theirs.apply_chat_template(CHAT, return_dict=False, **how)
        assert ours.apply_chat_template(CHAT, return_dict=True, **how)["input_ids"] == ids
        assert ours.apply_chat_template([CHAT, CHAT], **how) == [ids, ids]
    with pytest.raises(UsageError, match="the engine's chat_template is used"):
        ours.apply_chat_template(CHAT, chat_template="{{ messages }}")
