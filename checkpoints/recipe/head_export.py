"""Trained heads to the published checkpoint formats, and back for judging what was written.

Owns the names and layouts: EAGLE-3 as SafeAILab/EAGLE and SpecForge write it, Medusa as
FasterDecoding/Medusa does. Weights are bf16 in torch's [out, in] layout.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file, save_file

from checkpoints.recipe.eagle import EagleConfig
from checkpoints.recipe.heads import HeadConfig
from checkpoints.recipe.medusa import MedusaConfig

_EAGLE = {
    "fc.weight": ("fc", "kernel"),
    "midlayer.input_layernorm.weight": ("input_norm", "weight"),
    "midlayer.hidden_norm.weight": ("hidden_norm", "weight"),
    "midlayer.self_attn.q_proj.weight": ("q", "kernel"),
    "midlayer.self_attn.k_proj.weight": ("k", "kernel"),
    "midlayer.self_attn.v_proj.weight": ("v", "kernel"),
    "midlayer.self_attn.o_proj.weight": ("o", "kernel"),
    "midlayer.post_attention_layernorm.weight": ("mlp_norm", "weight"),
    "midlayer.mlp.gate_proj.weight": ("mlp", "gate", "kernel"),
    "midlayer.mlp.up_proj.weight": ("mlp", "up", "kernel"),
    "midlayer.mlp.down_proj.weight": ("mlp", "down", "kernel"),
    "norm.weight": ("norm", "weight"),
    "lm_head.weight": ("lm_head", "kernel"),
}


def _names(config: HeadConfig) -> dict[str, tuple[str, ...]]:
    """{tensor name: path of the parameter}."""
    if isinstance(config, EagleConfig):
        return _EAGLE
    return {
        f"{i}.0.linear.{name}": (f"head_{i}", leaf)
        for i in range(config.steps)
        for name, leaf in (("weight", "kernel"), ("bias", "bias"))
    }


def weights_file(config: HeadConfig) -> str:
    return "model.safetensors" if isinstance(config, EagleConfig) else "medusa_lm_head.safetensors"


def hf_config(config: HeadConfig, target: str) -> dict:
    return (
        _eagle_config(config) if isinstance(config, EagleConfig) else _medusa_config(config, target)
    )


def _eagle_config(config: EagleConfig) -> dict:
    t = config.target
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "use_aux_hidden_state": True,
        },
        "vocab_size": t.vocab,
        "draft_vocab_size": config.vocab,
        "hidden_size": t.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": t.heads,
        "num_key_value_heads": t.kv_heads,
        "head_dim": t.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": t.context,
        "rope_theta": t.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": t.eps,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def _medusa_config(config: MedusaConfig, target: str) -> dict:
    return {
        "medusa_num_heads": config.steps,
        "medusa_num_layers": 1,
        "base_model_name_or_path": target,
        "version": "2",
        "hidden_size": config.target.hidden,
        "vocab_size": config.target.vocab,
        "torch_dtype": "bfloat16",
    }


def export_head(params: Any, config: HeadConfig, draft_ids, target: str, out: Path) -> None:
    """Write config.json and the weights of heads into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: _at(params, path) for name, path in _names(config).items()}
    # A transposed numpy view would be written in the order of its memory; jax copies it into place.
    tensors = {n: jnp.asarray(x.T, jnp.bfloat16) for n, x in tensors.items()}
    if isinstance(config, EagleConfig):
        tensors |= _vocabulary(config, np.asarray(draft_ids))
    path = out / weights_file(config)
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)
    text = json.dumps(hf_config(config, target), indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def _vocabulary(config: EagleConfig, draft_ids: np.ndarray) -> dict:
    """`d2t`: what to add to a draft id to get the token. `t2d`: whether a token has a draft id."""
    known = np.zeros(config.target.vocab, bool)
    known[draft_ids] = True
    return {"d2t": (draft_ids - np.arange(config.vocab)).astype(np.int64), "t2d": known}


def import_head(folder: Path, config: HeadConfig) -> tuple[Any, np.ndarray]:
    """(parameters in f32, draft ids) as written: what is judged is what is shipped."""
    tensors = load_file(str(folder / weights_file(config)))
    params: dict = {}
    for name, path in _names(config).items():
        node, tensor = params, tensors[name].astype(jnp.float32)
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = tensor.T if tensor.ndim == 2 else tensor
    ids = np.arange(config.vocab, dtype=np.int32)
    return params, ids + np.asarray(tensors["d2t"], np.int32) if "d2t" in tensors else ids


def _at(params: Any, path: tuple[str, ...]):
    for key in path:
        params = params[key]
    return params
