"""What the sampler's tests measure against: filtered probabilities in float64 numpy, sorted whole,
and a chi-square."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.inputs import SamplerInputs


def asked(
    n: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    first_sample: int = 0,
    position: int = 0,
) -> SamplerInputs:
    """n rows that ask for the same, with sample indices of their own."""
    return SamplerInputs(
        temperature=torch.full((n,), temperature),
        top_p=torch.full((n,), top_p),
        top_k=torch.full((n,), top_k, dtype=torch.int32),
        min_p=torch.full((n,), min_p),
        seed=torch.full((n,), seed, dtype=torch.int64),
        sample=torch.arange(first_sample, first_sample + n, dtype=torch.int32),
        position=torch.full((n,), position, dtype=torch.int32),
        any_filter=top_p < 1 or top_k > 0 or min_p > 0,
        any_random=temperature > 0,
    )


def some_rows(inputs: SamplerInputs, rows: Tensor) -> SamplerInputs:
    """The same questions of some rows."""
    columns = ("temperature", "top_p", "top_k", "min_p", "seed", "sample", "position")
    return replace(inputs, **{name: getattr(inputs, name)[rows] for name in columns})


def probabilities(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> np.ndarray:
    """[vocabulary] float64: softmax, then min_p, top_k, top_p,
    each over what the one before left."""
    logits = logits.astype(np.float64)
    scaled = np.exp((logits - logits.max()) / temperature)
    order = np.lexsort((np.arange(logits.size), -logits))
    kept = scaled[order]
    kept[kept < min_p * kept[0]] = 0
    if top_k:
        kept[top_k:] = 0
    kept /= kept.sum()
    if top_p < 1:
        kept[np.cumsum(kept) - kept >= top_p] = 0
    result = np.zeros(logits.size)
    result[order] = kept / kept.sum()
    return result


def chi_square_p(tokens: np.ndarray, expected: np.ndarray) -> float:
    """p-value of the draws under probabilities [vocabulary]. Tokens that are expected less than 5
    times are one cell.

    A token of probability 0 that was drawn gives 0.
    """
    from scipy.stats import chi2

    seen = np.bincount(tokens, minlength=expected.size).astype(np.float64)
    if seen[expected == 0].any():
        return 0.0
    mean = expected * tokens.size
    rare = (mean < 5) & (expected > 0)
    common = mean >= 5
    seen = np.append(seen[common], seen[rare].sum())
    mean = np.append(mean[common], mean[rare].sum())
    seen, mean = seen[mean > 0], mean[mean > 0]
    if mean.size == 1:
        return 1.0
    return float(chi2.sf(((seen - mean) ** 2 / mean).sum(), mean.size - 1))
