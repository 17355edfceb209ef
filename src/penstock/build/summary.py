"""What a build says at its end: what was decided and by how much, what to expect, its price. It knows a manifest."""

from __future__ import annotations

from penstock.artifact.manifest import ExpectedWork, Manifest
from penstock.build.tune import told


def summary(manifest: Manifest, out: str, price: float | None) -> str:
    """Returns the lines. price: dollars an hour."""
    lines = [f"{out}: {manifest.model} for {', '.join(work.told for work in manifest.built_for)}", "", "decided"]
    lines += [f"  {told(decision)}" for decision in manifest.decisions]
    if (quality := manifest.quality) is not None:
        lines += [
            "quality",
            f"  the same token as unbuilt at {quality.agreement:.2%} of {quality.tokens:,} positions; "
            f"KL {quality.kl_mean:.2g} nats a token (bound {quality.bound:g}, worst position {quality.kl_worst:.2g})",
        ]
    lines += ["expect", *(f"  {_expected(work, price)}" for work in manifest.expected)]
    size = sum(file.bytes for file in manifest.files.values())
    lines += ["", f"{len(manifest.files)} files, {size / 1e9:.2f} GB: penstock serve {out}"]
    return "\n".join(lines)


def _expected(work: ExpectedWork, price: float | None) -> str:
    rate = work.output_tokens_per_second
    noise = "one run" if work.noise_percent is None else f"noise {work.noise_percent:.1f} %"
    line = f"{work.told}: {rate:,.0f} output tok/s ({noise}), "
    line += f"{work.requests_per_second:,.1f} requests/s"
    if work.share_of_limit is not None:
        line += f", {work.share_of_limit:.0%} of what the chip could do at most"
    if price is not None:
        line += f", ${price / 3600 / rate * 1e6:.3f} a million output tokens at ${price:g} an hour"
    return line
