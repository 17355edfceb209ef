"""HfTokenizer: the tokenizer with methods of transformers. Has the most used methods. Chats are
rendered in the sandbox process, since a template is a program from elsewhere. Knows the tokenizer
and how chats are rendered; no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import UsageError
from penstock.sandbox.sandbox_process import ChatJob, Reply
from penstock.text.chat import check_messages
from penstock.text.tokenizer import Ids, Tokenizer

Words = str | Sequence[str]


class HfTokenizer(Tokenizer):
    """A tokenizer that can be called like those of transformers. `decode` leaves special tokens out
    by default."""

    render: Callable[[ChatJob], Reply]

    @classmethod
    def over(cls, tokenizer: Tokenizer, render: Callable[[ChatJob], Reply]) -> HfTokenizer:
        """Returns an HfTokenizer that shares the data of `tokenizer`. render: function that renders
        a chat."""
        made = cls.__new__(cls)
        made.__dict__ = tokenizer.__dict__
        made.render = render
        return made

    def __call__(self, text: Words, *, add_special_tokens: bool = True) -> dict[str, Any]:
        """Returns `input_ids` and `attention_mask` of one text, or of each text of a list."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        batch = self.encode_batch(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": batch, "attention_mask": [[1] * len(ids) for ids in batch]}

    def __len__(self) -> int:
        return self._fast.get_vocab_size(with_added_tokens=True)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """Renders a conversation by the model's chat template. Returns its ids, or its text with
        tokenize=False; for a list of conversations a list. return_dict: return the ids as
        `__call__` does. Raises UsageError, TokenizerError."""
        if chat_template is not None:
            raise UsageError(
                "the engine's chat_template is used: name another file when it is made,"
                " LLM(chat_template=FILE)",
                param="chat_template",
            )
        if conversation and not isinstance(conversation[0], Mapping):
            how = {
                "tokenize": tokenize,
                "add_generation_prompt": add_generation_prompt,
                **template_kwargs,
            }
            each = [
                self.apply_chat_template(
                    one, tools, continue_final_message=continue_final_message, **how
                )
                for one in conversation
            ]
            masks = [[1] * len(ids) for ids in each]
            return (
                {"input_ids": each, "attention_mask": masks} if return_dict and tokenize else each
            )
        job = ChatJob(
            messages=check_messages(conversation),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs or None,
            tools=tools,
        )
        done = self.render(job)
        if not tokenize:
            return done.text
        ids = done.ids[0]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids

    def batch_decode(
        self, sequences: Sequence[Ids], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Returns the texts of several sequences of token ids."""
        return self.decode_batch(sequences, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Words) -> Any:
        """Returns the id of a vocabulary entry, or a list of ids; None for an unknown entry."""
        return (
            self._fast.token_to_id(tokens)
            if isinstance(tokens, str)
            else [*map(self._fast.token_to_id, tokens)]
        )

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Returns the vocabulary entry of an id, or a list of entries; None for an unknown id."""
        return (
            self._fast.id_to_token(ids)
            if isinstance(ids, int)
            else [*map(self._fast.id_to_token, ids)]
        )

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self._fast.token_to_id(self.pad_token)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)
