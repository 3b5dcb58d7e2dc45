"""What layers keep of a token: bytes against written-out sums, and against the arrays of a pool."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.kv_layout import KVLayer, KVLayout, Reach, Span, chosen_groups, grouped, widest
from jserve.model.arch import resized
from jserve.model.attention import backend
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.mesh import make_mesh
from jserve.model.step import StepModel
from jserve.model.view import StepDims
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.drafter import split_over
from tests.runner.harness import ARCH, RULES

FULL = KVLayer.attention(8, 128)
WINDOWED = replace(FULL, window=1024)
LATENT = KVLayer.latent(576)
"""As multi-head latent attention keeps it: one vector for all heads, whole on every device."""
BF16 = np.dtype("uint16")


def layout(*layers: KVLayer, tp: int = 1) -> KVLayout:
    return KVLayout(layers=layers, page_size=32, dtype=BF16, tp=tp)


@pytest.mark.parametrize(
    ("layers", "tp", "page", "host"),
    [
        ([FULL] * 32, 1, 4 << 20, 4 << 20),
        ([FULL] * 32, 8, 4 << 17, 4 << 20),
        ([FULL] * 32, 16, 4 << 17, 8 << 20),  # a head on two devices each
        ([FULL, LATENT], 4, 32 * 2 * (512 + 576), 32 * 2 * (2048 + 576)),
        ([], 2, 0, 0),
    ],
)
def test_bytes_of_a_page(layers: list[KVLayer], tp: int, page: int, host: int) -> None:
    found = layout(*layers, tp=tp)
    assert (found.page_bytes, found.host_page_bytes) == (page, host)


def test_pages_may_go_only_where_every_layer_has_a_window() -> None:
    assert widest([WINDOWED, replace(FULL, window=16)]) == layout(WINDOWED).window == 1024
    assert layout(WINDOWED, FULL).window == widest([]) == 0


def test_a_step_reads_of_each_layer_what_it_sees() -> None:
    one = layout(FULL, WINDOWED, WINDOWED, tp=2)
    assert one.seen(4096) == 4096 + 2 * 1024
    assert one.seen(100) == 300
    token = 2 * 2 * 8 * 128 // 2  # bytes of one layer on one of two devices
    assert one.step_bytes(3, 5, 4096) == token * (3 * (4096 + 2 * 1024) + 3 * 5)


@pytest.mark.parametrize("name", ["ref", "xla"])
@pytest.mark.parametrize(("tp", "wished"), [(1, 0), (2, 1), (2, 2), (8, 8)])
def test_the_pool_is_what_the_layout_says(name: str, tp: int, wished: int) -> None:
    """Of a windowed target and a drafter with KV of its own, on every device, and in host memory."""
    attention, mesh = backend(name), make_mesh(tp)
    model = StepModel(
        family=LLAMA,
        arch=resized(ARCH, windows=(16, 0)),
        backend=attention,
        dims=StepDims(C=4, M=8, Z=8, V=ARCH.V),
        mesh=mesh,
        rules=RULES,
        n_pages=9,
        kv_dtype=attention.kv_dtype(jnp.bfloat16),
        dtype=jnp.bfloat16,
        drafter=split_over(draft_model(LLAMA, ARCH, ARCH), tp, wished),
    )
    leaves = jax.tree.leaves(model.abstract_state().kv)
    assert len(leaves) == 4 * ARCH.L
    parts = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    of_device = sum(np.prod(part) for part in parts) * 2
    assert model.kv.page_bytes * 9 == of_device
    assert model.kv.host_page_bytes * 9 == sum(leaf.size for leaf in leaves) * 2
    assert [layer.window for layer in model.kv.layers] == [16, 0, 0, 0]


def _mix(*counts: tuple[KVLayer, int]) -> tuple[KVLayer, ...]:
    return tuple(layer for layer, n in counts for _ in range(n))


CHUNKED = replace(WINDOWED, chunked=True)


@pytest.mark.parametrize(
    ("layers", "arrays", "reaches", "padding"),
    [
        (_mix((WINDOWED, 52), (FULL, 10)), 10, [1, 6], 8),  # Gemma 3 27B
        (_mix((WINDOWED, 22), (FULL, 4)), 4, [1, 6], 2),  # Gemma 3 1B
        (_mix((WINDOWED, 12), (FULL, 12)), 12, [1, 1], 0),  # GPT-OSS 20B
        (_mix((CHUNKED, 36), (FULL, 12)), 12, [1, 3], 0),  # Llama 4
        (_mix((WINDOWED, 7), (FULL, 21)), 7, [3, 1], 0),  # Qwen2 with windows on upper layers
        (_mix((WINDOWED, 9), (FULL, 8)), 9, [1, 1], 1),  # nearly equal counts: the larger one
        (_mix((WINDOWED, 31), (FULL, 1)), 3, [1, 11], 4),  # not 32 groups of one
    ],
)
def test_layers_fall_into_groups_of_one_reach(layers, arrays, reaches, padding) -> None:
    found = grouped(layers)
    assert found is not None
    assert (found.n_arrays, found.n_padding) == (arrays, padding)
    assert [reach.n_groups for reach in found.reaches] == reaches
    assert found.n_groups <= 16
    assert len(set(found.places)) == len(layers), "two layers share an array of a group"
    first = 0
    for reach in found.reaches:
        own = range(first, first + reach.n_groups)
        seen = {layer.span for layer, (g, _) in zip(layers, found.places, strict=True) if g in own}
        assert seen == {reach.span}
        first = own.stop
    assert max(j for _, j in found.places) == arrays - 1


def test_the_widest_reach_comes_first() -> None:
    found = grouped((replace(FULL, window=8), WINDOWED, FULL))
    assert found is not None
    assert found.reaches == (Reach(Span(), 1), Reach(Span(1024), 1), Reach(Span(8), 1))


@pytest.mark.parametrize("layers", [[FULL] * 4, [WINDOWED] * 4, [FULL, LATENT], []])
def test_layers_that_are_alike_or_keep_other_things_have_no_groups(layers) -> None:
    assert grouped(tuple(layers)) is None
    with pytest.raises(ConfigError, match="equally far"):
        chosen_groups(tuple(layers), "on", ())


def test_a_page_of_a_group_holds_as_many_layers_as_it_has() -> None:
    layers = _mix((WINDOWED, 22), (FULL, 4))
    kv = replace(layout(*layers), groups=grouped(layers))
    assert kv.page_bytes == kv.host_page_bytes == layout(*[FULL] * 4).page_bytes
    assert kv.seen(4096) == layout(*layers).seen(4096)
    assert len(kv.pool_layers) == 4
