"""Writes the demo model, or a folder with its tokenizer, as GGUF, with the converter that
llama.cpp's sources bring.

    python scripts/demo_to_gguf.py LLAMA_CPP OUT.gguf [FOLDER]

in a Python that has torch, transformers and sentencepiece.

The converter knows tokenizers by a hash and doesn't know the demo's; it is told to take it for
GPT-2's. The bench sends ids, which no tokenizer touches; texts would be cut otherwise than by ours
where digits stand together.
"""

from __future__ import annotations

import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "src" / "penstock" / "demo" / "model"


def main() -> None:
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    folder = sys.argv[3] if len(sys.argv) > 3 else str(DEMO)
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", str(out), "--outtype", "bf16"]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
