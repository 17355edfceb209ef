"""Table of vLLM's request arguments. It has Penstock's treatment of each argument of SamplingParams
and of LLM's calls."""

from __future__ import annotations

from penstock.vllm_arguments.argument import Argument, As, named
from penstock.vllm_arguments.reasons import (
    ADAPTERS,
    CODE,
    CONTENT,
    FORM,
    NOTHING,
    REASONING,
    TEMPLATE,
)

SAMPLING: dict[str, Argument] = {
    **named("best_of", (As("n"),), "samples are not ranked: ask for n, and choose on your side"),
    **named(
        "use_beam_search early_stopping", (False,), "there is no beam search: ask for n samples"
    ),
    **named(
        "length_penalty", (1,), "it belongs to beam search, which there is none of: leave it out"
    ),
    **named("guided_decoding", (), FORM),
    **named("logits_processors", ([],), f"{CODE}: use logit_bias"),
    **named("extra_args", ({},), f"{CODE}: nobody would read them"),
    **named(
        "truncate_prompt_tokens", (-1,), "cut the token ids yourself, and give them as the prompt"
    ),
    **named("spaces_between_special_tokens", (True,), "special tokens are always spelt apart"),
    **named(
        "flat_logprobs",
        (False,),
        "logprobs are columns until they are looked at, and read as a list of dicts",
    ),
    **named("skip_reading_prefix_cache", (False,), "enable_prefix_caching=False keeps nothing"),
    **named("prompt_logprob_token_ids", (), "prompt_logprobs gives the 20 most likely"),
    **named("prompt_logprob_start routed_experts_prompt_start", (0,), "prompts are told whole"),
    **named("thinking_token_budget", (-1,), REASONING),
    **named(
        "repetition_detection trace_decode_token_ids",
        (),
        "samples end at stop strings, stop ids and max_tokens",
    ),
    **named("stream_interval", (1,), "outputs come whole, from stream() one by one: leave it out"),
    **named("skip_clone", bool, "parameters are only read"),
}
CALL: dict[str, Argument] = {  # arguments of LLM.generate and LLM.chat
    **named("lora_request prompt_adapter_request", (), ADAPTERS),
    **named("priority", (0, []), "requests have one priority"),
    **named(
        "tokenization_kwargs",
        ({},),
        "encode the text yourself (get_tokenizer), and give token ids as the prompt",
    ),
    **named("guided_options_request", (), FORM),
    **named("chat_template", (), TEMPLATE),
    **named("chat_template_content_format", ("auto",), CONTENT),
    **named("tools", ([],), "`LLM.chat` takes them, for the model's template"),
    **named("mm_processor_kwargs", object, NOTHING),
}
