"""Every key of config.json is read, without effect, or refused by name, with transformers' own configurations for the
list of keys.
"""

from __future__ import annotations

from functools import cache
from inspect import unwrap
from typing import Any

import pytest

from jserve.errors import ConfigError
from jserve.model.families import ARCHITECTURES, family_for
from jserve.model.hf_keys import NEUTRAL, every_key, is_without_effect
from jserve.model.hf_text import ENDING
from jserve.model.hf_values import ConfigReader
from tests.model.published import PUBLISHED

PLAIN = sorted(name for name in ARCHITECTURES if not name.endswith(ENDING))
CHANGED = "changed"
"""No value that any key may have."""


@cache
def stated(architecture: str) -> dict[str, Any]:
    """The config.json that transformers writes, every key at its default that has one."""
    from tests.model import hf

    config = hf.config_of(architecture).to_dict()
    needed = {"num_experts_per_tok": 2} if config.get("n_routed_experts") else {}
    return {**config, **needed, "architectures": [architecture]}


@cache
def read(architecture: str) -> frozenset[str]:
    """The keys that the family reads of transformers' file and of a published one."""
    found: set[str] = set()
    for config in (stated(architecture), PUBLISHED[architecture]):
        reader = ConfigReader(config)
        unwrap(family_for(config).arch)(reader)  # without the check of the keys that are left
        found |= reader.read
    return frozenset(found)


@pytest.mark.parametrize("architecture", PLAIN)
def test_no_key_of_transformers_is_unknown(architecture: str) -> None:
    config = stated(architecture)
    family_for(config).arch(config)
    reads = read(architecture)
    unknown = [k for k in config if k not in reads and not is_without_effect(k)]
    assert set(unknown) <= set(NEUTRAL) | NEVER_ON


NEVER_ON = {"is_encoder_decoder", "use_bidirectional_attention", "mlp_bias", "add_cross_attention"}
"""Keys that files have, and that are refused where they say other than false."""


@pytest.mark.parametrize("architecture", PLAIN)
def test_what_other_families_read_is_refused_where_this_one_does_not(architecture: str) -> None:
    config = {**PUBLISHED[architecture]}
    others = frozenset[str]().union(*(read(name) for name in PLAIN))
    foreign = sorted(others - read(architecture) - set(config))
    assert [k for k in foreign if is_without_effect(k)] == []
    for key in foreign:
        with pytest.raises(ConfigError) as error:
            family_for(config).arch({**config, key: CHANGED})
        assert (error.value.field, key in error.value.message) == (key, True)


def test_what_is_without_effect_is_read_by_no_family() -> None:
    reads = frozenset[str]().union(*(read(name) for name in PLAIN))
    assert {key for key in reads if is_without_effect(key)} <= {"architectures"}


def test_a_family_that_stops_reading_a_key_refuses_it() -> None:
    config = PUBLISHED["GraniteForCausalLM"]
    arch = unwrap(family_for(config).arch)

    def forgetful(config: Any) -> Any:
        found = arch(config)
        config.read.discard("embedding_multiplier")
        return found

    assert every_key(arch)(config) == family_for(config).arch(config)
    with pytest.raises(ConfigError) as error:
        every_key(forgetful)(config)
    assert error.value.field == "embedding_multiplier"
