"""`penstock inspect`: an artifact's manifest as a person reads it, once every byte that it lists is seen to be as it
was built. It knows the manifest; it opens no engine and imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from penstock.artifact.checksums import verify_files
from penstock.artifact.manifest import BuiltFor, Decision, ExpectedWork, Manifest, Quality, manifest_json, read_manifest

Facts = Iterable[tuple[str, str]]


def print_artifact(folder: Path, *, as_json: bool) -> None:
    """Raises CheckpointError for what is no artifact, an unfinished one, or one with a file that isn't as it was built;
    nothing is printed then."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    if as_json:
        print(manifest_json(manifest), end="")
        return
    for title, facts in told(folder, manifest):
        lines = [f"  {name:<24}{value}" for name, value in facts]
        print("\n".join([title, *lines]) if lines else f"{title}\n  none")


def told(folder: Path, manifest: Manifest) -> list[tuple[str, Facts]]:
    """Returns titles, and what stands under each."""
    on = manifest.built_on
    revision = f" at {manifest.revision}" if manifest.revision else ""
    chip = f", compute capability {on.capability[0]}.{on.capability[1]}" if on.capability else f", {on.processor}"
    libraries = [("torch", on.torch), ("triton", on.triton), ("CUDA", on.cuda), ("driver", on.driver)]
    versions = ", ".join(f"{name} {version}" for name, version in libraries if version)
    parts: list[tuple[str, Facts]] = [
        (str(folder), [("model", manifest.model + revision), ("objective", manifest.objective)]),
        (
            f"built by penstock {manifest.penstock}",
            [("on", f"{on.device}{chip}, {_size(on.memory_bytes)}"), ("with", versions)],
        ),
        ("for", [(work.told, _work(work)) for work in manifest.built_for]),
        ("opened with", [(name, str(value)) for name, value in manifest.engine.items()]),
        ("kernels' numbers", [(name, str(value)) for name, value in manifest.tunables.items()]),
        ("decisions", [(each.name, _decision(each)) for each in manifest.decisions]),
    ]
    if manifest.quality is not None:
        parts.append(("answers, against the unbuilt model", _quality(manifest.quality)))
    parts.append(("expect", [(each.told, _expected(each)) for each in manifest.expected]))
    parts.append(("files, each byte as it was built", _files(manifest)))
    return parts


def _work(work: BuiltFor) -> str:
    shared = f", {work.shared_tokens} shared by all" if work.shared_tokens else ""
    return (
        f"{work.prompts} prompts of {work.prompt_tokens} tokens (at most {work.longest_prompt}{shared}), "
        f"{work.samples} answers of {work.output_tokens} (at most {work.longest_output}), {work.concurrency} at once"
    )


def _decision(made: Decision) -> str:
    what = f"{made.chosen}" if made.chosen == made.default else f"{made.chosen} (default {made.default})"
    if made.won_percent is None or made.noise_percent is None:
        return f"{what}: {made.note or 'not measured'}"
    by = f"{made.won_percent:+.1f} % over the default, noise {made.noise_percent:.1f} %"
    return f"{what}: {by}{', ' + made.note if made.note else ''}"


def _quality(seen: Quality) -> Facts:
    yield "same token", f"{seen.agreement:.2%} of {seen.tokens:,}"
    yield "KL", f"{seen.kl_mean:.2e} nats a token, at worst {seen.kl_worst:.2e}; bound {seen.bound:.2e}"
    yield from ((f"by {name}", f"{kl:.2e}") for name, kl in seen.by_matrix.items())
    if seen.kept_wide:
        yield "kept wide", ", ".join(seen.kept_wide)


def _expected(work: ExpectedWork) -> str:
    share = f", {work.share_of_limit:.0%} of the hardware's limit" if work.share_of_limit is not None else ""
    rates = f"{work.output_tokens_per_second:,.0f} tok/s, {work.requests_per_second:,.2f} requests/s"
    noise = "one run" if work.noise_percent is None else f"noise {work.noise_percent:.1f} %"
    return f"{rates}{share}; {noise}"


def _files(manifest: Manifest) -> Facts:
    """Files of the folder itself by name, others by the folder that they are in."""
    counts: dict[str, list[int]] = defaultdict(list)
    for name, sums in manifest.files.items():
        counts[name.partition("/")[0] + "/" * ("/" in name)].append(sums.bytes)
    for name, sizes in counts.items():
        yield name, _size(sum(sizes)) + (f" in {len(sizes):,} files" if name.endswith("/") else "")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
