"""What ``jserve quantize`` writes of a model with outlier channels: its logits are about the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jserve.weights.offline.job import quantize
from jserve.weights.offline.wish import Wish
from tests.weights.test_weights_offline import TEXTS
from tests.weights.test_weights_quant_logits import BASE, served
from tests.weights.weights_kit import BF16, Model

INT4 = '{"group_size": 32}'
WISHES = {
    "awq, int4": (Wish(scheme="int4", method="awq", config=INT4), 0.6),
    "awq, int8": (Wish(scheme="int8-weight-only", method="awq"), 0.1),
    "smooth, int4": (Wish(scheme="int4", smooth=0.5, config=INT4), 0.75),
    "smooth, int8": (Wish(scheme="int8-weight-only", smooth=0.5), 0.08),
    "rotate, int4": (Wish(scheme="int4", rotate=True, config=INT4), 0.75),
    "rotate, int8": (Wish(scheme="int8-weight-only", rotate=True), 0.08),
}
"""And the bound of the mean error as a part of the mean logit. Without any of them it is 0.81 and 0.088; where one side
of a fold or rotation is left out, at least 0.65 and 0.44 with AWQ, 1.2 with others."""
OUTLIER = 16


class Outliers(Model):
    """A model with inputs of all matrices that are 16 times as large as others, and weights as much smaller."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, BASE | {"torch_dtype": "bfloat16"}, BF16)
        wide = {n: np.asarray(x, np.float32) for n, x in self.tensors.items()}
        wide = {n: x / (5 if x.ndim > 1 else 1) for n, x in wide.items()}
        wide = {n: x * (4 if "embed" in n else 1) for n, x in wide.items()}  # a calm stream
        for i in range(2):
            layer = f"model.layers.{i}"
            attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            at = [5, 40]
            for norm, readers in {
                f"{layer}.input_layernorm": [f"{attn}.{x}_proj" for x in "qkv"],
                f"{layer}.post_attention_layernorm": [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            }.items():
                wide[f"{norm}.weight"] = 1 + np.abs(wide[f"{norm}.weight"]) / 4
                wide[f"{norm}.weight"][at] *= OUTLIER
                for reader in readers:
                    wide[f"{reader}.weight"][:, at] /= OUTLIER
            wide[f"{mlp}.up_proj.weight"][at] *= OUTLIER
            wide[f"{mlp}.down_proj.weight"][:, at] /= OUTLIER
            # A value of kv head 0 is read by the first half of the heads.
            wide[f"{attn}.v_proj.weight"][5] *= OUTLIER
            N, K, H = self.arch.layers[i].attn.N, self.arch.layers[i].attn.K, 16
            wide[f"{attn}.o_proj.weight"][:, 5 : N // K * H : H] /= OUTLIER
        self.tensors = {n: x.astype(BF16) for n, x in wide.items()}
        self.wide = {n: x.astype(np.float32) for n, x in self.tensors.items()}
        self.single()


class Written:
    """The same in the form of ``path``."""

    def __init__(self, path: Path, of: Model) -> None:
        self.path, self.family, self.arch = path, of.family, of.arch
        self.config = json.loads((path / "config.json").read_text())
        self.wide = {n: np.asarray(x, np.float32) for n, x in of.tensors.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Outliers:
    return Outliers(tmp_path_factory.mktemp("model") / "model")


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WISHES)
def test_its_logits_are_about_those_of_the_model(
    tmp_path: Path, model: Outliers, name: str
) -> None:
    wish, bound = WISHES[name]
    quantize(str(model.path), tmp_path / "out", wish, TEXTS)
    want, got = served(model), served(Written(tmp_path / "out", model))
    off = np.abs(got - want).mean() / np.abs(want).mean()
    assert 0 < off < bound
