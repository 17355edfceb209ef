"""What the server's tests share: the tokenizer of one token a byte, and one TLS context for all
HTTP clients."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import httpx._transports.default as transports
import pytest

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


# Nothing here speaks TLS, and each client reads the machine's certificates, which takes 35 ms.
transports.create_ssl_context = cache(transports.create_ssl_context)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from server_fake import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
