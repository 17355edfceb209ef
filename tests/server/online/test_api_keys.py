"""What keys are called: what belongs to a key (files, batches) belongs to its name."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.server.online.api_keys import ENVIRONMENT, gather_keys


def name_of(key: str) -> str:
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:8]


def test_a_key_is_called_the_same_whatever_stands_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nname = "team"\nkey = "d"\n')
    for count in (1, 2, 3):
        for given in itertools.permutations(["a", "b", "c"], count):
            for named in (None, file):
                found = {key.name: key.digest for key in gather_keys(given, named, {})}
                assert found.pop("team", None) == (None if named is None else hashlib.sha256(b"d").hexdigest())
                assert found == {name_of(key): hashlib.sha256(key.encode()).hexdigest() for key in given}


def test_the_environments_key_is_called_as_an_options() -> None:
    assert gather_keys((), None, {ENVIRONMENT: "a"}) == gather_keys(["a"], None, {})


def test_a_file_names_a_key_that_was_an_option_before(tmp_path: Path) -> None:
    """So a key may change and keep its files."""
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "{name_of("old")}"\nkey = "new"\n')
    (key,) = gather_keys((), file, {})
    assert key.name == name_of("old") and key.digest == hashlib.sha256(b"new").hexdigest()
    with pytest.raises(UsageError, match="same name"):
        gather_keys(["old"], file, {})
