"""grammar: compiles structured_outputs to masks of allowed tokens. Uses the library llguidance and
the bytes of a tokenizer's tokens.

    StructuredOutputsParams -> grammar_text -> check_grammar (validation without a tokenizer)
                               -> GrammarCompiler.compile -> CompiledGrammar.matcher, one per sample

The library limits its work per grammar (`_limits`), so that no mask takes longer than about half a
second. It fetches no $ref from the network. Knows token bytes and grammars; no rows, no engine.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.request import StructuredOutputsParams
from penstock.text.schema_numbers import hold_numbers, may_have_large_numbers
from penstock.text.structural_tag import CONTENT, read_structural_tag, tags_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits
    from llguidance._lib import JsonCompileOptions

    from penstock.text.tokenizer import Tokenizer

Words = NDArray[np.int32]
# Most white space between JSON's parts. If more is allowed, models write white space without end,
# at temperature 1 until max_tokens.
WHITESPACE = " "
LONGEST_WHY = 600  # most characters of the library's message in an error
# Regexes of slices of the vocabulary, for the library. If the text may continue by as many
# characters as a slice's longest token, the library allows the whole slice at once, and checks only
# the other tokens one by one. With the library's default slices, {1,10} and {1,30}, a mask with 10
# to 29 characters left took 1.1 ms for 128,256 tokens. With these slices it takes 0.25 to 0.85 ms.
# Masks of 100 schemas take 14 % less time.
_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_TEXT}{{1,{most}}}" for most in (5, 8, 10, 12, 14, 16, 20, 24, 30)),
    f"{_TEXT}+",
)
# the library is asked for forced tokens, which takes 20 to 80 us, only if a mask has at most this
# many nonzero words
FEW = 64


def grammar_text(asked: StructuredOutputsParams, special: Container[str] = ()) -> str:
    """Returns a structured output as a grammar in llguidance's format. special: texts of the
    vocabulary's special tokens, which a structural tag may contain. Raises UsageError."""
    if asked.around is None:
        return _form_text(asked, special)
    grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": asked.around}]
    try:
        if asked.kinds:
            form, *parts = json.loads(_form_text(asked, special))["grammars"]
            grammars += [{**form, "name": "form"}, *parts]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)
    except RecursionError as error:
        raise _refused("it is nested too deep") from error


def _tags_text(asked: StructuredOutputsParams, special: Container[str]) -> str:
    """Returns the grammar of a structural tag: one in Lark for the whole text, and one for each
    tag's content."""
    tags = read_structural_tag(str(asked.structural_tag))
    grammars: list[dict[str, Any]] = [{"name": "tags", "lark_grammar": tags_lark(tags, special)}]
    for at, tag in enumerate(tags.tags):
        if (content := tag.content.form) is not None:
            part = StructuredOutputsParams(
                **content,
                lenient=asked.lenient,
                whitespace_pattern=asked.whitespace_pattern,
                disable_any_whitespace=asked.disable_any_whitespace,
            )
            (form,) = json.loads(_form_text(part, special))["grammars"]
            grammars.append({**form, "name": f"{CONTENT}{at}"})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _form_text(asked: StructuredOutputsParams, special: Container[str]) -> str:
    from llguidance import LLMatcher, grammar_from

    if asked.structural_tag is not None:
        return _tags_text(asked, special)
    try:
        if asked.json is not None or asked.json_object:
            schema = '{"type": "object"}' if asked.json is None else asked.json
            assert isinstance(schema, str), "a schema is kept as text"
            if may_have_large_numbers(schema):
                schema = json.dumps(hold_numbers(json.loads(schema)), ensure_ascii=False)
            return LLMatcher.grammar_from_json_schema(schema, defaults=_json_options(asked))
        if asked.regex is not None:
            return LLMatcher.grammar_from_regex(asked.regex)
        if asked.choice is not None:
            each = " | ".join(
                json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(asked.choice)
            )
            # choices are a terminal of Lark, which is efficient even for 10,000 choices
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {each}")
        return grammar_from("grammar", asked.grammar or "")
    except UsageError:
        # raised for a number that cannot be enforced; caught first, since UsageError is also a
        # ValueError
        raise
    except (ValueError, RecursionError) as error:
        raise _refused(str(error)) from error


def _json_options(asked: StructuredOutputsParams) -> JsonCompileOptions:
    spaced = not asked.disable_any_whitespace
    pattern = asked.whitespace_pattern or (WHITESPACE if spaced else None)
    return {
        "whitespace_flexible": spaced,
        "whitespace_pattern": pattern,
        "lenient": asked.lenient,
        "coerce_one_of": asked.lenient,
    }


def check_grammar(asked: StructuredOutputsParams) -> None:
    """Raises UsageError, with the library's message, for an invalid grammar or one that nothing
    matches. Needs no tokenizer."""
    from llguidance import LLMatcher

    failed, why = LLMatcher.validate_grammar_with_warnings(grammar_text(asked), limits=_limits())
    if failed:
        raise _refused(why[0])


class CompiledGrammar:
    """A grammar compiled for a vocabulary. words: number of int32 words per mask. ends: ids that
    end a sample."""

    def __init__(self, matcher: LLMatcher, words: int, ends: Sequence[int]) -> None:
        self._matcher, self._words, self._ends = matcher, words, tuple(ends)

    def matcher(
        self,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        *,
        forces: bool = True,
        out: Words | None = None,
    ) -> GrammarMatcher:
        """Returns the state of a new sample. The sample doesn't end before min_tokens, unless the
        grammar forces the end. stop_ids: further ids that end it. forces: True: text that the
        grammar forces is spelled as by the tokenizer; False: its tokens are sampled. out: int32
        array [words] for the masks; None: allocate one."""
        out = np.zeros(self._words, np.int32) if out is None else out
        return GrammarMatcher(
            self._matcher.deep_copy(), out, (*self._ends, *stop_ids), min_tokens, forces
        )


class GrammarMatcher:
    """Grammar state of one sample; implements the scheduler's Constraint. If the sample cannot
    continue, its mask allows no token. Each mask overwrites the previous one."""

    def __init__(
        self, matcher: LLMatcher, out: Words, ends: tuple[int, ...], min_tokens: int, forces: bool
    ) -> None:
        """out: int32 array [words] that each mask is written to."""
        self._matcher, self._out, self._ends, self._forces = matcher, out, ends, forces
        self._address, self._bytes = out.ctypes.data, out.nbytes
        self._left = min_tokens
        self._now: list[int] | None = (
            # forced tokens at the current position, or None until they are computed; `out` then has
            # the mask
            None
        )

    def mask(self) -> Words:
        forced, words = self._stand(), self._out
        if forced:
            words[:] = 0
            words.view(np.uint8)[forced[0] // 8] = 1 << forced[0] % 8
        elif self._left > 0 and (others := self._without_ends(words)).any():
            words[:] = others
        return words

    def forced(self) -> list[int]:
        return self._stand()

    def accept(self, token: int) -> None:
        self._left -= 1
        self._now = None
        self._matcher.consume_token(token)

    def rollback(self, tokens: int) -> None:
        self._left += tokens
        self._now = None
        self._matcher.rollback(tokens)

    def _without_ends(self, words: Words) -> Words:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        bits[list(self._ends)] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _stand(self) -> list[int]:
        if self._now is None:
            self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
            if self._matcher.is_error():
                self._out[:] = 0
            few = self._forces and np.count_nonzero(self._out) <= FEW
            self._now = self._matcher.compute_ff_tokens() if few else []
        return self._now


class GrammarCompiler:
    """Compiles grammars for one vocabulary, which the library prepares once (0.75 s for 128,256
    tokens). Use from one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        """ends: ids of the model's end tokens. Raises UsageError if there are none."""
        from llguidance import LLTokenizer, TokenizerWrapper

        if not ends:
            raise _refused("this model has no end ids, and an answer would not end with its form")
        self.special = tokenizer.special_texts
        self._ends = tuple(ends)
        self._words = -(-tokenizer.vocab_size // 32)
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, ends[0]))
        self._tokenizer = LLTokenizer(
            vocabulary, n_vocab=tokenizer.vocab_size, eos_token=[*ends], slices=[*SLICES]
        )

    def compile(self, text: str) -> CompiledGrammar:
        """Compiles the result of grammar_text, and makes its first mask, which is the slowest.
        Raises UsageError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_limits())
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            matcher = matcher if not first.is_error() else first
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return CompiledGrammar(matcher, self._words, self._ends)


class _Vocabulary:
    """The model's tokenizer with the attributes that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.eos_token_id, self.tokens = end, tokenizer.token_bytes
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode_inside

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenizes text that a grammar forces, as text inside other text and without
        normalisation."""
        (ids,) = self._encode([text.decode() if isinstance(text, bytes) else text])
        return ids


def _limits() -> LLParserLimits:
    """Returns the library's work limits. With its defaults (1,000,000, 200,000, 250,000 and 500,000
    in the same order) the first mask of a regex with 10^10 repeats took 1.4 s and 200 MB; with
    these limits it takes 0.6 s and 80 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=25_000,
        verbose_errors=False,
    )


def _refused(why: str) -> UsageError:
    why = " ".join(
        why.replace("<non-verbose/>", "").replace("NoExtensionBias", "nothing can match it").split()
    )
    rule = f"structured_outputs cannot be served: {why[:LONGEST_WHY]}"
    return UsageError(rule, param="structured_outputs", rule=rule)
