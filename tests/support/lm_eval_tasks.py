"""Tasks of lm_eval over a few rows of word problems, without a hub: a choice, a free answer, a
perplexity; and its command line. It knows lm_eval's words and files; no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.demo import problems_file

TASKS = {
    "sums_choice": (
        """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: label
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
    ),
    "sums_free": (
        """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n", "####"], max_gen_toks: 64, temperature: 0.0, do_sample: false}
metric_list: [{metric: exact_match}]
"""
    ),
    "sums_text": (
        """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "Question: {{question}}\\nAnswer: {{answer}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
    ),
}
Samples = dict[str, list[dict[str, Any]]]  # by task, in the order of the rows


def write_tasks(folder: Path, count: int = 6) -> list[dict[str, Any]]:
    """Writes TASKS and the rows that they ask -> the rows."""
    rows = [json.loads(line) for line in problems_file().read_text().splitlines()[:count]]
    for at, row in enumerate(rows):
        right = row["answer"].split("#### ")[-1]
        row["choices"] = [right, str(int(right) + 1), "nobody knows"]
        row["label"] = 0
        if at % 2:
            row["choices"].reverse()
            row["label"] = 2
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        data = (
            "dataset_path: json\ndataset_kwargs: {data_files: {test:"
            f" {folder / 'rows.jsonl'}}}}}\n"
        )
        rest = "test_split: test\nnum_fewshot: 0\nmetadata: {version: 1}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{rest}{task.lstrip()}")
    return rows


def lm_eval(
    folder: Path,
    name: str,
    backend: str,
    *more: str,
    together: int,
    device: str | None = None,
    **arguments: Any,
) -> tuple[dict[str, Any], Samples]:
    """Runs TASKS of `folder` -> lm_eval's results and samples. name: of a new folder in it.
    backend: lm_eval's `--model`, which takes `arguments`, and `more` as they stand. together:
    prompts of one call. device: lm_eval's own `--device`, which backends that have one are given.
    """
    known = [f"{key}={value}" for key, value in arguments.items()]
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        backend,
        "--model_args",
        ",".join((*known, *more)),
        "--tasks",
        ",".join(TASKS),
        "--include_path",
        str(folder),
        "--output_path",
        str(folder / name),
        "--log_samples",
        "--batch_size",
        str(together),
        *(("--device", device) if device else ()),
    ]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OPENAI_API_KEY": "none",
    }
    made = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**os.environ, **offline}
    )
    assert made.returncode == 0, made.stderr[-3000:]
    (results,) = (folder / name).rglob("results_*.json")
    samples = {}
    for task in TASKS:
        (path,) = (folder / name).rglob(f"samples_{task}_*.jsonl")
        samples[task] = sorted(
            map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"]
        )
    return json.loads(results.read_text())["results"], samples
