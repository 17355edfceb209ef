"""`penstock bench answers`: a divergence that is right, engines that answer wrongly, and files that
are none."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bench_runs import run_of
from typer.testing import CliRunner

from penstock.almanac.record import WRONG_KL, Answers
from penstock.bench import answer_check
from penstock.bench.answer_check import Reference, divergence, measure_answers, read_reference
from penstock.bench.endpoint import Endpoint
from penstock.bench.runs import run_all
from penstock.cli.root import app
from penstock.errors import EngineError, UsageError

TEXTS = {str(token): f"<{token}>" for token in range(100)}
LATER = dict.fromkeys(range(10, 28), -12.0)
FIRST, SECOND = {5: -0.1, 6: -2.5, **LATER}, {7: -0.2, 8: -1.9, **LATER}


def ids(values: dict[int, float]) -> dict[str, float]:
    return {f"token_id:{token}": value for token, value in values.items()}


def test_a_divergence_is_that_of_the_two_distributions_over_the_references_tokens() -> None:
    rng = np.random.default_rng(0)
    p, q = (np.log(rng.dirichlet(np.ones(20)) * 0.9) for _ in range(2))
    told = list(enumerate(map(float, p)))
    found = dict(enumerate(map(float, q)))
    exact = float((np.exp(p) / 0.9 * (p - q)).sum())
    assert divergence(told, ids(found), TEXTS) == pytest.approx(exact)
    texts = {TEXTS[str(token)]: value for token, value in found.items()}
    assert divergence(told, texts, TEXTS) == pytest.approx(exact)
    assert divergence(told, ids(dict(told)), TEXTS) == pytest.approx(0, abs=1e-12)


def test_tokens_that_an_engine_does_not_name_count_as_its_least_one() -> None:
    told = [(1, math.log(0.5)), (2, math.log(0.5))]
    found = ids({1: math.log(0.9), 3: math.log(0.1)})
    assert divergence(told, found, TEXTS) == pytest.approx(
        0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    )
    assert divergence(told, ids({7: -1.0, 8: -2.0}), TEXTS) == pytest.approx(0.0)
    assert divergence(told, {}, TEXTS) == math.log(20)


@pytest.mark.parametrize("found", [{1: -0.7, 2: math.nan}, {1: math.nan, 2: -0.7}, {1: -math.inf}])
def test_logprobs_that_are_no_numbers_diverge_as_much_as_nothing_known(
    found: dict[int, float],
) -> None:
    told = [(1, math.log(0.5)), (2, math.log(0.5))]
    assert divergence(told, ids(found), TEXTS) == math.log(20)


def reference() -> Reference:
    top = [list(FIRST.items()), list(SECOND.items())]
    return Reference("tiny", [[1, 2], [3]], [[5, 7], [5, 7]], [top, top], TEXTS)


def answer(rows: list[dict[int, float]], form: str) -> dict[str, Any]:
    """An answer whose tokens are the likeliest of each row, in a form of logprobs."""
    best = [max(row, key=lambda token, of=row: of[token]) for row in rows]
    if form == "content":
        content = [
            {
                "id": token,
                "token": TEXTS[str(token)],
                "top_logprobs": [{"id": each, "logprob": value} for each, value in row.items()],
            }
            for token, row in zip(best, rows, strict=True)
        ]
        return {"choices": [{"logprobs": {"content": content}}]}
    name = (lambda token: f"token_id:{token}") if form == "ids" else (lambda t: TEXTS[str(t)])
    return {
        "choices": [
            {
                "logprobs": {
                    "tokens": [name(token) for token in best],
                    "top_logprobs": [
                        {name(each): value for each, value in row.items()} for row in rows
                    ],
                }
            }
        ]
    }


def asked(monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]) -> Answers:
    monkeypatch.setattr(answer_check, "_post", lambda target, body: told)
    return measure_answers(
        Endpoint("127.0.0.1", 1, model="m"), reference(), "0" * 64, "e 1", ["-a"]
    )


@pytest.mark.parametrize("form", ["ids", "texts", "content"])
def test_a_right_engine_diverges_by_nothing(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    made = asked(monkeypatch, answer([FIRST, SECOND], form))
    assert (made.agree, made.positions, made.wrong) == (1.0, 4, False)
    assert made.kl < 1e-9 and made.engine == "e 1" and made.flags == ["-a"]


@pytest.mark.parametrize("form", ["ids", "texts", "content"])
def test_an_engine_that_answers_wrongly_shows(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    made = asked(monkeypatch, answer([{6: -0.1, 5: -4.0}, {9: -0.2, 8: -1.9}], form))
    assert made.wrong and made.kl > WRONG_KL and made.kl_most >= made.kl
    assert (made.agree, made.positions) == (
        0.0,
        2,
    )  # what follows another token has another context


def test_an_answer_that_ends_early_counts_against_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = asked(monkeypatch, answer([FIRST], "ids"))
    assert (made.agree, made.positions, made.wrong) == (0.5, 4, True)


def test_an_engine_that_is_wrong_at_most_prompts_is_wrong_however_long_it_is_right_at_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = answer([FIRST] * 32, "ids")
    garbage = answer([{6: -0.1, 5: -4.0}] * 32, "ids")
    monkeypatch.setattr(
        answer_check, "_post", lambda target, body: right if body["prompt"] == [0] else garbage
    )
    asked_for = Reference(
        "tiny", [[at] for at in range(4)], [[5] * 32] * 4, [[list(FIRST.items())] * 32] * 4, TEXTS
    )
    made = measure_answers(Endpoint("127.0.0.1", 1, model="m"), asked_for, "0" * 64, "e 1", [])
    assert made.positions == 32 + 3  # of which 32 are right
    assert made.wrong and made.kl > 3 * WRONG_KL


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {"tokens": None, "top_logprobs": None},
        {"tokens": ["token_id:5", "token_id:7"], "top_logprobs": [{"token_id:5": -0.1}]},
        {"content": [{"id": 5, "top_logprobs": None}]},
    ],
)
def test_an_engine_without_logprobs_is_named(
    monkeypatch: pytest.MonkeyPatch, logprobs: dict[str, Any] | None
) -> None:
    with pytest.raises(EngineError, match="answered without logprobs of 20 tokens"):
        asked(monkeypatch, {"choices": [{"logprobs": logprobs}]})


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"model": "x"}', '{"model":"x","prompts":[],"tokens":[],"top":[],"texts":{}}'],
)
def test_a_file_that_is_no_reference_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match=r"r\.json"):
        read_reference(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"top": [[list(FIRST.items())], [list(FIRST.items())]]}, "differ in length"),
        ({"tokens": [[], []], "top": [[], []]}, "a prompt or a position without tokens"),
        ({"top": [[[], []], [[], []]]}, "a prompt or a position without tokens"),
        ({"top": [[[(at, -3.1) for at in range(20)]] * 2] * 2}, "too flat to show a wrong engine"),
    ],
)
def test_a_reference_that_can_show_no_wrong_engine_is_refused_in_a_line(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(msgspec.json.encode(reference()))
    assert read_reference(path)[0] == reference()
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(reference(), **changes)))
    with pytest.raises(UsageError, match=rf"r\.json.*{why}"):
        read_reference(path)


@pytest.mark.parametrize(
    ("theirs", "ours", "fault"),
    [
        (["--dtype", "bfloat16"], ("--dtype=bfloat16", "--max-model-len", "9"), None),
        (["--dtype", "bfloat16"], (), "--dtype bfloat16, and none is measured"),
        ([], ("--quantization", "fp8"), "--quantization left out, and fp8 is measured"),
        (["--kv-cache-dtype=fp8"], ("--kv-cache-dtype", "auto"), "fp8, and auto is measured"),
    ],
)
def test_answers_at_one_precision_vouch_for_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    theirs: list[str],
    ours: tuple[str, ...],
    fault: str | None,
) -> None:
    from penstock.cli.bench_commands import _answers_of

    subject = run_of(tmp_path, *ours).subject
    made = asked(monkeypatch, answer([FIRST, SECOND], "ids"))
    made = made.model_copy(update={"engine": "fake 1.2", "flags": theirs})
    (tmp_path / "a.json").write_text(made.model_dump_json())
    if fault is None:
        assert _answers_of(tmp_path / "a.json", subject) == made
        return
    with pytest.raises(UsageError, match=fault):
        _answers_of(tmp_path / "a.json", subject)


def test_a_record_holds_its_engines_answers_and_none_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = asked(monkeypatch, answer([{6: -0.1, 5: -4.0}, {9: -0.2, 8: -1.9}], "ids"))
    from dataclasses import replace

    (record,) = run_all(replace(run_of(tmp_path / "run"), answers=made))
    assert record.answers == made
    table = (tmp_path / "run/8x4/table.txt").read_text()
    assert "answers wrongly: ranked last" in table and "alike, with -a" in table
    (tmp_path / "answers.json").write_text(made.model_dump_json())
    words = ["bench", "run", "--engine", "penstock", "--model", "demo", "--shape", "8x4"]
    told = CliRunner().invoke(app, [*words, "--answers", str(tmp_path / "answers.json")])
    assert told.exit_code == 2 and "is of e 1, and penstock" in " ".join(told.output.split())
    (tmp_path / "answers.json").write_text(json.dumps({"kl": 1}))
    told = CliRunner().invoke(app, [*words, "--answers", str(tmp_path / "answers.json")])
    assert told.exit_code == 2 and "holds no answers" in told.output


class _Right(BaseHTTPRequestHandler):
    """An engine over HTTP whose answers are the reference's; with `refuses`, none."""

    refuses = False

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        asked = json.loads(self.rfile.read(length))
        assert (asked["logprobs"], asked["temperature"], asked["max_tokens"]) == (20, 0.0, 2)
        told = {"error": "no"} if self.refuses else answer([FIRST, SECOND], "ids")
        told = json.dumps(told).encode()
        self.send_response(400 if self.refuses else 200)
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("refuses", [False, True])
def test_the_command_writes_answers_or_says_in_a_line_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr(_Right, "refuses", refuses)
    (tmp_path / "ref.json").write_bytes(msgspec.json.encode(reference()))
    with ThreadingHTTPServer(("127.0.0.1", 0), _Right) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["bench", "answers", f"http://127.0.0.1:{server.server_port}", "--model", "m"]
        files = ["--reference", str(tmp_path / "ref.json"), "--out", str(tmp_path / "new/a.json")]
        told = CliRunner().invoke(app, [*words, *files, "--engine-name", "e"])
        server.shutdown()
    if refuses:
        assert told.exit_code == 1 and "status 400" in told.output
        assert not (tmp_path / "new/a.json").exists()
    else:
        assert "e unknown answers right: divergence" in told.output
        assert answer_check.read_answers(tmp_path / "new/a.json").positions == 4


def test_a_reference_is_greedy_and_its_logprobs_fall(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    root = Path(__file__).parents[2]
    words = [root / "benchmarks" / "reference_logprobs.py", root / "src/penstock/demo/model"]
    out = tmp_path / "ref.json"
    command = [sys.executable, *words, out, "--name", "demo", "--prompts", "2", "--tokens", "3"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    made, checksum = read_reference(out)
    assert (made.model, [len(each) for each in made.prompts], len(checksum)) == (
        "demo",
        [8, 500],
        64,
    )
    for tokens, top in zip(made.tokens, made.top, strict=True):
        assert [each[0][0] for each in top] == tokens and len(tokens) == 3
        for each in top:
            values = [value for _, value in each]
            assert values == sorted(values, reverse=True) and len(values) == 20
            assert sum(math.exp(value) for value in values) <= 1 + 1e-6
            assert all(str(token) in made.texts for token, _ in each)
