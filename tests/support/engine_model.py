"""A small random-weight model folder whose logits are far from flat, and a slow twin of the whole
engine.

The twin samples one token at a time: transformers' logits over all tokens so far, penalties as
plain loops, and the contract of the draw (`kernels.reference.sample`). It knows no rows, blocks,
steps or groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from penstock.kernels.inputs import SamplerInputs
from penstock.kernels.reference.sampling.sample import sample
from penstock.request import SamplingParams
from penstock.schedule.constraint import Constraint

VOCABULARY = 300
CONTEXT = 160
END = 0  # <|end|>
NEAR = 1e-4  # two noisy scores closer than that may change places when a last bit moves
_TEXT = (
    "the pump lifts water to the tower and the river turns the wheel; 12 + 30 = 42 \u00e9\u00e8"
    " \u2014 na\u00efve "
)


def make_folder(folder: Path, *, layers: int = 2) -> Path:
    """hidden 64, GQA, untied head, weights wide enough that the likeliest token leads by far less
    than a lot."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed" in name else 1.4 / weight.shape[1] ** 0.5)
            else:
                weight.uniform_(0.7, 1.3)
        model.lm_head.weight.mul_(1.3)
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([_TEXT] * 50, trainer)
    return made


def logits_of(folder: Path) -> Twin:
    return Twin(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    )


@dataclass(slots=True)
class Twin:
    """The engine, one sample and one token at a time."""

    model: Any
    tokenizer: Tokenizer = field(default_factory=make_tokenizer)
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """[tokens, vocabulary] float32."""
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = self.model(torch.tensor([ids])).logits[0]
        return self.known[key]

    def adjusted(self, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
        """[vocabulary]: the logits that the next token is drawn from."""
        row = self.logits(prompt + output)[-1].clone()
        for token, value in (params.logit_bias or {}).items():
            row[token] += value
        for token in {*prompt, *output}:
            by = params.repetition_penalty
            row[token] = row[token] / by if row[token] > 0 else row[token] * by
        for token in set(output):
            row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        if len(output) < params.min_tokens:
            row[[END, *(params.stop_token_ids or [])]] = -torch.inf
        for word in self.bad_words(params):
            if output[max(0, len(output) - len(word) + 1) :] == word[:-1]:
                row[word[-1]] = -torch.inf
        if params.allowed_token_ids:
            row[list(set(range(VOCABULARY)) - set(params.allowed_token_ids))] = -torch.inf
        return row

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """vLLM's: a word as it is, and behind a space where that is another token."""
        out = []
        for word in params.bad_words or ():
            ids, spaced = (
                self.tokenizer.encode(text).ids for text in (word.lstrip(), " " + word.lstrip())
            )
            out += [ids, spaced] if spaced[0] != ids[0] and len(spaced) == len(ids) else [ids]
        return out

    def draw(self, rows: Tensor, params: SamplingParams, index: int, position: int) -> list[int]:
        """A token for each of rows [n, vocabulary], all at the same place of the same sample."""
        n = rows.shape[0]

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((n,), value, dtype=dtype)

        inputs = SamplerInputs(
            temperature=column(params.temperature, torch.float32),
            top_p=column(params.top_p, torch.float32),
            top_k=column(max(params.top_k, 0), torch.int32),
            min_p=column(params.min_p, torch.float32),
            seed=torch.full((n,), params.seed or 0, dtype=torch.int64),
            sample=column(index, torch.int32),
            position=column(position, torch.int32),
            any_filter=True,
            any_random=True,
        )
        return sample(rows, inputs).tolist()

    def run(
        self,
        prompt: list[int],
        params: SamplingParams,
        index: int = 0,
        constraint: Constraint | None = None,
    ) -> list[int]:
        """The tokens of one sample, end or stop token included."""
        output: list[int] = []
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {END})
        most = min(params.max_tokens or CONTEXT, CONTEXT - len(prompt))
        while len(output) < most:
            row = self.adjusted(prompt, output, params)
            words = constraint.mask() if constraint is not None else None
            if words is not None:
                row[
                    [t for t in range(VOCABULARY) if not words[t // 32] >> (t % 32) & 1]
                ] = -torch.inf
            output += self.draw(row[None], params, index, len(prompt) + len(output))
            if output[-1] in stops:
                break
            if constraint is not None:
                constraint.accept(output[-1])
        return output

    def is_near_tie(
        self,
        prompt: list[int],
        before: list[int],
        params: SamplingParams,
        index: int,
        two: set[int],
    ) -> bool:
        """Whether logits that are off by NEAR / 2 draw either of `two` after `before`: then neither
        is a fault."""
        row = self.adjusted(prompt, before, params)
        generator = torch.Generator().manual_seed(0)
        moved = row + (torch.rand(512, row.shape[0], generator=generator) - 0.5) * NEAR
        return two <= set(self.draw(moved, params, index, len(prompt) + len(before)))


@dataclass(slots=True)
class Comparison:
    """Compares samples token by token, up to the first near-tie; counts those, and accepts no other
    difference."""

    twin: Twin
    tokens: int = 0
    near_ties: int = 0
    faults: list[str] = field(default_factory=list)

    def sample(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        index: int,
        want: list[int],
        got: list[int],
    ) -> None:
        self.tokens += len(want)
        if want == got:
            return
        at = next(
            (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
            min(len(want), len(got)),
        )
        if at < min(len(want), len(got)) and self.twin.is_near_tie(
            prompt, want[:at], params, index, {want[at], got[at]}
        ):
            self.near_ties += 1
            return
        self.faults.append(
            f"{name}: sample {index} differs at {at}: {want[at : at + 4]} and {got[at : at + 4]}"
        )

    def close(self, name: str) -> None:
        """Prints the count, and fails where there was a fault, or a near-tie: in fp32 none is
        expected."""
        print(f"{name}: {self.tokens} tokens equal up to {self.near_ties} near-ties")
        assert not self.faults, self.faults[:5]
        assert self.tokens, "nothing was compared"
        assert not self.near_ties, (
            f"{self.near_ties} near-ties in {self.tokens} tokens of fp32: none were expected"
        )
