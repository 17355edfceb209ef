"""The manifest: written and read the same, readable, and every broken or foreign one named with the
way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.artifact.manifest import (
    MANIFEST,
    SCHEMA,
    STATE,
    BuiltFor,
    BuiltOn,
    Decision,
    ExpectedWork,
    FileSums,
    Manifest,
    Quality,
    StepSeconds,
    find_manifest,
    manifest_json,
    read_manifest,
    write_manifest,
)
from penstock.errors import CheckpointError


def whole() -> Manifest:
    return Manifest(
        penstock="0.1.0",
        model="demo",
        source={"model.safetensors": "ab" * 32},
        built_on=BuiltOn(
            device="NVIDIA H200", capability=(9, 0), memory_bytes=1, processor="x", torch="2.11"
        ),
        built_for=[
            BuiltFor(
                told="64x32:8",
                prompts=8,
                samples=8,
                concurrency=8,
                prompt_tokens=64,
                longest_prompt=64,
                output_tokens=32,
                longest_output=32,
                shared_tokens=0,
            )
        ],
        engine={
            "max_num_seqs": 8,
            "quantization": "auto",
            "gpu_memory_utilization": 0.9,
            "max_model_len": None,
        },
        tunables={"linear_small_rows": 16},
        decisions=[
            Decision(
                name="steps_ahead",
                chosen=1,
                default=1,
                unit="tok/s",
                measured={"1": [10.0, 11.0], "2": [9.5, 9.0]},
                won_percent=0.0,
                noise_percent=4.0,
            )
        ],
        quality=Quality(
            agreement=0.99,
            kl_mean=1e-4,
            kl_worst=2e-3,
            bound=0.01,
            tokens=512,
            by_matrix={"a.b": 1e-5},
        ),
        step_seconds=StepSeconds(
            rows=[1, 8], context=[64, 64], prompt_tokens=[0, 0], seconds=[0.001, 0.002]
        ),
        expected=[
            ExpectedWork(
                told="64x32:8",
                output_tokens_per_second=100.0,
                noise_percent=1.0,
                requests_per_second=3.0,
            )
        ],
        files={"model.safetensors": FileSums(bytes=3, pieces=["ab" * 32])},
    )


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, whole())
    assert read_manifest(tmp_path) == find_manifest(tmp_path) == whole()
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_columns_of_numbers_are_one_line_each() -> None:
    lines = manifest_json(whole()).splitlines()
    assert '    "rows": [1, 8],' in lines and all(len(line) < 120 for line in lines)


def test_brackets_in_a_text_stay_as_they_are() -> None:
    odd = msgspec.structs.replace(whole(), model='[\n 1,  2\n] {"a": [\\n]}')
    assert msgspec.json.decode(manifest_json(odd), type=Manifest) == odd


def test_a_model_folder_has_none(tmp_path: Path) -> None:
    assert find_manifest(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"is no artifact.*penstock build makes one"):
        read_manifest(tmp_path)


def test_an_unfinished_build_is_named(tmp_path: Path) -> None:
    (tmp_path / STATE).mkdir()
    with pytest.raises(CheckpointError, match=r"unfinished build.*start its penstock build again"):
        find_manifest(tmp_path)


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "cut": (lambda text: text[:100], "is broken.*copy the artifact again"),
    "no JSON": (lambda text: "\ud800\x00", "is broken"),
    "a list": (lambda text: "[]", "names no schema"),
    "no schema": (
        lambda text: text.replace(f'"schema": {SCHEMA}', '"schema": null'),
        "names no schema",
    ),
    "newer": (
        lambda text: text.replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}'),
        "take a newer penstock",
    ),
    "older": (
        lambda text: text.replace(f'"schema": {SCHEMA}', '"schema": 0'),
        "build the artifact again",
    ),
    "unknown field": (lambda text: text.replace('"penstock"', '"penstok"'), "is broken.*penstok"),
    "wrong type": (
        lambda text: text.replace('"tokens": 512', '"tokens": "512"'),
        "is broken.*tokens",
    ),
    "no number": (lambda text: text.replace("0.99", "NaN"), "is broken"),
    "nested": (lambda text: "[" * 100_000, "is broken"),
    "way out of the folder": (
        lambda text: text.replace('"model.safetensors": {', '"../x": {'),
        "outside its folder",
    ),
    "absolute": (
        lambda text: text.replace('"model.safetensors": {', '"/x": {'),
        "outside its folder",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_manifest_is_one_line_with_the_way_out(case: str, tmp_path: Path) -> None:
    change, told = BROKEN[case]
    text = manifest_json(whole())
    assert change(text) != text
    (tmp_path / MANIFEST).write_bytes(change(text).encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=told):
        read_manifest(tmp_path)


def test_a_manifest_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match=r"penstock\.json cannot be read"):
        read_manifest(tmp_path)
