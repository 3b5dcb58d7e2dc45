"""Serves a module of one's own, and compares what the engine draws with what the module's own loop draws.

python examples/own_check.py own_linen    # or own_module, own_equinox: as python examples/own_linen.py
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jserve
from jserve import SamplingParams
from jserve.build import shipped

PROMPTS = ["One, two, three,", "The sky is"]
MAX_TOKENS = 24
Following = Callable[[jax.Array], jax.Array]
"""int32[T]: the likeliest token after each of a text."""


def check(architecture: str, params: Any, following: Following, context: int) -> None:
    """Of a family that is registered: a directory with its name is all that ``LLM`` needs beside the parameters."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps({"architectures": [architecture]}))
        options = {"tokenizer": str(shipped()), "dtype": "float32", "max_num_seqs": 4}
        with jserve.LLM(directory, params=params, **options) as llm:
            asked = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
            outs = llm.generate(PROMPTS, asked, use_tqdm=False)
    for out in outs:
        tokens = list(out.outputs[0].token_ids)
        assert tokens == greedy(following, out.prompt_token_ids, context)
        print(len(tokens), "tokens are those of the module's own loop:", tokens[:8], "...")


def greedy(following: Following, ids: list[int], context: int) -> list[int]:
    """The module's own loop: all anew for each token, in a text that is filled up."""
    for _ in range(MAX_TOKENS):
        rest = [0] * (context - len(ids))
        ids = [*ids, int(following(jnp.array([*ids, *rest]))[len(ids) - 1])]
    return ids[-MAX_TOKENS:]


def main(name: str = "own_module") -> None:
    importlib.import_module(name).main()


if __name__ == "__main__":
    main(*sys.argv[1:])
