"""The table of docs/models.md that says what else runs by architecture: each cell against the code that decides it.

That what is in a cell also computes the right thing is shown by ``test_family_shards.py`` (experts over devices),
``tests/kv/test_real_groups.py``, ``tests/pallas_kernels/test_backend.py``, ``tests/weights/test_weights_gguf.py`` and
``tests/weights/test_weights_offline.py``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jserve.errors import ConfigError
from jserve.gguf import config as gguf
from jserve.kv_layout import grouped
from jserve.model import attn_hopper
from jserve.model.arch import Arch, resized
from jserve.model.attention import check_layers
from jserve.model.families import ARCHITECTURES, family_for
from jserve.model.layer_pass import check_dense
from jserve.model.moe_specs import check_has_experts
from jserve.model.shard import ShardRules
from tests.model.more_cases import MORE
from tests.model.test_parity import CASES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SIZES = {"ep": 2, "tp": 1}
EP = ShardRules.of_mesh(SIZES)
COLUMNS = ("experts over devices", "pages in groups", "`hopper`", "GGUF", "`jserve quantize`")


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, bool]]:
    """Architecture -> column -> the cell says yes."""
    lines = iter(PAGE.read_text().splitlines())
    head = next(line for line in lines if all(column in line for column in COLUMNS))
    names = [cell.strip() for cell in head.strip("|").split("|")]
    next(lines)
    found = {}
    for line in lines:
        row = re.match(r"\| `(\w+)` \|", line)
        if row is None:
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert set(cells[1:]) <= {"yes", ""}
        found[row[1]] = dict(zip(names[1:], (cell == "yes" for cell in cells[1:]), strict=True))
    return found


def archs(architecture: str) -> Iterator[Arch]:
    """Of the tiny models that are compared with transformers, their switches away from the defaults."""
    from tests.model import hf

    for name, config in (CASES | MORE).values():
        if name == architecture:
            _, stated = hf.tiny(name, **config)
            yield family_for(stated).arch(stated)


def is_served(check: Callable[[], object]) -> bool:
    try:
        check()
    except ConfigError:
        return False
    return True


def test_it_has_every_architecture(table: dict[str, dict[str, bool]]) -> None:
    assert set(table) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_each_cell(architecture: str, table: dict[str, dict[str, bool]]) -> None:
    found, row = list(archs(architecture)), table[architecture]
    spread = [is_served(lambda a=a: check_has_experts(a, EP, SIZES)) for a in found]
    dense = [is_served(lambda a=a: check_dense(a, "it")) for a in found]
    assert row["experts over devices"] == any(spread)
    assert row["pages in groups"] == any(grouped(a.kv_layers) is not None for a in found)
    assert row["GGUF"] == (architecture in GGUF)
    assert row["`jserve quantize`"] == all(dense)


GGUF = {
    "LlamaForCausalLM",
    *(f"{name}ForCausalLM" for name in ("Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")),
}


def test_gguf_reads_no_other_architecture() -> None:
    assert len(gguf.FAMILIES) == len(GGUF)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_hopper(
    architecture: str, table: dict[str, dict[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it serves is the same under any jax. Sizes of heads aside, which tiny models have of their own."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    hopper = attn_hopper.hopper("gpu")

    def check(arch: Arch) -> None:
        latent = arch.layers[0].attn.latent
        wide = None if latent is None else dataclasses.replace(latent, rank=512, turned=64)
        check_layers(hopper, resized(arch, H=128, latent=wide), jnp.bfloat16, (), 64)

    served = all(is_served(lambda a=a: check(a)) for a in archs(architecture))
    assert table[architecture]["`hopper`"] == served
