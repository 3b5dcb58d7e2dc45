"""Trained parameters to a Hugging Face folder that transformers and jserve load unchanged.

Owns the names and layouts of the files. Weights are stored as bf16 in torch's [out, in] layout.
"""

import json
from pathlib import Path

import jax.numpy as jnp
from safetensors.flax import save_file
from tokenizers import Tokenizer

from checkpoints.recipe.chat import CHAT_TEMPLATE, END_OF_TEXT, TURN_END
from checkpoints.recipe.model import ModelConfig

_LAYER = {
    "input_layernorm.weight": ("attention_norm", "weight"),
    "self_attn.q_proj.weight": ("attention", "q", "kernel"),
    "self_attn.k_proj.weight": ("attention", "k", "kernel"),
    "self_attn.v_proj.weight": ("attention", "v", "kernel"),
    "self_attn.o_proj.weight": ("attention", "o", "kernel"),
    "self_attn.q_norm.weight": ("attention", "q_norm", "weight"),
    "self_attn.k_norm.weight": ("attention", "k_norm", "weight"),
    "post_attention_layernorm.weight": ("mlp_norm", "weight"),
    "mlp.gate_proj.weight": ("mlp", "gate", "kernel"),
    "mlp.up_proj.weight": ("mlp", "up", "kernel"),
    "mlp.down_proj.weight": ("mlp", "down", "kernel"),
}


def hf_config(config: ModelConfig, dtype: str = "bfloat16") -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": dtype,
    }


def read_config(folder: Path) -> ModelConfig:
    """The configuration behind an exported folder: `hf_config` backwards."""
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ModelConfig(
        hidden=stored["hidden_size"],
        layers=stored["num_hidden_layers"],
        heads=stored["num_attention_heads"],
        kv_heads=stored["num_key_value_heads"],
        head_dim=stored["head_dim"],
        ffn=stored["intermediate_size"],
        vocab=stored["vocab_size"],
        context=stored["max_position_embeddings"],
        rope_theta=stored["rope_theta"],
        eps=stored["rms_norm_eps"],
    )


def hf_tensors(params: dict, config: ModelConfig, dtype=jnp.bfloat16) -> dict:
    tensors = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"]["weight"],
    }
    for i in range(config.layers):
        for name, path in _LAYER.items():
            leaf = params[f"layer_{i}"]
            for key in path:
                leaf = leaf[key]
            tensors[f"model.layers.{i}.{name}"] = leaf.T if leaf.ndim == 2 else leaf
    return {name: jnp.asarray(tensor, dtype) for name, tensor in tensors.items()}


def _tokenizer_config(config: ModelConfig) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(
    params: dict, config: ModelConfig, tokenizer: Tokenizer, out: Path, dtype=jnp.bfloat16
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = hf_tensors(params, config, dtype)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    _write(out / "config.json", hf_config(config, jnp.dtype(dtype).name))
    _write(out / "tokenizer_config.json", _tokenizer_config(config))
    special = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    _write(out / "special_tokens_map.json", special)
    generation = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}
    _write(out / "generation_config.json", generation)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))


def import_params(folder: Path, config: ModelConfig) -> dict:
    """The exported weights as f32 parameters again: what is judged is what is shipped."""
    from safetensors.flax import load_file

    tensors = load_file(str(folder / "model.safetensors"))
    tensors = {name: tensor.astype(jnp.float32) for name, tensor in tensors.items()}
    params: dict = {
        "embedding": tensors["model.embed_tokens.weight"],
        "final_norm": {"weight": tensors["model.norm.weight"]},
    }
    for i in range(config.layers):
        layer: dict = params.setdefault(f"layer_{i}", {})
        for name, path in _LAYER.items():
            tensor, node = tensors[f"model.layers.{i}.{name}"], layer
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = tensor.T if tensor.ndim == 2 else tensor
    return params
