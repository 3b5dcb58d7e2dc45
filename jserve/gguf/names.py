"""Names of GGUF tensors and the ones that Hugging Face checkpoints have for them."""

from __future__ import annotations

import re

WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of families with norms before and after attention and MLP."""
AROUND = ("gemma2", "gemma3")
"""Values of general.architecture."""
LAYERED = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


def hf_name(name: str, architecture: str) -> str | None:
    """The name that tensor ``name`` has in a Hugging Face checkpoint; None: it has none."""
    stem, _, ending = name.rpartition(".")
    if stem in WHOLE and ending in ("weight", "bias"):
        return f"{WHOLE[stem]}.{ending}"
    found = LAYERED.fullmatch(name)
    names = LAYER | NORMS_AROUND if architecture in AROUND else LAYER
    if found is None or found[2] not in names:
        return None
    return f"model.layers.{found[1]}.{names[found[2]]}.{found[3]}"
