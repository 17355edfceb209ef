"""Turns problems into training documents, and documents into rows of tokens.

Two forms: few-shot text, `Question: ...\\nAnswer: ...` with a blank line between problems, ended by
the end-of-text token after the last; and chats in the tokenizer's own template. `penstock monkeys`
asks in the first form. Knows token ids only through its tokenizer argument, and no model.
"""

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from problems import Problem, make_problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT, TURN, END_OF_TURN, PAD = "<|end_of_text|>", "<|turn|>", "<|end_of_turn|>", "<|pad|>"
SPECIALS = (END_OF_TEXT, TURN, END_OF_TURN, PAD)  # ids 0 to 3

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + (message['content'] or '') + '<|end_of_turn|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)

SYSTEM = (
    "You are a helpful assistant.",
    "Solve the problem step by step.",
    "Work the problem out and end with #### and the number.",
    "You are a teacher. Show each step.",
)


def id_of(tokenizer: "Tokenizer", token: str) -> int:
    """The id of a token. Raises ValueError when the tokenizer doesn't have it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return number


def few_shot_text(problems: list[Problem]) -> str:
    """Problems with their answers, one after the other, ended by end-of-text."""
    return (
        "\n\n".join(f"Question: {p.question}\nAnswer: {p.answer}" for p in problems) + END_OF_TEXT
    )


def prompt_text(shots: list[dict[str, str]], question: str) -> str:
    """Returns the prompt for `question` behind worked examples, in the form that `penstock monkeys`
    uses."""
    head = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in shots)
    return f"{head}Question: {question}\nAnswer:"


def chat_text(problems: list[Problem], system: str | None) -> str:
    """Returns a chat of at least one turn, as `CHAT_TEMPLATE` renders it, ended by end-of-text."""
    opening = f"{TURN}system\n{system}{END_OF_TURN}\n" if system else ""
    turns = "".join(
        f"{TURN}user\n{p.question}{END_OF_TURN}\n{TURN}assistant\n{p.answer}{END_OF_TURN}\n"
        for p in problems
    )
    return opening + turns + END_OF_TEXT


def document(rng: Random) -> str:
    """Draws one training document: with probability 1/5 a chat, else few-shot text of 1 to 6
    problems, now and then up to 20."""
    draw = rng.random()
    if draw < 0.2:
        system = SYSTEM[int(rng.random() * len(SYSTEM))] if rng.random() < 0.4 else None
        return chat_text([make_problem(rng) for _ in range(1 + int(rng.random() * 3))], system)
    most = 20 if draw < 0.25 else 6
    return few_shot_text([make_problem(rng) for _ in range(1 + int(rng.random() * most))])


def token_rows(
    tokenizer: "Tokenizer", seed: int, length: int, batch: int = 512
) -> Iterator[npt.NDArray[np.uint16]]:
    """Yields rows `[length]` of token ids endlessly: each begins with a document and holds as many
    as fit.

    The last document of a row is cut at its end and not continued, so that the model learns prompts
    at position 0 well.
    """
    rng = Random(seed)
    row: list[int] = []
    while True:
        for encoded in tokenizer.encode_batch([document(rng) for _ in range(batch)]):
            row += encoded.ids
            if len(row) >= length:
                yield np.array(row[:length], dtype=np.uint16)
                row = []
