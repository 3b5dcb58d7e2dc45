"""Tiny random transformers models as the oracle, on CPU in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on CPU torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""The part of multimodal models that no test runs."""


def config_of(architecture: str, **config: Any) -> Any:
    """transformers' configuration of ``architecture``; of a multimodal one ``config`` is of its text."""
    if architecture.endswith("ForConditionalGeneration"):
        kind = architecture.removesuffix("ForConditionalGeneration")
        tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
        return getattr(transformers, f"{kind}Config")(
            text_config=config, vision_config=VISION, **tied
        )
    kind = architecture.removesuffix("ForCausalLM")
    name = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}.get(kind, kind)
    return getattr(transformers, f"{name}Config")(**config)


def tiny(architecture: str, seed: int = 0, **config: Any) -> tuple[Any, dict[str, Any]]:
    """(random model, its config.json): weights large enough that tokens vary."""
    hf_config = config_of(architecture, **{**SIZES, **config})
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"
    model = getattr(transformers, architecture)(hf_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(n, x) for n, x in model.named_buffers() if n.endswith("correction_bias")]
        for name, p in [*model.named_parameters(), *biases]:
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if "norm" in name else _deviation(name) * noise)
    return model, {**hf_config.to_dict(), "architectures": [architecture]}


def _deviation(name: str) -> float:
    """Of a parameter that is no norm: of biases and sink logits more than of matrices, which add up."""
    return 0.4 if name.endswith(("bias", "sinks")) else 0.2


def weights(model: Any) -> Any:
    """Name -> numpy tensor of the model, of a multimodal one as in its text model."""
    state = {
        k.replace("language_model.", "", 1): v.detach().numpy()
        for k, v in model.state_dict().items()
    }
    return state.__getitem__


@torch.no_grad()
def greedy(model: Any, prompt: list[int], n: int) -> tuple[np.ndarray, list[int]]:
    """(logits of the prompt, n greedy tokens), with the model's own cache."""
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        # Without an image transformers 5.24 reads a field that its output lacks; the text model in it is what it runs.
        model = model.language_model
    out = model(torch.tensor([prompt]), use_cache=True)
    first, tokens = out.logits[0].numpy(), []
    while True:
        tokens.append(int(out.logits[0, -1].argmax()))
        if len(tokens) == n:
            return first, tokens
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values)
