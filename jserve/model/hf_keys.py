"""Sees to it that each key of a Hugging Face config.json is read, without effect, or refused.

It owns the keys that have no effect on what a model computes, and the values that mean nothing. Which keys are read
is what ``ConfigReader`` saw a family read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.model.hf_text import text_part
from jserve.model.hf_values import Config, ConfigReader, refuse

_BOOKKEEPING = (
    *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map"),
    *("name_or_path", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
    *("return_dict", "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16"),
    *("tie_encoder_decoder", "tf_legacy_loss", "use_cache", "cache_implementation"),
    *("chunk_size_feed_forward", "transformers.js_config", "unsloth_version", "unsloth_fixed"),
    *("attn_implementation", "is_decoder", "model_name", "max_sequence_length", "model_max_length"),
    *("tie_last_hidden_states", "use_parallel_embedding"),
)
_TRAINING = (
    *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
    *("attn_pdrop", "classifier_dropout", "router_aux_loss_coef", "output_router_logits"),
    *("router_jitter_noise", "router_z_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size"),
    *("pretraining_tp", "gradient_checkpointing", "neftune_noise_alpha", "num_mtp_layers"),
    "num_nextn_predict_layers",
)
_TOKENS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("mask_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class"),
)
_GENERATION = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping"),
    *("do_sample", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k"),
    *("top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "prefix"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "output_scores"),
    *("num_return_sequences", "return_dict_in_generate", "forced_bos_token_id", "suppress_tokens"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("begin_suppress_tokens", "task_specific_params"),
)
NO_EFFECT = frozenset(_BOOKKEEPING + _TRAINING + _TOKENS + _GENERATION)
"""Keys of files of all families that no result depends on, as do those that begin with an underscore. What requests
default to is read from generation_config.json."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "is_causal": (True,),
    "use_rope": (True,),
    "use_gated_activation": (True,),
    "routed_scaling_factor": (1, 1.0),
    "n_group": (1,),
    "topk_group": (1,),
    "moe_layer_freq": (1,),
    "scoring_func": ("softmax",),
    "decoder_sparse_step": (1,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "kv_lora_rank": (),
    "clip_qkv": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "attention_chunk_size": (),
    "vision_config": (),
    "text_config": (),
}
"""The values, besides null, of keys that a family has not read and whose 0 or false may mean something, or whose
neutral value is another. Of keys that are not here, null, false, 0 and what is empty say nothing."""


def every_key(arch: Callable[[Config], Arch]) -> Callable[[Config], Arch]:
    """``arch``, which reads config.json (of a multimodal model its text part), with every key that it leaves accounted
    for.

    Raises:
        ConfigError: of what it returns: as ``refuse_unread``.
    """

    @wraps(arch)
    def checked(config: Config) -> Arch:
        reader = ConfigReader(text_part(config))
        found = arch(reader)
        refuse_unread(reader)
        return found

    return checked


def refuse_unread(config: ConfigReader) -> None:
    """Refuse what nothing has read and might change a result.

    Raises:
        ConfigError: ``field`` is the first such key.
    """
    refuse_other_values(config)
    if unknown := [key for key in unread(config) if key not in NEUTRAL and config.peek(key)]:
        _refuse_unknown(config, unknown)


def refuse_other_values(config: ConfigReader) -> None:
    """Refuse a value that is not neutral of a key of ``NEUTRAL`` that nothing has read.

    Raises:
        ConfigError: ``field`` is the key.
    """
    for key in unread(config):
        value = config.peek(key)
        if key in NEUTRAL and value is not None and value not in NEUTRAL[key]:
            refuse(key, f"{_shown(value)} is not supported in this family")


def unread(config: ConfigReader) -> list[str]:
    """The keys that nothing has read, without those of no effect."""
    return [k for k in config if k not in config.read and not is_without_effect(k)]


def is_without_effect(key: str) -> bool:
    """True for a key that no result depends on, whatever the family."""
    return key in NO_EFFECT or key.startswith("_")


def _refuse_unknown(config: ConfigReader, keys: list[str]) -> NoReturn:
    shown = ", ".join(f"{key} {_shown(config.peek(key))}" for key in keys)
    raise ConfigError(
        f"config.json: {shown}: not known in this family, so it may change what the model computes;"
        " remove it from config.json if it does not",
        field=keys[0],
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} ..."
