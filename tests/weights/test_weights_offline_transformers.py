"""What ``jserve quantize`` writes, loaded by transformers: its matrices and logits are the engine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jserve.model.quant import QTensor, widened
from jserve.weights.offline.job import quantize
from jserve.weights.offline.wish import Wish
from tests.model import hf
from tests.weights.test_weights_offline import TEXTS
from tests.weights.test_weights_quant import loaded
from tests.weights.test_weights_quant_logits import BASE, TOKENS, served
from tests.weights.weights_kit import BF16, Model

pytest.importorskip("compressed_tensors", reason="transformers reads such files by it")
WISHES = {
    "int4": Wish(scheme="int4", config='{"group_size": 32, "ignore": ["re:.*o_proj", "lm_head"]}'),
    "int4, head too": Wish(scheme="int4", config='{"ignore": []}', method="gptq"),
    "int8-weight-only": Wish(scheme="int8-weight-only"),
    "int8": Wish(scheme="int8"),
    "fp8": Wish(scheme="fp8"),
}


class Quantised:
    """A tiny model and what the command makes of it, as the helpers of ``test_weights_quant`` take one."""

    def __init__(self, path: Path, wish: Wish, **config: Any) -> None:
        model = Model(path / "model", BASE | {"torch_dtype": "bfloat16", **config}, BF16)
        model.tensors = {n: x / (5 if x.ndim > 1 else 1) for n, x in model.tensors.items()}
        model.write_json("config.json", model.config)
        model.single()
        self.path = path / "out"
        quantize(str(model.path), self.path, wish, TEXTS)
        self.config = json.loads((self.path / "config.json").read_text())
        self.family, self.arch = model.family, model.arch
        self.wide = {n: np.asarray(x, np.float32) for n, x in model.tensors.items()}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WISHES)
def test_transformers_loads_it(tmp_path: Path, name: str) -> None:
    out = Quantised(tmp_path, WISHES[name])
    oracle = hf.transformers.AutoModelForCausalLM.from_pretrained(
        out.path, dtype=hf.torch.float32, attn_implementation="eager"
    )
    with hf.torch.no_grad():
        want = oracle(hf.torch.tensor([TOKENS])).logits[0].numpy()
    down = loaded(out)["layers"][1]["down"]
    its = oracle.model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(widened(down)), its)
    wide = out.wide["model.layers.1.mlp.down_proj.weight"]
    assert np.abs(its - wide).mean() < 0.3 * np.abs(wide).mean()  # of others it is over 1
    head, whole = loaded(out)["unembed"], name == "int4, head too"
    assert isinstance(head, QTensor) == whole
    its = oracle.lm_head.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(widened(head) if whole else head), its)
    off = np.abs(served(out) - want).mean() / np.abs(want).mean()
    # Its scale of a token of int8 is 254 / 255 of ours: the numbers of most activations are others.
    assert off < {"int8": 0.08, "fp8": 0.005}.get(name, 1e-5)


def test_transformers_loads_a_tied_head(tmp_path: Path) -> None:
    """It is the embedding, which no matrix of the file replaces."""
    wish = Wish(scheme="int8-weight-only", config='{"ignore": []}')
    out = Quantised(tmp_path, wish, tie_word_embeddings=True)
    oracle = hf.transformers.AutoModelForCausalLM.from_pretrained(
        out.path, dtype=hf.torch.float32, attn_implementation="eager"
    )
    with hf.torch.no_grad():
        want = oracle(hf.torch.tensor([TOKENS])).logits[0].numpy()
    off = np.abs(served(out) - want).mean() / np.abs(want).mean()
    assert off < 1e-5
