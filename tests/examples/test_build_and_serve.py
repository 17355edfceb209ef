"""The example as its readers run it, on the demo model: a batch, what lies past what was built for,
the endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fitted_service
import pytest
from fitted_service import FittedService, Settings
from service_app import make_app, openapi
from service_prompts import PROMPTS, all_prompts
from starlette.testclient import TestClient

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "build_and_serve"
FEW = Settings(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def service() -> Iterator[FittedService]:
    service = FittedService("demo")
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: FittedService) -> TestClient:
    return TestClient(make_app(service))


def test_there_are_128_prompts_of_ten_kinds() -> None:
    assert len(PROMPTS) == 10 and len(all_prompts()) == len(set(all_prompts())) == 128


def test_a_batch_is_answered_in_order(service: FittedService) -> None:
    batch = service.answer(all_prompts()[:12], FEW)
    alone = service.answer(all_prompts()[3:4], FEW)
    assert len(batch.answers) == 12 and batch.answers[3] == alone.answers[0]
    tokens = sum(answer.tokens for answer in batch.answers)
    assert batch.tokens_per_second == pytest.approx(tokens / batch.seconds) and tokens > 12


def test_settings_reach_the_model(service: FittedService) -> None:
    plain = {"max_tokens": 60, "temperature": 0.0, "repetition_penalty": 1.0}

    def text(**more: Any) -> str:
        return (
            service.answer(["Tom has 3 apples and Ann has 5."], Settings(**{**plain, **more}))
            .answers[0]
            .text
        )

    greedy = text()
    stop = greedy[len(greedy) // 2 :][:3]
    assert text(stop_words_list=[stop]) == greedy[: greedy.index(stop)]
    assert greedy != text(temperature=2.0, top_k=0) and text(temperature=2.0, top_k=1) == greedy
    assert any(text(repetition_penalty=penalty) != greedy for penalty in (0.5, 2.0))


def test_what_is_longer_than_built_for_runs_and_what_is_too_long_is_one_prompts_own(
    service: FittedService,
) -> None:
    long, too_long = "word " * 400, "word " * 4000
    batch = service.answer([long, too_long, "Short."], FEW)
    assert batch.answers[0].error is None and batch.answers[2].tokens > 0
    assert batch.answers[1].error is not None and "maximum context length" in batch.answers[1].error


def test_the_endpoint_answers(client: TestClient) -> None:
    asked = {
        "prompts": ["Why does ice float?"] * 3,
        "settings": {"max_tokens": 5, "temperature": 0},
    }
    answer = client.post("/generate", json=asked)
    assert answer.status_code == 200
    assert [each["tokens"] for each in answer.json()["answers"]] == [5, 5, 5]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"prompts": []}',
        b'{"prompts": ["a"], "settings": {"top_p": 1}}',
        b'{"prompts": "a"}',
    ],
)
def test_a_body_of_another_form_is_refused_field_by_field(body: bytes, client: TestClient) -> None:
    answer = client.post("/generate", content=body)
    assert answer.status_code == 422 and answer.json()["detail"]


def test_what_the_model_refuses_is_a_line(client: TestClient) -> None:
    answer = client.post(
        "/generate", json={"prompts": ["a"], "settings": {"stop_words_list": [""]}}
    )
    assert answer.status_code == 400 and "empty string" in answer.json()["detail"]


def test_the_documents_name_every_setting(client: TestClient) -> None:
    assert client.get("/openapi.json").json() == openapi()
    settings = openapi()["components"]["schemas"]["Settings"]["properties"]
    assert settings.keys() == Settings.model_fields.keys()
    page = client.get("/docs").text
    assert all(name in page for name in settings)
    readme = (EXAMPLE / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in settings)


def test_the_command_ends_in_its_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fitted_service, "Settings", lambda **told: Settings(**{"max_tokens": 2, **told})
    )
    fitted_service.main("demo")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("128 prompts, ") and last.endswith("output tok/s")
