"""Writes docs/cli.md from the command line, docs/config.md from Config, docs/coming_from_vllm.md
from its table, docs/http.md from the server's forms, docs/files.md from docstrings, and the lists
in docs/models.md and docs/README.md.

`--check` fails when one is out of date. Nothing on those pages is written by hand: names, types,
defaults and help come from the code.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from docs_files import files_page, rooms_part
from docs_http import http_page
from typer.main import get_command

from penstock.cli import app
from penstock.config import Config
from penstock.models.model_list import CATALOG
from penstock.quant.choose import MADE
from penstock.quant.quant_keys import REFUSED
from penstock.quant.read_quantization import READ
from penstock.request import SamplingParams
from penstock.vllm_arguments.argument import Argument
from penstock.vllm_arguments.engine_table import ENGINE, SHARED, SPELLINGS
from penstock.vllm_arguments.request_table import CALL, SAMPLING
from penstock.vllm_arguments.server_table import SERVE, SHARED_SERVE
from penstock.vllm_arguments.sift import spelt

DOCS = Path(__file__).resolve().parent.parent / "docs"
VLLM_FILES = Path(__file__).with_name("vllm_files.txt")
NOTE = "<!-- Made by scripts/make_docs.py from the code; `make docs` makes it again. -->\n"
ENDINGS = """\
`python -m penstock` is the same; `penstock --version` says which one it is. An error that you can
mend is one line.

exit code | when
--- | ---
0 | done; Ctrl-C or SIGTERM of `serve` once its model loads
1 | another program or a server is at fault; a row has an error and `--fail-on-error` was given
2 | an error that you can mend, before anything ran
130 | Ctrl-C
143 | SIGTERM of a job that goes on where it was
"""
ENGINE_OPTIONS = """\
Commands that open a model take these; [config.md](config.md) says what each does, [coming from
vLLM](coming_from_vllm.md) which of vLLM's are taken beside them. Switches have a form with `--no-`.
A command that lacks some names them.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when a page is out of date"
    )
    check = parser.parse_args().check
    stale = []
    pages = {
        "cli.md": cli_page(),
        "config.md": config_page(),
        "coming_from_vllm.md": vllm_page(),
        "quantization.md": quantization_page(),
        "models.md": models_page(),
        "http.md": http_page(NOTE),
        "files.md": files_page(NOTE),
        "README.md": rooms_part((DOCS / "README.md").read_text()),
    }
    for name, text in pages.items():
        path = DOCS / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text)
    if check and stale:
        print(
            f"out of date: {', '.join(f'docs/{name}' for name in stale)}; run `make docs`",
            file=sys.stderr,
        )
        return 1
    print(f"docs: {', '.join(stale) or 'nothing'} {'is stale' if check else 'written anew'}")
    return 0


def cli_page() -> str:
    """Returns docs/cli.md: a section a command, with its description, arguments and options. Engine
    options are named once, and so are options that an earlier command has too."""
    root: Any = get_command(app)
    helps = {
        knob.name: knob.metadata["help"] for group in Config().groups() for knob in fields(group)
    }
    engine = _engine_flags(root, helps)
    parts = [f"# The command line\n\n{NOTE}\n{root.help}\n", ENDINGS]
    parts.append(f"## Engine options\n\n{ENGINE_OPTIONS}\n{_quoted(engine)}.\n")
    seen: dict[tuple[Any, ...], str] = {}
    for name, command in _commands(root):
        inner = getattr(command, "commands", None)
        if inner is not None:
            parts.append(f"## `penstock {name}`\n\n{_first(command.help)}\n")
            continue
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        # a knob's name alone makes none an engine option
        own = [p for p in options if p.help != helps.get(p.name)]
        shared = {flag for p in options if p not in own for flag in p.opts}
        parts.append(f"## `penstock {name}`\n\n{_first(command.help)}\n")
        if len(arguments) > 1:
            line = " ".join(["penstock", name, *(_metavar(a) for a in arguments), "[options]"])
            parts.append(f"`{line}`\n")
        told = [(f"`{_metavar(a).strip('[]')}`", a) for a in arguments]
        rows, again = [], {}
        for shown, each in [*told, *((_names(o), o) for o in own)]:
            first = seen.setdefault((shown, _default(each), _help(each)), name)
            if first == name:
                rows.append((shown, each))
            else:
                again.setdefault(first, []).append(shown)
        parts.append(_list(rows))
        for first, names in again.items():
            parts.append(f"As in `penstock {first}`: {', '.join(names)}.\n")
        if shared:
            but = [flag for flag in engine if flag not in shared]
            all_but = f"all but {_quoted(but)}" if but else "all"
            parts.append(f"Engine options: {all_but}.\n")
    return "\n".join(part for part in parts if part)


def _engine_flags(root: Any, helps: dict[str, str]) -> list[str]:
    """The flags of all knobs that some command has, in the order of Config."""
    found = {
        flag: list(helps).index(option.name)
        for _, command in _commands(root)
        for option in command.params
        if option.name in helps and option.help == helps[option.name]
        for flag in option.opts
        if flag.startswith("--")
    }
    return sorted(found, key=lambda flag: found[flag])


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every command with its words, groups before their commands."""
    for word, command in group.commands.items():
        yield before + word, command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{word} ")


def _list(rows: list[tuple[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [f"- {shown}{_default(each)}: {_help(each)}" for shown, each in rows]
    return "\n".join(lines) + "\n"


def _help(parameter: Any) -> str:
    told = _one_line(parameter.help or "")
    names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    said = ", else ".join(f"`{name}`" for name in names)
    return f"{told} Or {said} in the environment." if names else told


def _metavar(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(parameter: Any) -> str:
    if parameter.required:
        return " (required)"
    return "" if parameter.default in (None, "", False) else f" (`{parameter.default}`)"


def config_page() -> str:
    """Returns docs/config.md: a table a group of knobs."""
    parts = [f"# Engine options\n\n{NOTE}"]
    parts.append(
        "One name everywhere: `LLM(max_num_seqs=64)`, `Config.of(max_num_seqs=64)`, `penstock serve"
        " --max-num-seqs 64`."
    )
    parts.append(
        "Where the default is empty the engine decides. A wrong name, type or range is refused"
        " before anything loads.\n"
    )
    for group in Config().groups():
        hints = get_type_hints(type(group))
        parts.append(f"## {_one_line(type(group).__doc__ or '').rstrip('.')}\n")
        for knob in fields(group):
            default = "" if knob.default is None else f" (`{str(knob.default).lower()}`)"
            parts.append(
                f"- `{knob.name}`: {_kind(hints[knob.name], knob.metadata)}{default}."
                f" {knob.metadata['help']}"
            )
        parts.append("")
    return "\n".join(parts)


def _kind(hint: Any, metadata: Any) -> str:
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{choice}`" for choice in choices)
    kind = next((k for k in choices if k is not type(None)), hint)
    word = {str: "text", int: "whole", bool: "switch", float: "number"}[kind]
    low, high = metadata["low"], metadata["high"]
    if low is None:
        return word
    if high is None or high >= 2**63 - 1:
        return f"{word}, {low} or more"
    return f"{word}, {low} to {high}"


FROM_VLLM = """\
Write `from penstock import LLM, SamplingParams` for `from vllm import ...`, and `penstock serve
MODEL` for `vllm serve MODEL`. Names, defaults and the shapes of outputs are vLLM's.

- An argument that only vLLM has is taken at the values in these tables: what is done here anyway,
  or what changes no answer. Everything else is refused before anything loads, with the sentence
  beside it. `None` counts as left out.
- "else a line says so": another value is taken too, and changes nothing.
- On the command line names may have underscores, `-tp` and the like are read, and `--model` is
  MODEL.
- `LLM` has `generate`, `chat`, `get_tokenizer`, `sleep`, `wake_up`, `update_weights`,
  `reset_prefix_cache`, and `stream` for long jobs ([llm.md](llm.md)). Its `score` is of next
  tokens, not of how alike two texts are. It has no `beam_search`, `embed`, `encode`, `classify`,
  `reward` or `collective_rpc`.
- Fields over HTTP: [http.md](http.md).

To compare the two on your machine: [guide](GUIDE.md#compare-with-your-vllm). If you know vLLM's
sources: [where each file's work is done here](#source-files).
"""


ASYNC = """\
vLLM's | here
--- | ---
`from_engine_args` | the same, with penstock's AsyncEngineArgs; or `AsyncLLM(model, ...)`
`generate` | the same; starts the engine if nothing has; request_id may be left out
`SamplingParams.output_kind` | CUMULATIVE, DELTA, FINAL_ONLY; RequestOutputKind is penstock's
`abort` | the same, one id or several; the last output has finish_reason abort
`check_health` | the same; raises EngineError
`errored`, `dead_error`, `is_running`, `is_stopped` | not there: check_health
`shutdown` | awaited; `async with` does it
`reset_prefix_cache`, `sleep`, `wake_up`, `is_sleeping` | the same
`collective_rpc`, `update_weights` | update_weights(model_path, shared=..., weights_version=..., mode=...)
`pause_generation`, `resume_generation` | not there: `mode` of update_weights and sleep
`get_tokenizer`, `encode` | not there: LLM has the first, over HTTP /tokenize
`add_lora`, `remove_lora`, `list_loras`, `pin_lora` | not there: lora=DIR merges one at load
`start_profile`, `stop_profile`, `do_log_stats`, `is_tracing_enabled` | not there: /metrics
`CompletionOutput.weights_version` | ours alone, of LLM and AsyncLLM
"""


def vllm_page() -> str:
    """Returns docs/coming_from_vllm.md: the treatment of each vLLM argument."""
    spellings = "; ".join(
        f"`{theirs}` is `{here}`" for known in SPELLINGS.values() for theirs, here in known.items()
    )
    own = [field.name for field in fields(SamplingParams) if field.name != "stop_when"]
    return "\n".join(
        [
            f"# Coming from vLLM\n\n{NOTE}\n{FROM_VLLM}",
            "## `LLM(...)`, and every command with engine options\n",
            (
                f"The same here: {_quoted(SHARED)} ({spellings}). [config.md](config.md) has ours"
                " beside them.\n"
            ),
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
            (
                "Outputs are built as `LLM`'s are: lazy logprobs with `.columns`,"
                " `cumulative_logprob`, `weights_version`.\n"
            ),
            ASYNC,
            "## Source files\n",
            "vLLM's paths are of 0.26, below `vllm/`; ours are below `src/penstock/`.\n",
            _files_of_vllm(),
        ]
    )


def _files_of_vllm() -> str:
    """Returns the table of `vllm_files.txt`, with our paths quoted: tests look for quoted ones."""
    lines = VLLM_FILES.read_text().splitlines()
    rows = [line.partition(" | ") for line in lines if not line.startswith("#")]
    told = [f"{theirs} | {_with_paths(ours)}" for theirs, _, ours in rows]
    return "\n".join(["vLLM's | here", "--- | ---", *told]) + "\n"


def _with_paths(text: str) -> str:
    """Returns the text with every path in backticks."""
    return re.sub(r"[\w/]+(?:/|\.py)(?![\w.])", lambda path: f"`{path[0]}`", text)


QUANTIZATION = """\
A quantized checkpoint is read by its `quantization_config`. A wide one is quantized while it loads:
`--quantization fp8`, `LLM(quantization="fp8")`, or ahead of time by [`penstock build`](build.md),
which also measures what it costs. `penstock doctor MODEL` says what the weights take.

you have | take
--- | ---
a GPU with kernels for fp8 (H100, H200), many requests | `fp8`, with `--kv-cache-dtype fp8`
a GPU, few requests at a time | `int4` by `penstock build`, or an NVFP4 checkpoint
a CPU with VNNI | `int8`, or `int4`; fp8 and four-bit floats are slow there
"""
MADE_ROWS = {
    "fp8": (
        "e4m3, a float32 scale an output, llm-compressor's numbers byte for byte; the head stays"
        " wide unless a build has `--quantize-lm-head`"
    ),
    "int8": "symmetric, a scale an output, to the nearest; the head too",
    "int4": (
        "symmetric, groups of 128 inputs (64 or 32 where 128 does not divide; 32 below 768), to the"
        " nearest; [in a build](build.md) by the work's own inputs; the head int8"
    ),
    "nvfp4": (
        "e2m1, an e4m3 scale for 16 inputs and a float32 for the whole, compressed-tensors' numbers"
        " byte for byte; in a build q, k, v and gate, up share the last, as vLLM wants it; the head"
        " stays wide"
    ),
}
QUANTIZATION_NOTES = """\
- **Experts** have every form above; gpt-oss's stay as the checkpoint has them (`mxfp4`, or wide).
  Routers stay wide; `lm_head` is as wide as in the checkpoint.
- **Scales of activations** in a checkpoint (`input_scale`, `input_global_scale`,
  `activation_scale`) are not used: a row gets its own. `kv_cache_scheme` and scales of K and V are
  read with `kv_cache_dtype`.
- Matrices that are multiplied together (q, k, v; gate, up) must be stored alike. Over several ranks
  a matrix is cut anywhere by outputs, between groups or blocks by inputs.
- A key that is unknown and may change numbers is refused by name.
- **Four-bit floats** (NVFP4, MXFP4) are for weights only: wide activations lose less, and the start
  says so. 32 must divide a row; tied heads have none. `hf_quant_config.json` is read where
  config.json is silent. A global scale that is 0, negative or no number is refused. On a GPU one
  row is twice as fast as in bfloat16, 16 by 1.4, 64 about as fast, 128 slower: for batches take fp8 or int4.
- **On a CPU** with VNNI one request is 1.4 to 1.8 times as fast as in bfloat16 by int8, 1.7 to 1.9
  times by int4; 512 rows together take 1.5 and 2.5 times as long. float8 and four-bit floats are
  slower than bfloat16 there, and the start says so.

Which kernel runs when: [eight_bits.md](design/eight_bits.md),
[four_bit_floats.md](design/four_bit_floats.md).
"""


def quantization_page() -> str:
    """Returns the page on number formats: read, made and refused."""
    read = [f"`{method}` | {what}" for method, what in READ.items()]
    made = [f"`{name}` | {MADE_ROWS[name]}" for name in MADE]
    refused = [f"`{name}` | {why}" for name, why in REFUSED.items()]
    return "\n".join(
        [
            f"# Quantized models\n\n{NOTE}\n{QUANTIZATION}",
            "## Read\n\n`quant_method` | what of it\n--- | ---",
            *read,
            (
                "\n`--quantization` may name the method, or what its numbers are (`fp8`, `int8`,"
                " `int4`, `nvfp4`, `mxfp4`); no other.\n"
            ),
            "## Made at load\n\n`--quantization` | numbers\n--- | ---",
            *made,
            f"\n{QUANTIZATION_NOTES}",
            "## Refused\n",
            (
                "Other methods (AQLM, HQQ, QuIP, EXL2 ...), act-order (`desc_act`, `actorder: group`),"
                " float8 e5m2, transforms,\nother sizes of groups and blocks, and by name:\n"
            ),
            "method | take instead\n--- | ---",
            *refused,
            "",
        ]
    )


MODEL_WORDS = """\
Every row was compared with transformers on a CPU (logits within 1e-4, 64 of 64 greedy tokens),
"GPU" on a GPU too. "experts": in bfloat16,
float8, int8, int4, NVFP4 or MXFP4. "text": of a multimodal checkpoint the text is served, and the
rest left out. "latent": latent attention.
"""
_SHORTER = {
    "experts wide, in float8, int8, int4, NVFP4 or MXFP4": "experts",
    "its text; the vision part is left out": "text",
    "latent attention": "latent",
    ", sound too": "",
    ", its text saved alone": ", text alone",
}


def _short(notes: str) -> str:
    for long, short in _SHORTER.items():
        notes = notes.replace(long, short)
    return notes


def models_page() -> str:
    """Returns docs/models.md with its table of models regenerated."""
    before, made, rest = (
        (DOCS / "models.md").read_text().partition("as `penstock models` prints it. -->\n")
    )
    _, end, after = rest.partition("<!-- end -->")
    rows = []
    for name, each in CATALOG.items():
        told = [_short(each.notes), "GPU" if "GPU" in each.on else ""]
        rows.append("; ".join([f"- `{name}`: {_short(each.models)}", *filter(None, told)]))
    head = [MODEL_WORDS]
    return before + made + "\n".join(["", *head, *rows, "", ""]) + end + after


def _fates(table: dict[str, Argument]) -> str:
    """Returns table rows that group arguments with the same reason."""
    notes: dict[str, dict[str, list[str]]] = {}
    for name, argument in table.items():
        notes.setdefault(argument.note, {}).setdefault(_taken(argument), []).append(name)
    rows = [
        f"{'; '.join(f'{_quoted(names)}: {taken}' for taken, names in kinds.items())} | {note}"
        for note, kinds in notes.items()
    ]
    return "\n".join(["argument: taken | why", "--- | ---", *rows]) + "\n"


def _taken(argument: Argument) -> str:
    if argument.told:
        return f"{spelt(argument)} (else a line says so)"
    return spelt(argument) if argument.taken else "no"


def _quoted(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _first(text: str) -> str:
    """A help's first paragraph; `--help` has the others."""
    return _one_line(text.strip().partition("\n\n")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
