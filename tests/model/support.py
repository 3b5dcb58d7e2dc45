"""What runs with each architecture: for a feature, what the engine itself decides of the tiny models of
``test_parity``, and a test that runs it with these families. ``docs/generate.py`` writes it to docs/models.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.kv_layout import grouped
from jserve.model import attn_hopper
from jserve.model.arch import Arch, resized
from jserve.model.attention import check_layers
from jserve.model.families import ARCHITECTURES, family_for
from jserve.model.moe_specs import check_has_experts
from jserve.model.shard import ShardRules, padded
from jserve.shapes import SHAPES
from jserve.weights.offline.job import check_one_by_one
from tests.model import test_family_shards as shards
from tests.model.more_cases import MORE
from tests.model.test_parity import CASES
from tests.pallas_kernels.shapes import MODELS as COMPILED
from tests.weights import test_weights_gguf, test_weights_quant_families as quantised
from tests.weights.test_weights_quant_moe import DEEPSEEK, GPT_OSS, QWEN
from tests.whole import (
    test_device_drafts as drafts,
    test_family_experts as experts,
    test_family_groups as groups,
)

YES, ACCEPTED, NO = "yes", "accepted", ""
ALL = CASES | MORE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A feature."""

    title: str
    tests: tuple[str, ...]
    """They run it,"""
    tested: Iterable[str]
    """with these architectures."""
    served: Callable[[str, Arch], bool] = lambda name, arch: True
    """What the engine decides; of an architecture one model is enough."""

    def cell(self, architecture: str) -> str:
        if not any(self.served(architecture, arch) for arch in archs(architecture)):
            return NO
        own = ARCHITECTURES[architecture]
        return YES if own in {ARCHITECTURES[name] for name in self.tested} else ACCEPTED


@cache
def archs(architecture: str) -> tuple[Arch, ...]:
    """Of the tiny models, their switches away from the defaults."""
    from tests.model import hf

    found = []
    for name, config in ALL.values():
        if name == architecture:
            sizes = hf.SIZES | {k: v for k, v in config.items() if k != "seed"}
            stated = hf.config_of(name, **sizes).to_dict() | {"architectures": [name]}
            found.append(family_for(stated).arch(stated))
    return tuple(found)


def accepted(check: Callable[..., object], *args: object) -> bool:
    try:
        check(*args)
    except ConfigError:
        return False
    return True


def over_devices(name: str, arch: Arch) -> bool:
    sizes = {"tp": 2}
    specs = family_for({"architectures": [name]}).specs(arch, 2)
    return accepted(padded, specs, ShardRules.of_mesh(sizes), sizes)


def spread(name: str, arch: Arch) -> bool:
    sizes = {"ep": 2, "tp": 1}
    return accepted(check_has_experts, arch, ShardRules.of_mesh(sizes), sizes)


def is_written(name: str, arch: Arch) -> bool:
    specs = family_for({"architectures": [name]}).specs(arch, 1)
    return accepted(check_one_by_one, specs["layers"])


def on_hopper(name: str, arch: Arch) -> bool:
    """Sizes of heads aside, which tiny models have of their own; it serves the same under any jax."""
    latent = arch.layers[0].attn.latent
    wide = None if latent is None else dataclasses.replace(latent, rank=512, turned=64)
    with mock.patch.object(jax, "__version_info__", (0, 11, 2)):
        backend = attn_hopper.hopper("gpu")
        own = resized(arch, H=128, latent=wide)
        return accepted(check_layers, backend, own, jnp.bfloat16, (), 64)


GGUF = {
    config.get("architectures", ["LlamaForCausalLM"])[0]
    for _, config in test_weights_gguf.FAMILIES.values()
}
"""The architectures of every kind of file that is read."""


def names_of(cases: Iterable[str]) -> list[str]:
    return [ALL[case][0] for case in cases]


COLUMNS = (
    Column(
        title="chunks, prefix cache, preemption",
        tests=("tests/whole/test_family_equalities.py::test_any_way_of_running_equals_alone",),
        tested=names_of(CASES),
    ),
    Column(
        title="several devices",
        tests=("tests/model/test_family_shards.py::test_devices_agree",),
        tested=names_of(shards.CASES),
        served=over_devices,
    ),
    Column(
        title="experts over devices",
        tests=("tests/whole/test_family_experts.py::test_every_mesh_draws_what_one_device_draws",),
        tested=names_of(case for case, _ in experts.RUNS),
        served=spread,
    ),
    Column(
        title="pages in groups",
        tests=(
            "tests/whole/test_family_groups.py::test_groups_change_no_token_however_requests_are_run",
        ),
        tested=names_of(groups.FAMILIES),
        served=lambda name, arch: grouped(arch.kv_layers) is not None,
    ),
    Column(
        title="drafters on the device",
        tests=(
            "tests/whole/test_device_drafts.py::test_drafts_change_no_token_of_any_family",
            "tests/whole/test_device_drafts.py"
            "::test_a_draft_model_changes_no_token_of_other_families",
        ),
        tested=names_of((*drafts.FAMILIES, *drafts.OTHERS)),
    ),
    Column(
        title="gradients",
        tests=("tests/test_functional.py::test_logprobs_and_gradients_are_those_of_transformers",),
        tested=names_of(CASES),
    ),
    Column(
        title="quantised checkpoints",
        tests=(
            "tests/weights/test_weights_quant_families.py::test_logits_are_those_of_transformers",
            "tests/weights/test_weights_quant_families.py"
            "::test_logits_of_other_families_are_those_of_transformers",
            "tests/weights/test_weights_quant_moe.py::test_logits_are_those_of_the_widened_experts",
        ),
        tested=[
            *names_of(quantised.OTHERS),
            *(config["architectures"][0] for config in quantised.FAMILIES.values()),
            *(config["architectures"][0] for config in (QWEN, DEEPSEEK, GPT_OSS)),
        ],
    ),
    Column(
        title="GGUF",
        tests=("tests/weights/test_weights_gguf.py::test_the_model_of_a_header",),
        tested=GGUF,
        served=lambda name, arch: name in GGUF,
    ),
    Column(
        title="`jserve quantize`",
        tests=(
            "tests/weights/test_weights_quant_families.py::test_what_quantize_writes_is_read",
            "tests/weights/test_weights_offline.py::test_experts_and_latents_are_rounded_as_on_load",
        ),
        tested=[
            *names_of(quantised.DENSE),
            *(config["architectures"][0] for config in (QWEN, DEEPSEEK)),
        ],
        served=is_written,
    ),
    Column(
        title="`hopper`",
        tests=(
            "tests/pallas_kernels/test_compile.py::test_two_layers_of_every_model_on_every_mesh",
            "tests/pallas_kernels/test_compile_grouped.py::test_steps_of_a_model_with_experts",
            "tests/pallas_kernels/test_compile_mla.py::test_decode_step",
        ),
        tested=[SHAPES[name]["architectures"][0] for name in COMPILED],
        served=on_hopper,
    ),
)


def table() -> str:
    """In Markdown: architectures by features, and under it the test of each feature."""
    head = " | ".join(column.title for column in COLUMNS)
    lines = [f"| architecture | {head} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in sorted(ARCHITECTURES):
        lines.append(f"| `{name}` | {' | '.join(c.cell(name) for c in COLUMNS)} |")
    tests = [f"* {c.title}: {', '.join(f'`{test}`' for test in c.tests)}" for c in COLUMNS]
    return "\n".join([*lines, "", *tests]) + "\n"
