"""A tokenizer and a chat template that are not the model's: read where texts are, by LLM, a
server's client, sandboxes; and files that are none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_model import make_folder
from typer.testing import CliRunner

from penstock import LLM, AsyncLLM, Config, SamplingParams
from penstock.cli import app
from penstock.errors import UsageError

pytestmark = pytest.mark.torch

KNOBS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "kv_cache_tokens": 512,
}
TEMPLATE = "{% for m in messages %}pump {{ m.content }}{% endfor %} turns"
HELLO = [{"role": "user", "content": "water"}]


def test_they_take_the_place_of_the_models(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    other = tmp_path / "tokenizer"
    other.mkdir()
    (folder / "tokenizer.json").rename(other / "tokenizer.json")  # the model has none of its own
    (file := tmp_path / "chat.jinja").write_text(TEMPLATE)
    knobs = KNOBS | {"tokenizer": str(other), "chat_template": str(file)}
    asked = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), **knobs) as llm:
        (chat,) = llm.chat(HELLO, asked, use_tqdm=False)
        (text,) = llm.generate("pump water turns", asked, use_tqdm=False)
    assert chat.prompt == "pump water turns" and chat.prompt_token_ids == text.prompt_token_ids
    assert text.outputs[0].text == chat.outputs[0].text != ""

    async def beside() -> str:
        async with AsyncLLM(str(folder), **knobs) as engine:
            out = [out async for out in engine.generate("pump water turns", asked)][-1]
            client = await engine._ready()
            assert client.tokenizer is not None and client.tokenizer.chat_template == TEMPLATE
            return out.outputs[0].text

    assert asyncio.run(beside()) == text.outputs[0].text


def test_files_that_are_none_are_one_line(tmp_path: Path) -> None:
    (blob := tmp_path / "blob.jinja").write_bytes(b"\xff\xfe")
    for words, said in [
        (
            ["--chat-template", str(tmp_path / "none.jinja")],
            "cannot be read (No such file or directory)",
        ),
        (["--chat-template", str(tmp_path)], "cannot be read (Is a directory)"),
        (["--chat-template", str(blob)], "is not UTF-8 text"),
        (["--chat-template", TEMPLATE], "give a file with a Jinja template"),
        (["--tokenizer", str(blob)], "is no folder here: give a folder with a tokenizer.json"),
        (
            ["--tokenizer", str(tmp_path), "--skip-tokenizer-init"],
            "read by nobody with --skip-tokenizer-init",
        ),
    ]:
        ended = CliRunner().invoke(app, ["serve", "no-such-model", *words])
        assert ended.exit_code == 2 and said in ended.output and ended.output.count("\n") == 1, (
            ended.output
        )
    with pytest.raises(UsageError, match="no-such-file"):
        LLM(chat_template="no-such-file")
    assert Config.of(model="m", tokenizer="m").model.tokenizer is None, (
        "as scripts for vLLM often say it"
    )
