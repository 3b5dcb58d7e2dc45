"""Cohere 2 (Command R7B): LayerNorm without bias, attention and MLP side by side on one normed input, a window and a
rope on three layers of four, and neither on the fourth."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.model.decoder import TensorNames, plain
from jserve.model.hf_config import (
    SLIDING,
    attention_bias,
    decoder_arch,
    layer_types,
    sliding_window,
    windows,
)
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, boolean, integer, number, only, refuse


def arch(config: Config) -> Arch:
    """config.json -> Arch. ``attention_bias`` puts a bias on all four attention projections."""
    _older_keys(config)
    pattern = integer(config, "sliding_window_pattern", 4)
    types = layer_types(config, lambda i: (i + 1) % pattern > 0)
    H = integer(config, "hidden_size") // integer(config, "num_attention_heads")
    if integer(config, "head_dim", H) != H:
        refuse("head_dim", f"must be hidden_size / num_attention_heads, {H}")
    turns = rope(config, pairs=True)
    return decoder_arch(
        config,
        "cohere2",
        eps="layer_norm_eps",
        default_eps=1e-5,
        default_tied=True,
        centered=True,
        parallel=True,
        windows=windows(types, sliding_window(config)),
        ropes=[turns if kind == SLIDING else None for kind in types],
        logit_scale=number(config, "logit_scale", 0.0625),
        **attention_bias(config),
    )


def _older_keys(config: Config) -> None:
    """Those of the first published files, which say what transformers computes anyway."""
    only(config, "order_of_interleaved_layers", "local_attn_first")
    only(config, "position_embedding_type", "rope_gptj")
    only(config, "use_parallel_block", True)
    only(config, "use_embedding_sharing", boolean(config, "tie_word_embeddings", True))


FAMILY = plain("cohere2", "Cohere2ForCausalLM", arch, TensorNames(mlp_norm=""))
