"""SmolLM3: Llama without a rope on every fourth layer."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import plain
from jserve.model.hf_config import attention_bias, decoder_arch, layer_types, windows
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, boolean, integer, refuse


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections. A window holds
    where there is no rope, if ``use_sliding_window``."""
    turns = _turns(config)
    window = integer(config, "sliding_window", 0, low=0)
    if not boolean(config, "use_sliding_window", False):
        window = 0
    types = layer_types(config, lambda i: window > 0 and not turns[i])
    found = rope(config, default_theta=2e6)
    return decoder_arch(
        config,
        "smollm3",
        default_kv_heads=4,
        default_tied=True,
        windows=windows(types, window),
        ropes=[found if turn else None for turn in turns],
        **attention_bias(config),
        mlp_bias=boolean(config, "mlp_bias", False),
    )


def _turns(config: Config) -> list[bool]:
    """For each layer whether it has a rope."""
    L, key = integer(config, "num_hidden_layers"), "no_rope_layers"
    interval, given = integer(config, "no_rope_layer_interval", 4), config.get(key)
    if given is None:
        return [(i + 1) % interval != 0 for i in range(L)]
    if (
        not isinstance(given, list | tuple)
        or len(given) != L
        or any(x not in (0, 1) for x in given)
    ):
        refuse(key, f"must list 0 or 1 for each of {L} layers")
    return [bool(x) for x in given]


FAMILY = plain("smollm3", "SmolLM3ForCausalLM", arch)
