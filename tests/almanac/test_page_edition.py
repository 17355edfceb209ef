"""The page on editions: their intervals, power, answers that are wrong, releases, machines and jobs,
in a real browser."""

from __future__ import annotations

import ast
import copy
import json
import math
import shlex
from pathlib import Path
from typing import Any

import page_browser
import pytest
from page_records import firsts, point, record

from penstock.almanac.machine_spread import EDITION
from penstock.almanac.page.build import build

WHY_NOT = page_browser.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

H200 = {"name": "NVIDIA H200", "count": 1, "memory_mib": 143_771, "driver": "580", "clocks": ""}
ANSWERS = {
    "model": "demo",
    "reference": "0" * 64,
    "engine": "e 1",
    "flags": [],
    "prompts": 16,
    "positions": 500,
    "agree": 0.98,
    "kl": 0.0005,
    "kl_most": 0.02,
    "wrong": False,
}
EDITED = {"method.edition": EDITION.model_dump(), "method.short": True, "method.starts": 2}


def on_gpu(
    run: str, engine: str, rate: float, *, watts: float | None = None, **changes: Any
) -> dict[str, Any]:
    """Keeps every goal at `rate`, none at twice of it; all at once gives 1.25 of it."""
    points = [
        point(None, firsts(1, 0.05, 1), kind="single", token=0.002),
        point(rate, firsts(1, 0.1, 9)),
        point(2 * rate, firsts(0, 0.1, 9)),
        point(1.25 * rate, firsts(0.1, 0.1, 9), kind="saturation"),
    ]
    made = record(run, engine, points, **{"machine.gpu": H200, **changes})
    for each in made["points"] if watts is not None else []:
        told = each["figures"]["output_rate"]["value"]
        joules = {"value": watts / told, "low": watts / told, "high": watts / told}
        each["board"] = {"watts": watts, "busy": 0.99, "joules_per_token": joules, "readings": 30}
    return made


def shaped(run: str, engine: str, lengths: tuple[int, int], seconds: float) -> dict[str, Any]:
    """A run of other lengths whose requests take `seconds` each with everything at once."""
    made = on_gpu(run, engine, 0.8 / seconds, watts=500.0)
    made["shape"] = {
        **made["shape"],
        "name": f"{lengths[0]}x{lengths[1]}",
        "input": float(lengths[0]),
        "output": float(lengths[1]),
    }
    return made


def test_an_edition_says_so_and_its_intervals_hold_another_machine(ask: Any) -> None:
    plain = ask([on_gpu("plain000", "swift", 10.0, watts=500.0)])
    assert "two starts" not in plain.text("#answer")
    busy = ask([on_gpu("busy0000", "swift", 10.0, watts=500.0, **EDITED)])
    assert "By the edition's method: two starts of the engine" in busy.text("#answer")
    unknown = ask([on_gpu("unknown0", "swift", 10.0, **EDITED)])
    lows = [float(each.text(".rank-note").split(" to ")[0]) for each in (plain, busy, unknown)]
    assert lows[0] == 9.8  # 10 completed, 2 % less at its low end
    # the answer is 10.5, half-way to none at 20
    for low, away in zip(lows[1:], EDITION.ends, strict=True):
        whole = math.hypot(math.log(9.8 / 10.5), away)
        assert low == pytest.approx(10.5 * math.exp(-whole), abs=0.02)
    busy.page.click(".rank-name >> nth=0")
    assert "4.3 % where the GPU was busy, 64.3 % where not" in busy.text("#drawer-body")


def test_a_dropped_edition_is_told_as_the_almanacs_own(ask: Any) -> None:
    made = on_gpu("edition0", "swift", 11.3, watts=500.0, **EDITED)
    reader = ask([made], "#summary")
    built = reader.page.evaluate("document.querySelector('#summary-body tbody tr').innerText")
    other = ask([on_gpu("other000", "slow", 1.0)], "#summary")
    other.drop("mine.json", json.dumps(made))
    other.page.click("nav a >> text=Summary")
    other.wait("#summary-body", "yours")
    dropped = other.page.evaluate("document.querySelector('#summary-body tbody tr').innerText")
    assert dropped.replace(" · yours", "").replace("\t2\t", "\t1\t") == built


def test_first_tokens_of_an_editions_open_points_hold_what_hosts_differ_by(ask: Any) -> None:
    reader = ask([on_gpu("busy0000", "swift", 10.0, watts=500.0, **EDITED)])
    reader.page.click(".rank-name >> nth=0")
    ratios = []
    for title in ("First token", "A token"):
        row = reader.texts(f"#drawer-body tr:has(td:text-is('{title}')) td")
        low, high = row[2].split("(")[1].split(" to ")
        ratios.append(float(high.split()[0]) / float(low.split()[0]))
    assert ratios[0] > 2.5 > 1.2 > ratios[1]


def test_power_has_its_column_and_runs_without_are_shown_as_lacking_it(ask: Any) -> None:
    records = [on_gpu("power000", "swift", 10.0, watts=512.0), on_gpu("none0000", "slow", 5.0)]
    reader = ask(records)
    assert [
        ("J/token at best" in note, "power not measured" in note)
        for note in reader.texts(".rank-note")
    ] == [
        (True, False),
        (False, True),
    ]
    reader.open("#data")
    assert reader.texts("#record-list td:nth-child(9)") == ["0.2", "–"]  # 512 W over 2,560 tok/s
    reader.open("#summary")
    assert "J/token out" in reader.text("#summary-body th:nth-child(7)")


def test_an_engine_that_answers_wrongly_is_marked_and_ranked_last(ask: Any) -> None:
    wrong = {**ANSWERS, "kl": 2.5, "kl_most": 9.0, "wrong": True}
    records = [
        on_gpu("wrong000", "fast", 50.0, answers=wrong),
        on_gpu("right000", "slow", 10.0, answers=ANSWERS),
        on_gpu("other000", "slower", 5.0),
    ]
    reader = ask(records)
    assert reader.ranking() == ["slow 1.0", "slower 1.0", "fast 1.0"]
    assert reader.text("#answer").startswith("slow 1.0")
    assert "answers wrongly (2.5 nats from float32): not ranked" in reader.texts(".rank-note")[2]
    assert "0.0005 nats from float32" in reader.texts(".rank-note")[0]
    reader.page.click(".rank-name >> nth=0")
    assert "over 500 positions of demo with no flags" in reader.text("#drawer-body")
    reader.open("#summary")
    assert "fast 1.0" not in reader.text("#summary-body")
    reader.open("#findings")
    assert "Who answers wrongly" in reader.text("#findings-body")
    alone = ask([on_gpu("wrong001", "fast", 50.0, answers=wrong)])
    assert alone.text("#answer").startswith("None that answers rightly.")


def test_two_releases_of_an_engine_are_on_one_chart(ask: Any) -> None:
    old = {"engine.version": "0.26.0", "when": "2026-11-21T00:00:00Z"}
    new = {"engine.version": "0.33.0", "when": "2026-11-29T00:00:00Z"}
    reader = ask([on_gpu("old00000", "vllm", 10.0, **old), on_gpu("new00000", "vllm", 20.0, **new)])
    assert reader.ranking() == ["vllm 0.33.0"]
    ticks = reader.page.locator("#versions .tick").all_text_contents()
    assert ticks[:2] == ["vllm 0.26.0", "vllm 0.33.0"]
    assert reader.page.locator("#versions .mark").count() == 2
    reader.open("#findings")
    assert "1 pair of releases was measured" in reader.text("#findings-body")
    one = ask([on_gpu("old00000", "vllm", 10.0, **old)])
    assert one.page.is_hidden("#versions-part")


def test_the_summary_has_a_sentence_a_machine_gpus_first_and_losses_too(ask: Any) -> None:
    on_cpu = {"machine.gpu": None}
    records = [
        on_gpu("a0000000", "mine", 10.0, **on_cpu),
        on_gpu("b0000000", "other", 20.0, **on_cpu),
        on_gpu("c0000000", "mine", 40.0),
        on_gpu("d0000000", "other", 10.0),
    ]
    reader = ask(records, "#summary")
    gpu, cpu = reader.texts("#summary-body .machine")
    assert gpu.startswith("1 x NVIDIA H200. Test-1B") and "mine is ahead of other in 1, by 4" in gpu
    assert cpu.startswith("Test CPU") and "other is ahead of mine in 1, by 2 times" in cpu
    assert "NVIDIA H200" in reader.text("#summary-body tbody tr")


def test_the_front_joins_what_none_beats_and_faint_marks_miss_the_goal(ask: Any) -> None:
    reader = ask([on_gpu("front000", "swift", 10.0)])
    assert reader.page.locator("#users .front").count() == 1
    assert reader.page.locator("#users .mark.missed").count() == 2  # twice the rate, all at once
    reader.page.fill("#first-slider", "600")
    reader.page.wait_for_function("!document.querySelector('#users .mark.missed')")


def test_the_opening_question_is_of_a_gpu_and_a_model_that_most_would_ask_about(ask: Any) -> None:
    small = {"model.name": "Small-1B", "model.parameters": 10**9}
    large = {"model.name": "Large-8B", "model.parameters": 8 * 10**9}
    records = [
        on_gpu(f"{name[:5]}{at}{engine[0]}00", engine, rate, **{**changes, "machine.gpu": gpu})
        for at, (name, changes, gpu, rate) in enumerate(
            [
                ("small", small, H200, 90.0),
                ("large", large, H200, 9.0),
                ("house", large, None, 99.0),
            ]
        )
        for engine in ("mine", "other")
    ]
    reader = ask(records)
    assert reader.page.input_value("#ask-model").startswith("Large-8B")
    assert reader.page.input_value("#ask-machine") == "1 x NVIDIA H200"


def test_prices_have_their_date_and_the_reader_changes_them(ask: Any) -> None:
    reader = ask([on_gpu("priced00", "swift", 10.0, **{"method.price_per_hour": 3.5})])
    date = json.loads((reader.folder / "data" / "records.json").read_text())[0]["when"][:10]
    assert f"at the $3.50 an hour stated on {date}" in reader.text("#answer")
    reader.page.fill("#price", "7")
    reader.wait("#answer", "at your $7.00 an hour")


def test_engines_of_other_builds_and_of_random_weights_are_told_as_they_can_be_had(
    ask: Any,
) -> None:
    variables = {"CUDA_HOME": "/cuda", "CUDA_PATH": "/cuda", "VLLM_X": "1"}
    told = {
        "engine.version": "0.33.0+cu129",
        "engine.configuration": {
            "name": "default",
            "flags": [],
            "files": {},
            "environment": variables,
        },
    }
    reader = ask([on_gpu("build000", "vllm", 10.0, **told)])
    reader.page.click(".rank-name >> nth=0")
    command = reader.texts("#drawer-body .command code")[0]
    assert command == "pip install vllm==0.33.0 && VLLM_X=1 vllm serve it"
    app = reader.page.locator("#drawer-body details pre").first.text_content()
    assert '"vllm==0.33.0"' in app and "CUDA_" not in app
    hub = ask([on_gpu("hub00000", "transformers", 10.0, **{"model.weights": "random"})])
    hub.page.click(".rank-name >> nth=0")
    command = hub.texts("#drawer-body .command code")[0]
    assert command.startswith("pip install 'transformers[serving]==1.0' torch && ")
    body = hub.text("#drawer-body")
    assert "benchmarks/random_model.py makes such a folder of Test-1B" in body
    assert "as a Modal app" not in body


def test_an_engine_is_one_command_and_a_modal_app_that_python_reads(ask: Any) -> None:
    told = {
        "engine.version": "0.33.0",
        "engine.command": "python -m vllm --model 'it' --host 127.0.0.1 --port 8000",
        "engine.configuration": {
            "name": "default",
            "flags": [],
            "files": {},
            "environment": {"VLLM_X": 'a "b" c'},
        },
    }
    reader = ask([on_gpu("snippet0", "vllm", 10.0, **told)])
    reader.page.click(".rank-name >> nth=0")
    command = reader.texts("#drawer-body .command code")[0]
    install, start = command.split(" && ")
    assert install == "pip install vllm==0.33.0"
    assert shlex.split(start)[:4] == ['VLLM_X=a "b" c', "python", "-m", "vllm"]
    app = reader.page.locator("#drawer-body details pre").first.text_content()
    tree = ast.parse(app)
    texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    assert {"H200", "vllm==0.33.0", 'a "b" c'} <= set(texts)
    assert "python -m vllm --model 'it' --host 0.0.0.0 --port 8000" in texts


# --- jobs


def test_a_jobs_hours_dollars_and_joules_are_those_of_its_rates(ask: Any) -> None:
    # 1 ms a request of 1,000 in and 100 out, 4 ms of 100 in and 1,000 out: a line through both
    records = [
        shaped("job00000", "swift", (1000, 100), 0.001),
        shaped("job00001", "swift", (100, 1000), 0.004),
    ]
    reader = ask(records, "#job?jr=1000000&ji=500&jo=200&p=4")
    row = reader.texts("#job-table tbody td")
    # seconds: a = 0.6 / 990, b = 3.9 / 990 us a token in and out
    seconds = 1e6 * (500 * 0.6060606e-6 + 200 * 3.939394e-6)
    assert seconds == pytest.approx(1090.9, abs=0.1)
    assert row[0] == "swift 1.0" and row[1] == "18.2 min (no interval)"
    assert "takes 18.2 min (no interval), for" in reader.text("#job-answer")
    assert row[3].startswith("$1.21") and row[5] == "by a line through 2 shapes"
    assert row[4].startswith("0.152 kWh")  # 500 W
    reader.open("#job?jr=1000000&ji=1000&jo=100")
    row = reader.texts("#job-table tbody td")
    assert row[1].startswith("16.7 min") and row[3] == "no price"
    assert row[5] == "measured at 1,000 in, 100 out"
    reader.open("#job?jr=10&ji=90000&jo=200")
    assert "no run near 90,200 tokens a request" in reader.texts("#job-table tbody td")[5]
    assert reader.text("#job-answer").startswith("Not known.")
    # 5 % from a measured length is another length
    reader.open("#job?jr=1000000&ji=1050&jo=100")
    assert reader.texts("#job-table tbody td")[5] == "by a line through 2 shapes"


def test_a_jobs_next_engine_follows_by_a_ratio_with_its_interval_or_not_significantly(
    ask: Any,
) -> None:
    lacking = {"engine.lacks": ["FlashInfer"]}
    same = "#job?ji=1024&jo=128&jr=1000000"
    reader = ask(
        [on_gpu("job00000", "swift", 10.0), on_gpu("job00001", "slow", 5.0, **lacking)], same
    )
    said = reader.text("#job-answer")
    assert "slow 1.0 follows with" in said and ", 2 (1.94 to 2.06) times as long" in said
    assert "(slow 1.0 without FlashInfer)" in said
    reader = ask([on_gpu("job00000", "swift", 10.0), on_gpu("job00001", "near", 9.9)], same)
    assert "No significant difference from near 1.0, the next: ratio 1.01 (" in reader.text(
        "#job-answer"
    )


def test_a_job_whose_runs_cannot_be_read_says_so(ask: Any) -> None:
    reader = ask([on_gpu("job00000", "swift", 10.0)], "#summary")
    for path in (reader.folder / "data").glob("g*.js"):
        path.unlink()
    reader.open("#job")
    reader.wait("#said", "which lies beside the page, cannot be read.")
    missing = [each for each in reader.faults if "ERR_FILE_NOT_FOUND" in each]
    assert reader.faults == missing
    reader.faults.clear()


def test_a_wrong_engine_leads_at_no_goal_of_the_summary(ask: Any) -> None:
    wrong = {**ANSWERS, "kl": 2.5, "kl_most": 9.0, "wrong": True}
    records = [on_gpu("wrong000", "fast", 50.0, answers=wrong), on_gpu("right000", "slow", 10.0)]
    for each in [at for made in records for at in made["points"][1:3]]:
        met = float(each["rate"] in (50.0, 10.0))
        goal = {"seconds": 1.0, "share": met, "low": met, "high": met, "goodput": each["rate"]}
        each["goals"] = [goal]
    reader = ask(records, "#summary")
    assert reader.texts("#summary-body tbody td")[-1] == "slow 1.0: 10"


def test_a_job_of_one_shape_alone_and_of_none_is_said_so(ask: Any) -> None:
    reader = ask([shaped("job00000", "swift", (1000, 100), 0.001)], "#job")
    assert "one shape was measured, and not this one" in reader.text("#job-table")
    reader.page.fill("#job-rows", "-3")
    reader.page.keyboard.press("Tab")
    reader.wait("#job-fault", "-3 is not taken: give a number from 1")
    reader.page.fill("#job-price", "-3")
    reader.page.keyboard.press("Tab")
    reader.wait("#job-fault", "-3 is not taken: give a number from 0")
    reader.page.fill("#job-price", "")
    reader.page.keyboard.press("Tab")
    reader.page.wait_for_function("document.getElementById('job-fault').hidden")


def test_a_model_that_was_measured_elsewhere_takes_the_job_to_its_machine(ask: Any) -> None:
    small = {"model.name": "Small-1B", "machine.gpu": None}
    reader = ask([on_gpu("here0000", "swift", 10.0), on_gpu("there000", "swift", 1.0, **small)])
    reader.open("#job?m=Test-1B (bf16)&g=1 x NVIDIA H200&ji=1024&jo=128")
    assert reader.texts("#job-table tbody td")[5] == "measured at 1,024 in, 128 out"
    reader.choose("job-model", "Small-1B (bf16)")
    reader.wait("#job-table", "no GPU's power")
    assert reader.page.input_value("#job-machine") == "Test CPU, 4 cores"


def test_a_jobs_samples_are_taken_from_shared_prompts_and_its_tail_is_simulated(ask: Any) -> None:
    made = shaped("monkeys0", "swift", (512, 256), 0.05)
    made["shape"] = {**made["shape"], "kind": "monkeys", "name": "monkeys", "n": 64}
    reader = ask([made])
    reader.open("#job")
    reader.page.click("text=1,319 problems x n = 128")
    reader.wait("#job-table", "tokens a second of monkeys")
    assert "Your model's longest answers may be longer" in reader.text("#job-answer")
    # of 64 samples a token is due each 0.64 s at full load, each 0.128 s where they are alone
    rate, single, full = 1.25 * 0.8 / 0.05 * 128, 64 * 0.002, 64 * 0.01
    holds, seconds, left, token = rate * full, 0.0, 0.0, 0
    while (alive := holds * math.exp(-token / 256)) >= 0.5 and token < 8 * 256:
        seconds += single + (full - single) * max(alive - 64, 0) / (holds - 64)
        left, token = left + alive, token + 1
    tail = (seconds - left / rate) / 60
    assert reader.texts("#job-table tbody td")[2] == f"{tail:.3g} min"
    assert "jn=128" in reader.page.url
    reader.open("#job?jn=128&ji=512&jo=600")  # more than twice as long as what was measured
    why = "no full load of single prompts was measured, and that of shared ones is of other lengths"
    assert reader.texts("#job-table tbody td")[5] == why


# --- bad input


def test_bad_files_are_named_each_with_a_line_and_the_page_is_built(tmp_path: Path) -> None:
    root = tmp_path / "records"
    root.mkdir()
    good = on_gpu("good0000", "swift", 10.0)
    bad = {
        "another_schema": {**copy.deepcopy(good), "schema": "penstock-almanac/9"},
        "no_power": {**copy.deepcopy(good), "run": "nopower0"},
        "of_power": {**copy.deepcopy(good), "run": "bad00000"},
        "answers": {**copy.deepcopy(good), "run": "bad00001", "answers": {**ANSWERS, "kl": -1.0}},
    }
    bad["of_power"]["points"][0]["board"] = {"watts": "many"}
    (root / "good.json").write_text(json.dumps(good))
    for name, told in bad.items():
        (root / f"{name}.json").write_text(json.dumps(told))
    (root / "cut.json").write_text(json.dumps(good)[:500])
    built = build(root, tmp_path / "page")
    reasons = dict(built.refused)
    assert built.records == 2 and sorted(reasons) == [
        "another_schema.json",
        "answers.json",
        "cut.json",
        "of_power.json",
    ]
    assert "schema" in reasons["another_schema.json"]
    assert "points.0.board.watts" in reasons["of_power.json"]
    assert "answers.kl" in reasons["answers.json"]
    assert all("\n" not in reason for reason in reasons.values())
