"""What is wrong with a whole answer: its usage against its events, and against what was asked for.

It knows an answer that has ended; not how it was read (response_reader.py), nor when anything came.
"""

from __future__ import annotations

from penstock.bench.response_reader import StreamReader

OWN_LIMIT = "the server ran into a limit of its own"  # what tells a clamped answer from one that ended by itself


def judge(answer: StreamReader, asked_prompt: int, asked_output: int, most_output: int = -1) -> tuple[str, str] | None:
    """Returns (outcome, message) of a whole answer that isn't what it should be; None where it is. asked_*: tokens, -1
    where no length is fixed. most_output: tokens of all its samples, at most."""
    if answer.fault is not None:
        return answer.fault
    usage = answer.usage
    if usage is None:
        return "usage", "it told no usage"
    prompt, output = usage.prompt_tokens, usage.completion_tokens
    if len(answer.times) > output:
        return "usage", f"{len(answer.times)} events with output, but a usage of {output} tokens"
    if output and not answer.times:
        return "usage", f"no event with output, but a usage of {output} tokens"
    if usage.total_tokens is not None and usage.total_tokens != prompt + output:
        return "usage", f"a usage of {prompt} + {output} tokens in and out, {usage.total_tokens} in all"
    if usage.cached > prompt:
        return "usage", f"a usage of {usage.cached} cached tokens of a prompt of {prompt}"
    if asked_output not in (-1, output):
        why = _why_short(answer.reason, prompt + output) if output < asked_output else ""
        return "length", f"{output} tokens out, {asked_output} were asked for{why}"
    if most_output >= 0 and output > most_output:
        return "usage", f"a usage of {output} tokens, {most_output} were asked for at most"
    if asked_output == -1 and (told := _clamped(answer, output, most_output)):
        return "length", told
    if asked_prompt not in (-1, prompt):
        return "length", f"{prompt} tokens in, {asked_prompt} were sent"
    return None


def _clamped(answer: StreamReader, output: int, most_output: int) -> str | None:
    """Samples end by themselves or at max_tokens: those that say "length" have all of theirs, or the server's context
    was too short. Fewer than there should be of these alone are seen."""
    if most_output < 0 or not answer.limited:
        return None
    least = answer.limited * (most_output // answer.finished)
    if output >= least:
        return None
    told = f"{answer.limited} of {answer.finished} samples say finish_reason 'length', which is {least} tokens or more"
    return f"{output} tokens out, but {told}: {OWN_LIMIT}; is its context that long?"


def _why_short(reason: str | None, tokens: int) -> str:
    """Returns why an answer is short. A finish_reason "length" before max_tokens is, by OpenAI's words, the end of the
    context. Any other one is an end that the model wrote, though it was to be ignored."""
    if reason == "length":
        return f": {OWN_LIMIT} at {tokens} tokens in and out (finish_reason 'length'); is its context that long?"
    return f": it ended by itself (finish_reason {reason!r}), so ignore_eos is not heeded" if reason else ""
