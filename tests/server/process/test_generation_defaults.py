"""What a model's generation_config.json asks for and no answer gets is said once, whatever number of servers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from service import Serving, make_folder

from penstock.server.process.site import tell_unserved

pytestmark = pytest.mark.torch


def told(folder: Path, **said: Any) -> str:
    (folder / "generation_config.json").write_text(json.dumps(said))
    err = io.StringIO()
    tell_unserved(folder, err)
    return err.getvalue()


def test_what_changes_samples_and_is_not_served_is_named(tmp_path: Path) -> None:
    tell_unserved(tmp_path, err := io.StringIO())
    assert err.getvalue() == ""  # a checkpoint without the file is sound
    assert told(tmp_path, temperature=0.6, eos_token_id=[1, 2], no_repeat_ngram_size=0, do_sample=True) == ""
    line = told(tmp_path, temperature=0.6, no_repeat_ngram_size=3, typical_p=0.9)
    assert "asks for no_repeat_ngram_size, typical_p:" in line and line.endswith("\n") and "temperature" not in line


def test_it_is_one_line_without_the_folder_whatever_the_keys_are(tmp_path: Path) -> None:
    line = told(tmp_path, **{"odd\nkey\x1b[2J": 1})
    assert line.count("\n") == 1 and "\x1b" not in line and "odd" in line and str(tmp_path) not in line


def test_of_two_servers_one_says_it(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "no_repeat_ngram_size": 3}')
    with Serving(tmp_path, servers=2) as serving:
        said = serving.stderr()
    assert [line for line in said.splitlines() if "no_repeat_ngram_size" in line] == said.splitlines() != []
    assert len(said.splitlines()) == 1
