"""The targets of fuzz_targets.py, fuzzed by coverage: bytes that reach new lines of ours are kept and bent further.

    python tests/reliability/fuzz_guided.py TARGET [SECONDS] [CORPUS]        all: each in turn, in a process of its own

It needs atheris (Linux, Python 3.11 to 3.13: `pip install atheris`), which nothing else here does: hypothesis draws
what `make test` and `make reliability` try. A fault ends it with a traceback, and its bytes in a file `crash-...`.
It knows seeds; what a fault is, the targets say.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cpu")]

import atheris  # noqa: E402

with atheris.instrument_imports(include=["penstock"], enable_loader_override=False):
    import fuzz_app
    import fuzz_inputs
    import fuzz_model_files
    import fuzz_targets
    import server_fake  # noqa: F401 - with it the server's modules
    from fuzz_bounds import check_error
    from service import make_folder

    import penstock.engine.channel as channel
    import penstock.jobs.input_rows
    import penstock.jobs.problems
    import penstock.models.generation_config
    import penstock.models.model_config
    import penstock.server.batch.manager
    import penstock.server.batch.upload
    import penstock.weights.checkpoint  # noqa: F401
    from penstock.engine.engine import Refused
    from penstock.errors import JournalError
    from penstock.journal import Journal
    from penstock.request import Request, SamplingParams

Target = tuple[Callable[[bytes], Any], list[bytes]]  # what takes the bytes, and bytes to begin with
PROMPT, CHAT = {"prompt": "ab", "max_tokens": 3}, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
RICH = {
    "n": 2, "stop": ["x"], "logit_bias": {"1": 2}, "seed": 1, "stream": True, "stream_options": {"include_usage": True},
    "echo": True, "logprobs": 2, "stop_token_ids": [1], "temperature": 0.5, "cache_salt": "a", "timeout": 5,
}  # fmt: skip


def configs(folder: Path) -> Target:
    return lambda data: fuzz_targets.config(folder, data), [
        json.dumps(each).encode() for each in fuzz_model_files.CONFIGS
    ]


def generation_configs(folder: Path) -> Target:
    seed = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 9, "num_beams": 1}
    return lambda data: fuzz_targets.generation_config(folder, data), [json.dumps(seed).encode()]


def tokenizer_configs(folder: Path) -> Target:
    make_folder(folder)
    seed = {"bos_token": {"content": "a"}, "additional_special_tokens": ["b"], "chat_template": [{"name": "default"}]}
    return lambda data: fuzz_targets.tokenizer_config(folder, data), [json.dumps(seed).encode()]


def shards(folder: Path) -> Target:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}, "__metadata__": {"x": "y"}})

    def read(data: bytes) -> None:
        (folder / "model.safetensors").write_bytes(data)
        fuzz_targets.checkpoint(folder)

    return read, [len(header).to_bytes(8, "little") + header.encode() + bytes(32), b"version https://git-lfs"]


def headers(folder: Path) -> Target:
    """As shards, its length always right."""
    read, (seed, _) = shards(folder)
    return lambda data: read(len(data).to_bytes(8, "little") + data + bytes(64)), [seed[8:-32]]


def rows(folder: Path) -> Target:
    seeds = [
        {"id": 1, **PROMPT, "n": 2},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    ]
    return fuzz_targets.row, [json.dumps(seed).encode() for seed in seeds]


def lines(folder: Path) -> Target:
    body = {**PROMPT, "model": "fake"}
    seed = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    return fuzz_targets.LineCheck().good, [json.dumps(seed).encode()]


def splits(folder: Path) -> Target:
    def read(data: bytes) -> None:
        if len(data) > 2:
            fuzz_targets.split(folder / "lines", data[2:], longest=1 + data[0] % 32, read=1 + data[1])

    return read, [b"\x09\x09\xef\xbb\xbfaaa\n\r\nbb\xe2\x80\xa8\n" + b"c" * 60 + b"\n\n"]


def uploads(folder: Path) -> Target:
    mark = fuzz_inputs.BOUNDARY
    seed = f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--{mark}--\r\n'

    def read(data: bytes) -> None:
        kind = f"multipart/form-data; boundary={mark}".encode()
        for middle in (0, len(data) // 2):
            fuzz_targets.form(kind, [data[:middle], data[middle:]])

    return read, [seed.encode(), seed.replace("file", "purpose").encode()]


def completions(folder: Path) -> Target:
    app = fuzz_app.App(folder)
    seeds = [PROMPT, {**PROMPT, **RICH}, {**PROMPT, "prompt": [[1, 2], [3]]}]
    return lambda data: app.sample(fuzz_app.COMPLETIONS, [data]), [json.dumps(seed).encode() for seed in seeds]


def chats(folder: Path) -> Target:
    app = fuzz_app.App(folder)
    rich = {name: value for name, value in RICH.items() if name not in ("echo", "logprobs")}
    seeds = [CHAT, {**CHAT, **rich, "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"shout": 1}}]
    return lambda data: app.sample(fuzz_app.CHAT, [data]), [json.dumps(seed).encode() for seed in seeds]


def words_up(folder: Path) -> Target:
    wire = channel.Wire()
    words = [
        channel.Failed("EngineError", "x", None),
        channel.News(None, [Refused(0, "UsageError", "x", "n")], {"a": 1.0}),
    ]
    end = wire.encode(channel.Failed("EngineError", "the end", None))
    return lambda data: fuzz_targets.heard([data], end), [wire.encode(word) for word in words]


def words_down(folder: Path) -> Target:
    wire, loop = channel.Wire(), fuzz_targets.EngineLoop(folder)
    request = Request(request_id=0, prompt=bytes(12), sampling=SamplingParams(n=2, max_tokens=4, stop_token_ids=[3]))
    words = [channel.Ask(request), channel.Cancel(0, 1), channel.Close()]
    return lambda data: loop.turn([data]), [wire.encode(word) for word in words]


def journals(folder: Path) -> Target:
    """Bytes behind the first half of a journal."""
    out = folder / "out.jsonl"
    with Journal(out, {}) as whole:
        for number in range(20):
            whole.add(number, {"n": number})
    data, lines = out.read_bytes(), (folder / "out.jsonl.journal").read_bytes()
    half = lines[: lines.index(b"\n", len(lines) // 2) + 1]
    known = half.count(b"\n") - 1

    def read(tail: bytes) -> None:
        out.write_bytes(data)
        (folder / "out.jsonl.journal").write_bytes(half + tail)
        try:
            with Journal(out, {}) as opened:
                done = [number in opened for number in range(20)]
        except JournalError as error:
            check_error(error)
        else:
            assert done == [True] * sum(done) + [False] * (20 - sum(done)) and sum(done) >= known

    return read, [lines[len(half) :], b"00000000 \n"]


TARGETS = {
    made.__name__: made
    for made in (
        configs, generation_configs, tokenizer_configs, shards, headers, rows, lines, splits, uploads, completions,
        chats, words_up, words_down, journals,
    )
}  # fmt: skip


def main() -> int:
    asked = sys.argv[1:]
    if not asked or asked[0] not in (*TARGETS, "all"):
        print(f"usage: fuzz_guided.py TARGET [SECONDS] [CORPUS]; targets: all, {', '.join(TARGETS)}")
        return 2
    name, seconds = asked[0], asked[1] if len(asked) > 1 else "60"
    if name == "all":
        return max(subprocess.run([sys.executable, __file__, each, seconds]).returncode for each in TARGETS)
    with tempfile.TemporaryDirectory() as place:
        folder, corpus = Path(place) / "work", Path(asked[2] if len(asked) > 2 else f"{place}/corpus")
        folder.mkdir()
        corpus.mkdir(exist_ok=True)
        target, seeds = TARGETS[name](folder)
        for number, seed in enumerate(seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        options = [f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=8192", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], target)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
