"""Writes docs/cli.md from the command line, docs/config.md from Config, docs/coming_from_vllm.md from its table, and
the table of models in docs/models.md.

`--check` fails when one is out of date.
Nothing on those pages is written by hand: names, types, defaults and help come from the code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.main import get_command

from penstock.cli import app
from penstock.config import Config
from penstock.models.catalog import CATALOG, MEASURED
from penstock.quant.choose import MADE
from penstock.quant.read_quantization import READ
from penstock.quant.told_object import REFUSED
from penstock.request import SamplingParams
from penstock.vllm_arguments import (
    CALL,
    ENGINE,
    SAMPLING,
    SERVE,
    SHARED,
    SHARED_SERVE,
    SPELLINGS,
    Argument,
    spelt,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Made by scripts/make_docs.py from the code; `make docs` makes it again. -->\n"
ENDINGS = """\
`penstock --version` says which one it is; `python -m penstock` is the same. An error that can be mended ends with one
line and exit code 2 (1 where another program or a server is at fault, and where `run --fail-on-error` has a row with an
error), Ctrl-C with 130 (`serve`, once its model loads, with 0), SIGTERM of a job that goes on where it was with 143.
[Engine options](config.md) are told there, vLLM's in [coming from vLLM](coming_from_vllm.md).
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    check = parser.parse_args().check
    stale = []
    pages = {
        "cli.md": cli_page(), "config.md": config_page(), "coming_from_vllm.md": vllm_page(),
        "quantization.md": quantization_page(), "models.md": models_page(),
    }  # fmt: skip
    for name, text in pages.items():
        path = DOCS / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text)
    if check and stale:
        print(f"out of date: {', '.join(f'docs/{name}' for name in stale)}; run `make docs`", file=sys.stderr)
        return 1
    print(f"docs: {', '.join(stale) or 'nothing'} {'is stale' if check else 'written anew'}")
    return 0


def cli_page() -> str:
    """A section a command: its line, what it does, its arguments and options."""
    root: Any = get_command(app)
    helps = {knob.name: knob.metadata["help"] for group in Config().groups() for knob in fields(group)}
    parts = [f"# The command line\n\n{NOTE}\n{root.help}\n"]
    parts.append(ENDINGS)
    for name, command in _commands(root):
        inner = getattr(command, "commands", None)
        if inner is not None:
            listed = ", ".join(f"`{name} {word}`" for word in inner)
            parts.append(f"## `penstock {name}`\n\n{_one_line(command.help)} Its commands: {listed}.\n")
            continue
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        own = [p for p in options if p.help != helps.get(p.name)]  # a knob's name alone makes none an engine option
        shared = [p for p in options if p not in own]
        line = " ".join(["penstock", name, *(_metavar(a) for a in arguments), "[options]"])
        parts.append(f"## `penstock {name}`\n\n```\n{line}\n```\n\n{_one_line(command.help)}\n")
        parts.append(_table([(_metavar(a).strip("[]"), a) for a in arguments] + [(_names(o), o) for o in own]))
        if shared:
            parts.append("Engine options: " + ", ".join(_names(o) for o in shared) + ".\n")
    return "\n".join(parts)


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words, groups before what is in them."""
    for word, command in group.commands.items():
        yield before + word, command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{word} ")


def _table(rows: list[tuple[str, Any]]) -> str:
    if not rows:
        return ""
    lines = ["| | default | |", "| --- | --- | --- |"]
    for name, parameter in rows:
        shown = name if name.startswith("`") else f"`{name}`"
        lines.append(f"| {shown} | {_default(parameter)} | {_help(parameter)} |")
    return "\n".join(lines) + "\n"


def _help(parameter: Any) -> str:
    told = _one_line(parameter.help or "")
    names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    said = ", else ".join(f"`{name}`" for name in names)
    return f"{told} {said} in the environment says it too." if names else told


def _metavar(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    return "" if parameter.default in (None, "") else f"`{parameter.default}`"


def config_page() -> str:
    """A table a group of knobs."""
    parts = [f"# Engine options\n\n{NOTE}"]
    parts.append(
        "One name everywhere: `LLM(max_num_seqs=64)`, `Config.of(max_num_seqs=64)`, `penstock serve --max-num-seqs 64`."
    )
    parts.append(
        "Where the default is empty the engine decides. A wrong name, type or range is refused before anything loads.\n"
    )
    for group in Config().groups():
        hints = get_type_hints(type(group))
        parts.append(f"## {_one_line(type(group).__doc__ or '').rstrip('.')}\n")
        parts.append("| knob | kind | default | |\n| --- | --- | --- | --- |")
        for knob in fields(group):
            default = "" if knob.default is None else f"`{str(knob.default).lower()}`"
            parts.append(
                f"| `{knob.name}` | {_kind(hints[knob.name], knob.metadata)} | {default} | {knob.metadata['help']} |"
            )
        parts.append("")
    return "\n".join(parts)


def _kind(hint: Any, metadata: Any) -> str:
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{choice}`" for choice in choices)
    kind = next((k for k in choices if k is not type(None)), hint)
    word = {str: "text", int: "whole number", bool: "on or off", float: "number"}[kind]
    low, high = metadata["low"], metadata["high"]
    if low is None:
        return word
    if high is None or high >= 2**63 - 1:
        return f"{word}, {low} or more"
    return f"{word}, {low} to {high}"


FROM_VLLM = """\
`from penstock import LLM, SamplingParams` for `from vllm import ...`, `penstock serve MODEL` for `vllm serve MODEL`:
names, defaults and the shapes of outputs are vLLM's. An argument that only vLLM has is taken where it asks for what is
done here anyway, or where it can change no answer; everything else is refused, before anything loads, with the sentence
of these tables. `None` is left out everywhere. On the command line names may have underscores too, `-tp` and its like
are read, and `--model` is the MODEL that stands by itself.

`LLM` has `generate`, `chat`, `get_tokenizer`, `sleep`, `wake_up`, `update_weights`, `reset_prefix_cache` and, for long
jobs, `stream`; `AsyncLLM` is there too: [llm.md](llm.md). Its `score` tells how likely given next tokens are, not how
alike two texts are. It has no `beam_search`, `embed`, `encode`, `classify`, `reward` or `collective_rpc`. Over HTTP
each field has its place in [server.md](server.md).
"""


ASYNC = """\
| vLLM's | here |
| --- | --- |
| `from_engine_args` | the same; AsyncEngineArgs are penstock's, and `AsyncLLM(model, ...)` makes it too |
| `generate` | the same; it starts the engine where nothing has, and request_id may be left out |
| `SamplingParams.output_kind` | CUMULATIVE, DELTA, FINAL_ONLY, as there; import RequestOutputKind from penstock |
| `abort` | the same; a text or several; what was made is the last output, with finish_reason abort |
| `check_health` | the same; raises EngineError |
| `errored`, `dead_error`, `is_running`, `is_stopped` | not there: check_health says it |
| `shutdown` | awaited; `async with` does it |
| `reset_prefix_cache`, `sleep`, `wake_up`, `is_sleeping` | the same |
| `collective_rpc`, `update_weights` | update_weights(model_path, shared=..., weights_version=..., mode=...) |
| `pause_generation`, `resume_generation` | not there: `mode` of update_weights and sleep says it |
| `get_tokenizer` | not there: LLM has it, over HTTP /tokenize |
| `encode` | not there: models generate text here |
| `add_lora`, `remove_lora`, `list_loras`, `pin_lora` | not there: one adapter is merged into the weights, by lora=DIR |
| `start_profile`, `stop_profile`, `do_log_stats`, `is_tracing_enabled` | not there: a server's /metrics tells |
| `CompletionOutput.weights_version` | ours alone, of LLM and AsyncLLM: which weights a sample was made with |
"""


def vllm_page() -> str:
    """What becomes of each of vLLM's arguments."""
    spellings = "; ".join(
        f"{name} `{theirs}` is `{here}`" for name, known in SPELLINGS.items() for theirs, here in known.items()
    )
    own = [field.name for field in fields(SamplingParams) if field.name != "stop_when"]
    return "\n".join([
        f"# Coming from vLLM\n\n{NOTE}\n{FROM_VLLM}",
        "## `LLM(...)`, and every command with engine options\n",
        f"The same here: {_quoted(SHARED)} ({spellings}). [config.md](config.md) has ours beside them.\n",
        _fates(ENGINE),
        "## `serve`\n",
        f"The same here: {_quoted(SHARED_SERVE)}. All of the above, and:\n",
        _fates(SERVE),
        "## `SamplingParams`\n",
        f"The same here: {_quoted(own)}. Ours alone: `stop_when`.\n",
        _fates(SAMPLING),
        "## `generate` and `chat`\n",
        "What they take is in [llm.md](llm.md). Of vLLM's others:\n",
        _fates(CALL),
        "## `AsyncLLM`\n",
        "Outputs are built as `LLM`'s are: lazy logprobs with `.columns`, `cumulative_logprob`, `weights_version`.\n",
        ASYNC,
    ])  # fmt: skip


QUANTIZATION = """\
What a checkpoint's `quantization_config` says is read, and kept in eight or four bits; a wide checkpoint is quantized
while it is loaded by `--quantization`, `LLM(quantization=...)`. `penstock doctor MODEL` says what the weights take.
"""
MADE_ROWS = {
    "fp8": "e4m3, a float32 scale an output, llm-compressor's numbers byte for byte; the head stays wide, but in a "
    "build with `--quantize-lm-head`",
    "int8": "symmetric, a scale an output, to the nearest; the head too",
    "int4": "symmetric, groups of 128 inputs (64 or 32 where those don't divide, 32 of fewer than 768; of a build the "
    "smallest for all), to the nearest, in a build by what is multiplied ([build.md](build.md)); the head int8",
    "nvfp4": "e2m1, an e4m3 scale for 16 inputs and a float32 for the whole, compressed-tensors' numbers byte for "
    "byte; in a build q, k and v, and gate and up, share the last, as vLLM wants it; the head stays wide",
}
QUANTIZATION_NOTES = """\
Routers of experts stay wide (of GPTQ, which doesn't name them, too); experts have every form above, but
gpt-oss's, which stay as the checkpoint has them (`mxfp4`, or wide). `lm_head` is as wide as the checkpoint has it.

Scales of activations that a checkpoint brings (`input_scale`, `input_global_scale`, `activation_scale`) are read past:
a row gets a scale of its own where it is multiplied in eight bits, which is finer, and none elsewhere.
`kv_cache_scheme` and the scales of K and V are read where KV is (`kv_cache_dtype`). Matrices that are multiplied
together (q, k, v; gate, up) must be stored alike. Over several ranks a matrix is cut by outputs anywhere, by inputs
between groups or blocks. A key that nobody knows, and that may change numbers, is refused by name.

**Four-bit floats** (NVFP4, MXFP4: [four_bit_floats.md](design/four_bit_floats.md)) are weights here and nothing else:
a checkpoint that means its activations to be in four bits too (`NVFP4` of ModelOpt, `input_activations` of 4 bits) is
served with those as wide as the model, which loses less, and the start says so on standard error. Dense matrices have
them, experts, and heads that are not tied. They are read where 32 divides a row, and on several ranks no cut goes
through 32 inputs. `hf_quant_config.json` is read where config.json says nothing. A scale of the whole that is 0,
negative or no number is refused by name.

On a GPU one row is multiplied twice as fast by four-bit floats as in bfloat16, 16 by 1.4 times, 64 about as fast, 128
and more slower: for large batches take fp8 or int4.

**Which kernels.** On a GPU: [eight_bits.md](design/eight_bits.md), four-bit floats in their own page. On a CPU with
VNNI int8 goes as integers, with rows in sixteen bits, and int4 in groups by torch's own product: one request of
Qwen2.5-0.5B's shape is 1.4 to 1.8 and 1.7 to 1.9 times as fast as in bfloat16, its products of 512 rows together take
1.5 and 2.5 times as long. Everything else is widened for each product there, and slow: float8 is slower than bfloat16,
for half of its memory, four-bit floats for 0.28 of it, and the start says so.
"""


def quantization_page() -> str:
    """What is read, made and refused."""
    read = [f"| `{method}` | {what} |" for method, what in READ.items()]
    made = [f"| `{name}` | {MADE_ROWS[name]} |" for name in MADE]
    refused = [f"| `{name}` | {why} |" for name, why in REFUSED.items()]
    return "\n".join([
        f"# Quantized models\n\n{NOTE}\n{QUANTIZATION}",
        "## Read\n\n| `quant_method` | |\n| --- | --- |", *read,
        "\n`--quantization` may name the method, or what its numbers are (`fp8`, `int8`, `int4`, `nvfp4`, `mxfp4`); no "
        "other.\n",
        "## Made at load\n\n| `--quantization` | |\n| --- | --- |", *made,
        f"\n{QUANTIZATION_NOTES}",
        "## Refused\n",
        "Other methods than those above (AQLM, HQQ, QuIP, EXL2 ...), act-order (`desc_act`, `actorder: group`), \n"
        "float8 e5m2, transforms, sizes of groups and blocks that are not above, and by name:\n",
        "| | |\n| --- | --- |", *refused, "",
    ])  # fmt: skip


def models_page() -> str:
    """The page as it stands, its table of models made anew."""
    before, made, rest = (DOCS / "models.md").read_text().partition("as `penstock models` prints it. -->\n")
    _, end, after = rest.partition("<!-- end -->")
    rows = [f"| `{name}` | {each.models} | {each.on} | {each.notes} |" for name, each in CATALOG.items()]
    head = ["| model_type | models | compared with transformers on | |", "| --- | --- | --- | --- |"]
    return before + made + "\n".join(["", *head, *rows, "", MEASURED, "", ""]) + end + after


def _fates(table: dict[str, Argument]) -> str:
    """A row for the arguments that have one fate."""
    names: dict[int, list[str]] = {}
    for name, argument in table.items():
        names.setdefault(id(argument), []).append(name)
    rows = [f"| {_quoted(names.pop(id(a)))} | {_taken(a)} | {a.note} |" for a in table.values() if id(a) in names]
    return "\n".join(["| argument | taken | |", "| --- | --- | --- |", *rows]) + "\n"


def _taken(argument: Argument) -> str:
    if argument.told:
        return f"{spelt(argument)}; the other way too, with a line that says so"
    return spelt(argument) if argument.taken else "no"


def _quoted(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
