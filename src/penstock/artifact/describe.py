"""Describes a built engine's manifest as text. `penstock inspect` and the end of a build print the
whole description; a running build prints each decision. Knows the manifest alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from penstock.artifact.manifest import (
    KERNELS,
    BuiltFor,
    BuiltOn,
    Decision,
    Manifest,
    Quality,
    name_of,
)
from penstock.status_line import size_of

Cells = Sequence[str]
UNTIMED = "nothing was timed (--tune-minutes 0): defaults hold"


def describe(folder: Path, manifest: Manifest) -> str:
    """Returns the manifest as text in columns; the table of step seconds is left out."""
    revision = f" at {manifest.revision}" if manifest.revision else ""
    head = (
        f"{folder}: {manifest.model}{revision}, built by penstock {manifest.penstock} for"
        f" {manifest.objective}"
    )
    rent = "" if manifest.price is None else f", at ${manifest.price:g} an hour"
    parts: list[tuple[str, Iterable[Cells]]] = [
        ("built on", _machine(manifest.built_on)),
        ("built for", map(_work, manifest.built_for)),
        ("decisions", map(_decision, manifest.decisions)),
        (
            "opened with",
            (
                (name, name_of(value))
                for name, value in (manifest.engine | manifest.tunables).items()
            ),
        ),
        ("answers, against the unbuilt model's", _quality(manifest.quality)),
        (f"expect{rent}", list(_expected(manifest)) or [(UNTIMED,)]),
        ("files, every byte as it was built", _files(manifest)),
    ]
    return "\n".join(
        [head, *(line for title, rows in parts for line in _section(title, list(rows)))]
    )


def describe_decision(made: Decision) -> str:
    """Returns one decision of a build as a line of text."""
    name, *cells = filter(None, _decision(made))
    return f"{name}: {', '.join(cells)}"


def describe_work(work: BuiltFor) -> str:
    """Returns a workload of a build as a line of text."""
    told, *cells = _work(work)
    return f"{told}: {' '.join(cells)}"


def _section(title: str, rows: list[Cells]) -> Iterator[str]:
    """Yields the lines of a section with aligned columns; empty columns are dropped. Yields nothing
    for no rows."""
    columns = [column for column in zip_longest(*rows, fillvalue="") if any(column)]
    widths = [max(map(len, column)) for column in columns]
    yield from ["", title] if rows else []
    for row in zip(*columns, strict=True):
        yield "  " + "  ".join(map(str.ljust, row, widths)).rstrip()


def _machine(on: BuiltOn) -> Iterator[Cells]:
    chip = (
        f", compute capability {on.capability[0]}.{on.capability[1]}"
        if on.capability
        else f", {on.processor}"
    )
    libraries = [
        ("torch", on.torch),
        ("triton", on.triton),
        ("CUDA", on.cuda),
        ("driver", on.driver),
    ]
    yield "machine", f"{on.device}{chip}, {size_of(on.memory_bytes)}"
    yield "with", ", ".join(f"{name} {version}" for name, version in libraries if version)


def _work(work: BuiltFor) -> Cells:
    shared = f", {work.shared_tokens:,} shared by all" if work.shared_tokens else ""
    return (
        work.told,
        f"{work.prompts:,} prompts of {_length(work.prompt_tokens, work.longest_prompt)}{shared};",
        f"{work.samples:,} answers of {_length(work.output_tokens, work.longest_output)};",
        f"{work.concurrency:,} at once",
    )


def _length(middle: int, longest: int) -> str:
    return f"{middle:,} tokens" + (f" (at most {longest:,})" if longest > middle else "")


def _decision(made: Decision) -> Cells:
    stays = made.chosen == made.default
    return (
        made.name,
        name_of(made.chosen),
        "stays" if stays else f"default {name_of(made.default)}",
        f"{made.won_percent:+.1f} %" if made.won_percent else "",
        f"noise {made.noise_percent:.1f} %" if made.noise_percent is not None else "",
        "; ".join(filter(None, (_figures(made), made.note))),
    )


def _figures(made: Decision) -> str:
    """Returns the median figures of the chosen value and of the default."""
    names = dict.fromkeys(name_of(value) for value in (made.chosen, made.default))
    figures = [
        _figure(statistics.median(made.measured[name])) for name in names if made.measured.get(name)
    ]
    return (
        f"{', by default '.join(figures)} {made.unit}"
        if figures and made.won_percent is not None
        else ""
    )


def _quality(seen: Quality | None) -> Iterator[Cells]:
    if seen is None:
        return
    yield "same token", f"{seen.agreement:.2%} of {seen.tokens:,} positions"
    yield (
        "KL",
        f"{seen.kl_mean:.2g} nats a token, at worst {seen.kl_worst:.2g}; bound {seen.bound:g}",
    )
    yield from ((f"KL by {name} alone", f"{kl:.2g}") for name, kl in seen.by_matrix.items())
    if seen.kept_wide:
        yield "kept wide", ", ".join(seen.kept_wide)


def _expected(manifest: Manifest) -> Iterator[Cells]:
    tokens = {work.told: work.output_tokens for work in manifest.built_for}
    for work in manifest.expected:
        rate, requests, ms = (
            work.output_tokens_per_second,
            work.requests_per_second,
            work.request_ms,
        )
        speed = (f"{rate:,.0f} output tok/s", f"{_figure(requests)} requests/s")
        noise = "one run" if work.noise_percent is None else f"noise {work.noise_percent:.1f} %"
        latency = (
            f"{_figure(ms)} ms a request ({_figure(ms / tokens[work.told])} a token)"
            if ms is not None
            else ""
        )
        share = (
            f"{work.share_of_limit:.0%} of the chip's limit"
            if work.share_of_limit is not None
            else ""
        )
        price = (
            f"${manifest.price / 3600 / rate * 1e6:.3g} a million output tokens"
            if manifest.price
            else ""
        )
        yield work.told, *speed, noise, latency, share, price


def _files(manifest: Manifest) -> Iterator[Cells]:
    sizes: dict[str, list[int]] = {}
    for name, file in manifest.files.items():
        kind = (
            "kernels"
            if name.startswith(f"{KERNELS}/")
            else "weights"
            if name.endswith(".safetensors")
            else "others"
        )
        sizes.setdefault(kind, []).append(file.bytes)
    for kind in sorted(sizes, reverse=True):
        yield (
            kind,
            f"{len(sizes[kind]):,} files" if len(sizes[kind]) > 1 else "1 file",
            size_of(sum(sizes[kind])),
        )


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
