"""What the server's tests share: the tokenizer of one token a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from server_fake import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
