"""config.json of multimodal models: their text part, and what of it is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.hf_text import is_multimodal, sees_images, text_part
from tests.model.published import GEMMA_3_1B, GEMMA_3_4B, SCOUT, SCOUT_WHOLE

TEXT = GEMMA_3_4B["text_config"]


def arch(config: dict[str, Any]) -> Any:
    return family_for(config).arch(config)


def test_the_text_model_is_that_of_its_own_config() -> None:
    assert arch(SCOUT_WHOLE) == arch({**SCOUT, "architectures": ["Llama4ForCausalLM"]})
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    }
    alone = {**TEXT, **sizes, "architectures": ["Gemma3ForCausalLM"]}
    found = arch(GEMMA_3_4B)
    assert found == arch(alone)
    assert (found.N, found.K, found.H, found.L, found.max_position) == (8, 4, 256, 34, 131072)
    assert [x.attn.window for x in found.layers[4:7]] == [1024, 0, 1024]


def test_sizes_that_are_there_are_read() -> None:
    config = {**GEMMA_3_4B, "text_config": {**TEXT, "num_attention_heads": 16}}
    assert arch(config).N == 16


def test_what_stands_beside_the_text_holds() -> None:
    config = {**GEMMA_3_4B, "text_config": {**TEXT, "eos_token_id": 1, "torch_dtype": "float32"}}
    found = text_part(config)
    assert (found["eos_token_id"], found["torch_dtype"]) == ([1, 106], "bfloat16")
    assert found["hidden_size"] == 2560
    assert not {"text_config", "vision_config", "image_token_index"} & set(found)
    assert text_part(found) is found
    assert is_multimodal(found)
    assert text_part(GEMMA_3_1B) is GEMMA_3_1B
    untied = {**config, "tie_word_embeddings": False}
    assert (arch(config).tied, arch(untied).tied) == (True, False)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text_config": 3}, "text_config"),
        ({"text_config": {**TEXT, "hidden_size": None}}, "hidden_size"),
        ({"text_config": {**TEXT, "final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        ({"text_config": {**TEXT, "use_qk_norm": True}}, "use_qk_norm"),
        ({"audio_config": {"hidden_size": 8}}, "audio_config"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "num_hidden_layers"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "architectures"),
    ],
)
def test_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        arch({**GEMMA_3_4B, **change})
    assert (error.value.field, field in error.value.message) == (field, True)


@pytest.mark.parametrize(
    ("name", "sees"),
    [
        ("vision_tower.vision_model.embeddings.patch_embedding.weight", True),
        ("model.vision_tower.vision_model.post_layernorm.bias", True),
        ("vision_model.patch_embedding.linear.weight", True),
        ("multi_modal_projector.mm_input_projection_weight", True),
        ("language_model.model.embed_tokens.weight", False),
        ("model.layers.0.mlp.gate_proj.weight", False),
    ],
)
def test_tensors_of_images(name: str, sees: bool) -> None:
    assert sees_images(name) is sees
