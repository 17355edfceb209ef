"""The quality check of a built model. It compares the built model's token distributions with the
unbuilt model's, on texts of the workload.

    score_source    the unbuilt model answers the sample greedily; its most likely tokens at every
                    position are stored
    score_built     the built model at the same positions: agreement, KL
    find_costly     past the bound: KL of the unbuilt model with one built matrix, for each matrix

The KL divergence is computed over the unbuilt model's KEPT most likely tokens, with all other
tokens joined into one outcome. So it is at most the exact KL; the differences among the other
tokens are missing. Knows models and positions; an engine only to draw the answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.artifact.manifest import STATE, Value
from penstock.build.build_state import Result
from penstock.build.model_linears import linears
from penstock.build.options import BuildOptions
from penstock.build.trial import OpenModel
from penstock.build.work_sample import WorkSample
from penstock.config import BLOCK_SIZE, Config
from penstock.disk import why_not_written
from penstock.execute.kv_cache import KvCache
from penstock.execute.kv_dtype import fit_states, told_scales, whole_prompts
from penstock.execute.open_runner import find_device, load_for, settle_kv
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.inputs import StepInputs
from penstock.kernels.layer_kv import KvForm
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import LatentForm, RecurrentForm
from penstock.models.decoder import HEAD, Decoder
from penstock.models.read_config import read_model_config
from penstock.quant.scheme import PLAIN
from penstock.status_line import Bar

KEPT = 256  # number of most likely tokens stored at a position
# number of texts; most tokens of an answer, and of a text
TEXTS, ANSWER, LONGEST = (32, 128, 1024)
OWN_WORDS = 256  # tokens of a text that the model writes itself, if the workload has no real texts
SLICE = 128  # positions whose logits are in memory at once
REFERENCE = "reference.npz"
UNBUILT: dict[str, Value] = {
    "quantization": "auto",
    "kv_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
}
# number of positions on which each matrix is scored; number of costly matrices in the error message
LOOKED_AT, COSTLY = 1024, 8


def score_source(options: dict[str, Any], folder: str, works: list[dict[str, Any]]) -> Result:
    """Draws the sample's answers and stores the unbuilt model's distribution at each position. Runs
    in a stage process."""
    asked = msgspec.convert(options, BuildOptions)
    config = asked.source_config(folder, **UNBUILT)
    texts = draw_texts(asked, Path(folder), msgspec.convert(works, list[WorkSample]))
    with torch.inference_mode():
        model, ops = open_model(config, Path(folder), max(map(len, texts)))
        bar = Bar(sum(map(len, texts)), "positions of the unbuilt model", everywhere=True)
        places, found = zip(
            *((of, _kept(logits)) for of, logits in _logits(model, ops, texts, bar)), strict=True
        )
        bar.close()
    order = torch.cat(places).argsort()
    columns = {
        n: torch.cat([getattr(each, n) for each in found])[order].cpu().numpy()
        for n in _Kept.__slots__
    }
    path = Path(asked.out) / STATE / REFERENCE
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(text) for text in texts])
    columns |= {"texts": np.concatenate([np.array(text) for text in texts]), "lengths": lengths}
    try:
        np.savez(path, allow_pickle=False, **columns)
    except OSError as error:
        raise why_not_written(error, path) from error
    return {"texts": len(texts), "tokens": int(lengths.sum())}


def score_built(
    options: dict[str, Any], engine: dict[str, Any], tunables: dict[str, Any]
) -> Result:
    """Compares the built model with the unbuilt model's stored distributions. Runs in a stage
    process. engine, tunables: the chosen option values and kernel parameters. Returns the fields of
    Quality and the manifest's scales of K and V, which are measured on the sample.
    """
    asked = msgspec.convert(options, BuildOptions)
    folder = Path(asked.out)
    texts, reference = _reference(folder)
    with torch.inference_mode():
        config = asked.config(str(folder), **engine)
        config.tuned = tunables
        model, ops = open_model(config, folder, max(map(len, texts)), texts)
        bar = Bar(sum(map(len, texts)), "positions of the built model", everywhere=True)
        kl, same = _compare(model, ops, texts, reference, bar)
        bar.close()
        forms = {
            each.name: form
            for each in model.owners
            if isinstance(form := each.form, KvForm | LatentForm)
        }
        eight = any(form.values == E4M3 for form in forms.values())
    return {
        "kv_scales": {name: told_scales(form) for name, form in forms.items()} if eight else {},
        "agreement": round(float(same.float().mean()), 5),
        "kl_mean": _rounded(kl.mean()),
        "kl_worst": _rounded(kl.max()),
        "tokens": kl.numel(),
    }


def find_costly(options: dict[str, Any], folder: str) -> Result:
    """Returns matrix name -> KL of the unbuilt model with only that matrix replaced by the built
    one, for the COSTLY matrices with the largest KL. Uses the first texts; holds both models in
    memory. Runs in a stage process."""
    asked = msgspec.convert(options, BuildOptions)
    out = Path(asked.out)
    texts, reference = _reference(out)
    some = texts[: 1 + int(np.searchsorted(np.cumsum([len(text) for text in texts]), LOOKED_AT))]
    longest = max(map(len, some))
    with torch.inference_mode():
        wide, ops = open_model(asked.source_config(folder, **UNBUILT), Path(folder), longest)
        built, _ = open_model(asked.config(str(out)), out, longest)
        costs: dict[str, float] = {}
        pairs = [
            *zip(linears(wide), linears(built), strict=True),
            *[(wide.head, built.head)] * asked.quantize_lm_head,
        ]
        bar = Bar(len(pairs), "matrices looked at", everywhere=True)
        for ours, theirs in pairs:
            if theirs.scheme is not PLAIN:
                usual, ours.product = ours.product, theirs.product
                kl, _ = _compare(wide, ops, some, reference)
                name = ours.loaded["weight"].parts[0].name.removesuffix(".weight")
                costs[HEAD if ours is wide.head else name] = _rounded(kl.mean())
                ours.product = usual
            bar.advance()
        bar.close()
    return dict(sorted(costs.items(), key=lambda each: -each[1])[:COSTLY])


def _reference(folder: Path) -> tuple[list[list[int]], _Kept]:
    """Returns the sample's texts and the unbuilt model's distributions on them."""
    with np.load(folder / STATE / REFERENCE, allow_pickle=False) as told:
        ends = np.cumsum(told["lengths"]).tolist()
        texts = [told["texts"][first:end].tolist() for first, end in pairwise([0, *ends])]
        reference = _Kept(*(torch.from_numpy(told[name]) for name in _Kept.__slots__))
    return texts, reference


@dataclass(slots=True)
class _Kept:
    """The unbuilt model's distributions at n positions: the most likely tokens and their logprobs
    [n, KEPT], and the logprob of all other tokens together [n]."""

    ids: Tensor
    logprobs: Tensor
    others: Tensor


def draw_texts(
    asked: BuildOptions, folder: Path, works: list[WorkSample], *, more: int = 0
) -> list[list[int]]:
    """Returns texts as token ids: the workload's prompts with the model's greedy answers. A
    workload given as a shape has no real prompts, so the model writes texts itself, beginning with
    one token.

    more: the number of further texts to return instead, from other prompts where there are any, and
        sampled, not greedy.
    """
    # fewer rows need fewer CUDA graphs, so that the engine starts sooner
    config = asked.source_config(str(folder), **UNBUILT, max_num_seqs=more or TEXTS)
    first = read_model_config(folder).bos_id
    texts: list[list[int]] = []
    with OpenModel(config, folder) as model:
        longest = min(LONGEST, model.runner.max_model_len - 1)
        answer = min(ANSWER, longest // 2)
        for work in works:
            if work.drawn:
                starts = [prompt[-1] for prompt in work.prompts] * max(more, TEXTS)
                prompts = [
                    [start if first is None else first]
                    for start in starts[: -(-(more or TEXTS) // len(works))]
                ]
                sampling, out = {"temperature": 1.0}, min(OWN_WORDS, longest - 1)
            else:
                prompts = [
                    prompt[: longest - answer] for prompt in _some(work.prompts, len(works), more)
                ]
                sampling, out = (
                    {"temperature": 1.0 if more else 0.0},
                    min(answer, max(work.outputs)),
                )
            outputs = [out] * len(prompts)
            drawn = WorkSample(
                told=work.told,
                prompts=prompts,
                outputs=outputs,
                concurrency=len(prompts),
                ends=True,
                sampling=[{**sampling, "seed": more + number} for number in range(len(prompts))],
            )
            bar = Bar(sum(outputs), "tokens of texts", everywhere=True)
            texts += [
                prompt + said
                for prompt, said in zip(prompts, model.answers(drawn, bar.advance), strict=True)
            ]
            bar.close()
    return texts


def _some(prompts: list[list[int]], works: int, more: int) -> list[list[int]]:
    """Returns one of `works` workloads' share of the prompts, spread evenly. more: if not 0,
    returns this many other prompts instead."""
    step = -(-len(prompts) // -(-TEXTS // works))
    if not more:
        return prompts[::step]
    others, each = (
        [prompt for at, prompt in enumerate(prompts) if at % step] or prompts,
        -(-more // works),
    )
    return (others[:: max(1, len(others) // each)] * each)[:each]


def open_model(
    config: Config, folder: Path, longest: int, texts: list[list[int]] | None = None
) -> tuple[Decoder, Ops]:
    """Loads the model of a folder for texts of up to `longest` tokens. texts: token ids on which
    scales of K and V are measured."""
    device = find_device(config.model.device)
    model, ops = load_for(config, folder, read_model_config(folder), device, longest)
    sample = (
        None if texts is None else torch.tensor([text[: min(map(len, texts))] for text in texts])
    )
    settle_kv(config, folder, model, ops, sample=sample)
    fit_states(model, config.model.mamba_ssm_cache_dtype)
    return model, ops


def _logits(
    model: Decoder, ops: Ops, texts: list[list[int]], bar: Bar | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (positions, logits): raw logits [positions, vocabulary] float32 after each token of
    the texts, at most SLICE at once, and their indices among all texts' positions. A model whose
    recurrent state is rounded between steps reads one token per step, as in decoding.
    """
    for run in batches(model, texts, 1 if _rounds_states(model) else LONGEST):
        hidden = model.forward(run.ids, run.step, run.kv, ops)
        for part, of in zip(run.places.split(SLICE), run.of.split(SLICE), strict=True):  # type: ignore[no-untyped-call]
            yield of, model.logits(hidden.index_select(0, part)).float()
            if bar is not None:
                bar.advance(len(part))


def _rounds_states(model: Decoder) -> bool:
    forms = [keeper.form for keeper in model.owners if isinstance(keeper.form, RecurrentForm)]
    return any(part.sums and part.dtype != torch.float32 for form in forms for part in form.parts)


class Batch(NamedTuple):
    """Arguments of `Decoder.forward` for a stretch of some texts. places: indices of the real
    tokens in the padded batch. of: the same tokens' indices among all texts' tokens."""

    ids: Tensor
    step: StepInputs
    kv: list[tuple[Any, ...]]
    places: Tensor
    of: Tensor


def batches(model: Decoder, texts: list[list[int]], stretch: int = LONGEST) -> Iterator[Batch]:
    """Yields texts in batches, in order, `stretch` tokens of each text at once, padded at the end,
    where padding changes nothing."""
    begin = [0, *np.cumsum([len(text) for text in texts]).tolist()]
    at_once = max(1, 4096 // min(stretch, max(map(len, texts))))
    for first in range(0, len(texts), at_once):
        some = texts[first : first + at_once]
        tokens = max(map(len, some))
        blocks = -(-tokens // BLOCK_SIZE)
        cache = KvCache(model.keepers, len(some) * blocks + 2, model.device, slots=len(some))
        tables = torch.arange(1, len(some) * blocks + 1, device=model.device).view(
            len(some), blocks
        )
        ids = torch.tensor(
            [text + [0] * (tokens - len(text)) for text in some], device=model.device
        )
        of = torch.tensor([begin[first + row] for row in range(len(some))])[:, None] + torch.arange(
            tokens
        )
        there = torch.arange(tokens) < torch.tensor([len(text) for text in some])[:, None]
        for at in range(0, tokens, stretch):
            part = slice(at, at + stretch)
            count = ids[:, part].shape[1]
            places = there[:, part].flatten().nonzero()[:, 0]
            yield Batch(
                ids[:, part].flatten(),
                whole_prompts(len(some), count, tables, at),
                cache.layers,
                places.to(model.device),
                of[:, part].flatten()[places],
            )


def _kept(logits: Tensor) -> _Kept:
    logprobs = logits.log_softmax(-1)
    top, ids = logprobs.topk(min(KEPT, logits.shape[1]), -1)
    return _Kept(ids.to(torch.int32), top, _others(logprobs, ids))


def _others(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Returns the logprob of all tokens other than `ids` together. Their probabilities are summed,
    because 1 minus the others' sum would be mostly rounding error."""
    return logprobs.scatter(1, ids.long(), -torch.inf).logsumexp(-1)


def _compare(
    model: Decoder, ops: Ops, texts: list[list[int]], reference: _Kept, bar: Bar | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the KL divergence at each position, [n] in nats, and a boolean [n]: both models have
    the same most likely token."""
    kls, sames, places = [], [], []
    for part, logits in _logits(model, ops, texts, bar):
        places.append(part)
        ids, theirs, others = (
            each[part].to(logits.device)
            for each in (reference.ids, reference.logprobs, reference.others)
        )
        logprobs = logits.log_softmax(-1)
        mine = logprobs.gather(1, ids.long())
        rest = _others(logprobs, ids)
        kl = (theirs.exp() * (theirs - mine)).sum(-1)
        # there are no other tokens if the vocabulary has at most KEPT
        whole = torch.isfinite(others) & torch.isfinite(rest)
        kl += torch.where(whole, others.exp() * (others - rest), 0.0)
        kls.append(kl.clamp(min=0.0).cpu())
        # bf16 logits have ties: a token as likely as the best one counts as equal to it
        sames.append((mine[:, 0] >= logprobs.amax(-1)).cpu())
    order = torch.cat(places).argsort()
    return torch.cat(kls)[order], torch.cat(sames)[order]


def _rounded(number: Tensor) -> float:
    return float(f"{float(number):.4g}")
