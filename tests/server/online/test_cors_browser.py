"""A page of another origin asks the server, in a browser: it reads a stream where it is allowed,
and nothing where it isn't. Skipped without a browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import page_browser
import pytest
from server_fake import make_tokenizer, running_server

from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy, check_origins

pytestmark = pytest.mark.torch

KEY = "secret"
# As the official client asks from a page: JSON, a key, headers of its own, a stream read as it
# comes.
ASK = """async ([url, key]) => {
  try {
    const answer = await fetch(url + "/v1/completions", {
      method: "POST",
      headers: {"content-type": "application/json", "authorization": "Bearer " + key, "x-stainless-lang": "js"},
      body: JSON.stringify({prompt: [5, 6], max_tokens: 3, stream: true}),
    });
    const reader = answer.body.getReader(), decoder = new TextDecoder();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) text += decoder.decode(part.value);
    return [answer.status, answer.headers.get("x-request-id") !== null, text];
  } catch (error) {
    return [0, false, String(error)];
  }
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """Says nothing."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The origin of a page of somebody else's."""
    (folder := tmp_path / "site").mkdir()
    (folder / "index.html").write_text("<title>A page</title>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("allowed", [True, False])
def test_a_page_reads_a_stream_where_its_origin_is_allowed(
    allowed: bool, site: str, tmp_path: Path
) -> None:
    if (why := page_browser.missing()) is not None:
        pytest.skip(why)
    access = AccessPolicy(
        keys=gather_keys([KEY], None, {}),
        origins=check_origins([site if allowed else "https://app.example"]),
    )
    with (
        running_server(make_tokenizer(tmp_path), access=access) as server,
        page_browser.chromium() as browser,
    ):
        page = browser.new_page()
        page.set_default_timeout(page_browser.LONG)
        page.goto(site)
        status, has_id, text = page.evaluate(ASK, [server.url, KEY])
        if not allowed:
            assert status == 0 and "Failed to fetch" in text
            return
        assert (status, has_id) == (200, True) and text.rstrip().endswith("data: [DONE]")
        assert page.evaluate(ASK, [server.url, "wrong"])[0] == 401, "an error is read, too"
