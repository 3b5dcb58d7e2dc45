"""Multi-token-prediction weights of a family that ships them: a made-up family fills the seam."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model import decoder
from jserve.model.arch import Arch
from jserve.model.attention import LayerKV
from jserve.model.dot import dot
from jserve.model.families import _FAMILIES, register_family
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.layers import rms_norm
from jserve.model.shard import Axes, make_mesh
from jserve.model.view import Bucket, StepView
from jserve.speculation.drafters.drafter import Drafter, Seen, Target
from jserve.speculation.drafters.load import LoadedDrafter, load_speculation
from jserve.speculation.host.methods import check, shape
from jserve.weights.source import resolve
from tests.runner.harness import ARCH, CONFIG, RULES, Rig, jobs, make_runner, shared

NAME = "GuessesTwiceForCausalLM"
DEPTHS = 2


def mtp(config: Mapping[str, Any], arch: Arch) -> Drafter:
    """As DeepSeek-V3 has it, less the decoder layer: h' = proj [norm(h); norm(embed(next token))]."""
    if not config.get("num_nextn_predict_layers"):
        raise ConfigError(
            "config.json: num_nextn_predict_layers is 0", field="num_nextn_predict_layers"
        )

    def specs(tp: int) -> Any:
        return {
            "h_norm": decoder.norm("model.mtp.hnorm", arch.D),
            "e_norm": decoder.norm("model.mtp.enorm", arch.D),
            "proj": decoder.matrix("model.mtp.eh_proj", (arch.D, 2 * arch.D), (None, None)),
        }

    def pass_(of: Target, params: Any, h_TD: jax.Array, tok_T: jax.Array) -> jax.Array:
        normed = [
            rms_norm(h_TD, params["h_norm"], arch.norm_eps),
            rms_norm(of.embed(tok_T), params["e_norm"], arch.norm_eps),
        ]
        return dot(jnp.concatenate(normed, axis=1), params["proj"])

    def observe(
        of: Target, params: Any, seen: Seen, kv: list[LayerKV], axes: Axes
    ) -> tuple[jax.Array, list[LayerKV]]:
        return pass_(of, params, seen.x_TD, seen.next_T)[seen.last_R], kv

    def advance(
        of: Target, params: Any, carry_ED: Any, view: StepView, kv: list[LayerKV], axes: Axes
    ) -> tuple[jax.Array, list[LayerKV]]:
        return pass_(of, params, carry_ED, view.tok_T), kv

    def logits(of: Target, params: Any, h_ED: jax.Array, depth: Any, axes: Axes) -> jax.Array:
        return of.logits(h_ED)

    return Drafter(
        name="mtp", arch=replace(arch, L=0), n_max=DEPTHS, reads_next=True,
        specs=specs, observe=observe, advance=advance, logits=logits,
    )  # fmt: skip


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setattr("jserve.model.families._FAMILIES", dict(_FAMILIES))
    register_family(replace(LLAMA, name="guesses-twice", architectures=(NAME,), mtp=mtp))


def directory(root: Path, **changes: Any) -> Path:
    """A checkpoint with these weights beside others, which nobody asks for here."""
    config = CONFIG | {"architectures": [NAME], "num_nextn_predict_layers": 1} | changes
    (root / "config.json").write_text(json.dumps(config))
    rng, D = np.random.default_rng(4), ARCH.D
    save_file(
        {
            "model.mtp.hnorm.weight": np.ones(D, np.float32),
            "model.mtp.enorm.weight": np.ones(D, np.float32),
            "model.mtp.eh_proj.weight": rng.standard_normal((D, 2 * D)).astype(np.float32),
            "model.norm.weight": np.ones(D, np.float32),
        },
        root / "model.safetensors",
    )
    return root


def loaded(root: Path, mesh: Any, **options: Any) -> LoadedDrafter:
    asked = EngineConfig.of(speculative={"method": "mtp", **options}).speculative
    check(asked)
    return load_speculation(
        "mtp", resolve(str(root)), ARCH, mesh, RULES, np.dtype(np.float32),
        shape=lambda deepest: shape(asked, deepest),
    )  # fmt: skip


def test_the_checkpoint_drafts_for_itself(family, tmp_path):
    """Chains and trees; the drafts of a few tokens to choose from stand at times, the text is the same."""
    root = directory(tmp_path)
    asked = jobs(4, seed=3, temperature=0.0, allowed_token_ids=(5, 9, 70, 71))
    want = Rig(shared()).run(asked)
    for options, parents in (({"num_tokens": 2}, ()), ({"tree": [2, 1]}, (0, 0, 1, 2))):
        n = len(parents) or 2
        program = Bucket(D=6, P=48, F=4, J=1 + n, n_draft=n, tree=parents)
        runner = make_runner(
            (program,), speculation=lambda mesh, options=options: loaded(root, mesh, **options)
        )
        rig = Rig(runner, device="some", chunk=-1, seed=2)
        assert rig.run(asked) == want
        assert 0 < sum(n_ok > 1 for n_ok in rig.accepted) < len(rig.accepted)


def test_its_weights_are_those_of_the_file(family, tmp_path):
    made = loaded(directory(tmp_path), make_mesh(1), num_tokens=1)
    rng = np.random.default_rng(4)
    want = rng.standard_normal((ARCH.D, 2 * ARCH.D)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(made.params["proj"]), want)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "family llama has no multi-token-prediction"),
        ({"num_nextn_predict_layers": 0}, {}, "num_nextn_predict_layers is 0"),
        ({}, {"num_tokens": 3}, "mtp drafts at most 2 tokens ahead, not 3"),
        ({}, {"model": "dir"}, "speculative.model means nothing to method 'mtp'"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(family, tmp_path, config, options, words):
    root = directory(tmp_path, **config)
    with pytest.raises(ConfigError, match=words):
        loaded(root, make_mesh(1), **{"num_tokens": 2} | options)
