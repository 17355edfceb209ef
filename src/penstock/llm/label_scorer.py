"""LabelScorer implements `LLM.score`: the probabilities of label tokens behind each prompt. Also
raises the errors of vLLM's methods that are not served, by name. Works on token ids; LLM runs the
requests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.engine.label_scores import label_params, label_probs
from penstock.errors import UsageError
from penstock.llm.inputs import Prompt, TextOrIds, needed
from penstock.llm.outputs import Told

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

_GENERATES = "this engine generates text: ask one of a model that is made for it"
_REFUSED = {
    "beam_search": "there is no beam search: ask generate for n samples",
    **dict.fromkeys(("encode", "embed", "classify", "reward"), _GENERATES),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"),
        "code from outside is not run in the engine: update_weights takes weights",
    ),
    "init_weight_transfer_engine": (
        "update_weights(shared=...) takes weights of another process in one call"
    ),
    **dict.fromkeys(
        ("start_profile", "stop_profile"), "benchmarks/shapes.py says what the parts of a step take"
    ),
    "get_metrics": "stats() has them",
    "get_default_sampling_params": (
        "SamplingParams() has them; a model's own are its generation_config.json's"
    ),
}


@dataclass(slots=True)
class ScoringOutput:
    """Probabilities for one item. score: probability of the first label. label_probs: probabilities
    of all labels, in order."""

    score: float
    label_probs: list[float]


@dataclass(slots=True)
class ScoringRequestOutput:
    """Score of one item. error: why it has no score; `outputs` is then None."""

    request_id: str
    outputs: ScoringOutput | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0
    error: str | None = None


class LabelScorer:
    """Base class of LLM, with its method that scores labels."""

    _tokenizer: Tokenizer | None

    def _deltas(self, prompts: Iterable[Prompt]) -> Generator[Told]:
        raise NotImplementedError

    def score(
        self,
        query: TextOrIds,
        items: TextOrIds | Sequence[TextOrIds],
        /,
        *,
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = True,
        item_first: bool = False,
        add_special_tokens: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Returns for each item the probability of the first of `label_token_ids` as the next token
        after query and item.

        apply_softmax: normalise over the labels; False: over the vocabulary. item_first: put the
        item before the query. add_special_tokens: add them to a query given as text; items never
        get any. A query before the items is computed once for all items. An item that can't run
        (too long) gets an `error`; the others go on.
        """
        if label_token_ids is None:
            raise UsageError(
                "score needs label_token_ids: a model that generates scores by its next token",
                param="label_token_ids",
            )
        params = label_params(list(label_token_ids))
        listed: list[Any] = (
            [items]
            if isinstance(items, str) or (items and isinstance(items[0], int))
            else list(items)
        )
        header = self._ids_of(query, add_special_tokens)
        bodies = [self._ids_of(item, special=False) for item in listed]
        prompts = [item + header if item_first else header + item for item in bodies]
        outs = [ScoringRequestOutput(str(i), prompt_token_ids=ids) for i, ids in enumerate(prompts)]
        asked = (Prompt(key=i, prompt=ids, params=params) for i, ids in enumerate(prompts))
        for delta, request, prompt in self._deltas(asked):
            out = outs[prompt.key]
            out.error = delta.error
            if request is not None:
                out.num_cached_tokens = request.num_cached_tokens
            if delta.error is None:
                probs = label_probs(delta, softmax=apply_softmax)
                out.outputs = ScoringOutput(probs[0], probs)
        return outs

    def _ids_of(self, given: TextOrIds, special: bool) -> list[int]:
        if isinstance(given, str):
            return needed(self._tokenizer, "score of texts").encode(
                given, add_special_tokens=special
            )
        return list(given)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns, for a method of vLLM that is not served, a function that raises UsageError with
        an explanation."""
        if name not in _REFUSED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> Any:
            raise UsageError(f"{name} is not served: {_REFUSED[name]}", param=name)

        return refuse
