"""Converts the demo model, or a folder with its tokenizer, to GGUF, with llama.cpp's converter.

    python scripts/demo_to_gguf.py LLAMA_CPP OUT.gguf [FOLDER]

Needs a Python with torch, transformers and sentencepiece.

The converter recognises tokenizers by a hash and does not know the demo's, so it is made to treat
it as GPT-2's. The bench sends ids, which no tokenizer touches; texts with neighbouring digits would
be tokenised differently.
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
