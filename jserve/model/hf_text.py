"""The text part of a multimodal checkpoint: its config.json as a text model's, and the tensors that it leaves out.

Images are refused by requests (``jserve.text.chat.messages``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.model.hf_values import Config, refuse

ENDING = "ForConditionalGeneration"
"""Of the architectures that have a text model in them."""

OTHER_PARTS = ("vision_tower.", "vision_model.", "multi_modal_projector.")
"""First words of the tensors that see images, behind ``model.`` or not."""

_OF_IMAGES = {
    *("vision_config", "text_config", "mm_tokens_per_image", "projector_hidden_act"),
    *(f"{name}_token_{key}" for name in ("boi", "eoi", "image") for key in ("id", "index")),
}


def is_multimodal(config: Config) -> bool:
    """True where ``architectures`` names a model with more than text in it."""
    names = config.get("architectures")
    return isinstance(names, list | tuple) and any(str(name).endswith(ENDING) for name in names)


def text_part(config: Config) -> Config:
    """The config.json of the text model in a multimodal one: what ``text_config`` says, unless it stands beside it.
    Any other config.json, and what this returned, is itself.

    Raises:
        ConfigError: ``text_config`` is no object.
    """
    text = config.get("text_config")
    if not is_multimodal(config) or text is None:
        return config
    if not isinstance(text, Mapping):
        refuse("text_config", f"must be an object, not {text!r}")
    beside = {k: v for k, v in config.items() if k not in _OF_IMAGES and v is not None}
    return {**text, **beside}


def sees_images(tensor: str) -> bool:
    """True for a tensor of a part that a text model leaves out."""
    return tensor.removeprefix("model.").startswith(OTHER_PARTS)


def served_as_text(config: Mapping[str, Any]) -> str:
    """The line of the log about a multimodal model."""
    names = ", ".join(map(str, config["architectures"]))
    return f"{names} is served as text: its vision tensors are not loaded, images are refused"
