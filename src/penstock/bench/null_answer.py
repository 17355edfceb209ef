"""What the null server reads of a body, and the bytes that it says, built beforehand: OpenAI's completions.

It knows no plan, no clock and no connection.
"""

from __future__ import annotations

import msgspec


class NullRequest(msgspec.Struct):
    """What is read of a body."""

    prompt: str | list[int] = ""
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.split()) if isinstance(self.prompt, str) else len(self.prompt)

    def lane(self, lanes: int) -> int:
        """Which of so many queues it stands in: told by the prompt's first id."""
        return self.prompt[0] % lanes if isinstance(self.prompt, list) and self.prompt else 0


read = msgspec.json.Decoder(NullRequest).decode  # raises msgspec.DecodeError
_TOP = b'{"id":"cmpl-3f2b8a7c6d5e4f3a2b1c0d9e8f7a6b5c","object":"text_completion","created":1763680000,"model":"null",'
_LINE = (
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":%b,"stop_reason":null}],"usage":null}\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = _chunk(b"data: " + _TOP + _LINE % b"null")
LAST = _chunk(b"data: " + _TOP + _LINE % b'"length"')
STREAM_HEAD = _HEAD % (b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")
REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


def ending(asked: NullRequest, tokens: int, cached: int) -> bytes:
    """The last event of a stream of so many tokens, its usage, [DONE]."""
    usage = b"data: " + _TOP + b'"choices":[],' + _usage(asked, tokens, cached) + b"}\n\n"
    return LAST + _chunk(usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def whole(asked: NullRequest, tokens: int, cached: int) -> bytes:
    """An answer that is not streamed."""
    choice = b'{"index":0,"text":"%b","logprobs":null,"finish_reason":"length"}' % (b" word" * tokens)
    body = _TOP + b'"choices":[' + choice + b"]," + _usage(asked, tokens, cached) + b"}"
    return _HEAD % (b"application/json", b"content-length: %d" % len(body)) + body


def _usage(asked: NullRequest, tokens: int, cached: int) -> bytes:
    prompt = asked.prompt_tokens
    details = b',"prompt_tokens_details":{"cached_tokens":%d}' % cached
    return b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d%b}' % (
        prompt, tokens, prompt + tokens, details,
    )  # fmt: skip
