"""The device's side of ``jserve.build``: a runner with its weights, drafter, attention backend and programs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jserve.config import EngineConfig
from jserve.model.arch import Arch, Moe
from jserve.model.attention import KERNELS, unserved
from jserve.model.dot import forms_for_hopper
from jserve.model.families import family_for
from jserve.model.hf_text import is_multimodal, served_as_text
from jserve.model.mesh import n_parts
from jserve.model.moe_specs import check_has_experts
from jserve.model.native import HOPPER, chosen
from jserve.model.quant import bytes_by_form, form_name, n_bytes
from jserve.model.rope import for_requests
from jserve.runner import selftest
from jserve.runner.layout import partitionable, placement
from jserve.runner.program_files import ProgramFiles, Unusable
from jserve.runner.programs import use_compile_cache
from jserve.runner.runner import ModelRunner
from jserve.runner.sizes import chosen_attention, kv_name
from jserve.runner.weights import layout_of
from jserve.speculation.drafters.load import copying, load_speculation
from jserve.speculation.host.methods import DEVICE, check, shape
from jserve.weights.hf import dtype_name
from jserve.weights.loader import adopted, load
from jserve.weights.place import tp_size
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import Source, resolve

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
"""(stage, done, total)."""


def runner_of(
    config: EngineConfig, source: Source, progress: Progress, params: Any, mesh: Any
) -> tuple[ModelRunner, dict[str, Any]]:
    """A runner of the model of ``source``, every program compiled, and what an engine says of it at start.

    Args:
        params: the weights, in place of those of ``source``; None: those.
        mesh: None: the first devices, as the options say.

    Raises:
        ConfigError, WeightsError: as their parts.
    """
    dtype = _dtype(config, source)
    scheme = _scheme(config, source, dtype)
    family = quantised(family_for(source.config), scheme)
    arch = for_requests(family.arch(source.config), config.model.max_model_len)
    if is_multimodal(source.config):
        log.info(served_as_text(source.config))
    mesh, rules = placement(config, mesh)
    check_has_experts(arch, rules, mesh.shape)
    config = partitionable(config, rules, mesh.devices.flat[0].platform)
    check(config.speculative, tp_size(mesh, rules))
    if config.device.compile_cache:
        use_compile_cache(Path(config.device.compile_cache))
    began, given = time.monotonic(), params is not None
    trained = layout_of(params)
    if not given:
        params = load(
            family,
            arch,
            source,
            mesh,
            rules,
            dtype,
            progress=lambda _, done, total: progress("load weights", done, total),
            scan_nan=config.model.scan_nan,
            seed=config.model.seed,
            scheme=scheme,
        )
    else:
        params = adopted(family, arch, params, mesh, rules, dtype)
    if scheme is not None and not scheme.widened:
        _say_forms(scheme.name, params, dtype.name)
    speculation = drafter_of(config, (arch, mesh, rules, dtype), progress)
    device = mesh.devices.flat[0]
    parts = n_parts(rules.split("ffn_expert", mesh.shape), mesh.shape)
    config = with_attention(config, arch, dtype, device, speculation, parts)
    config = with_products(config, params, dtype, device)
    on = "" if rules.auto else config.device.attention_backend
    if device.platform != "cpu" and (reason := loop_over_experts(on, arch, dtype, scheme, parts)):
        log.warning("experts: larger steps run a loop over them and no kernel: %s", reason)
    loaded = time.monotonic()
    with program_files(config, device.platform) as files:
        runner = ModelRunner(
            family,
            arch,
            params,
            mesh,
            config,
            rules=rules,
            speculation=speculation,
            penalises=source.penalises,
            progress=progress,
            files=files,
            trained=trained,
        )
    facts = {
        "source": source.name,
        "weights": "" if given else source.stamp,
        "family": family.name,
        "quantization": scheme.name if scheme is not None and not scheme.widened else "",
        "form": form_name(params),
        "form_bytes": bytes_by_form(params, dtype),
        "load_s": round(loaded - began, 2),
        "compile_s": round(time.monotonic() - loaded, 2),
    }
    return runner, facts


@contextmanager
def program_files(config: EngineConfig, platform: str) -> Iterator[Any]:
    """The directory of programs in serialised form, beside the compile cache; None: there is none. None where plugins
    may have changed code that no key covers, and only for a CPU, which alone was seen to run them again."""
    files, directory = None, config.device.compile_cache
    if directory and not config.model.plugins and platform == "cpu":
        try:
            files = ProgramFiles(Path(directory))
        except Unusable as error:
            log.warning("serialised programs: %s", error)
    try:
        yield files
    finally:
        if files is not None:
            files.close()


def with_attention(
    config: EngineConfig, arch: Arch, dtype: Any, device: Any, speculation: Any, parts: int = 1
) -> EngineConfig:
    """``config`` with the attention backend that ``auto`` means on ``device``. Kernels that the user has not
    asked for by name are tried first, and left out where they fail. ``parts``: devices that share an expert."""
    if config.device.attention_backend != "auto" or device.platform == "cpu":
        return config
    page_size = config.cache.on(device.platform).page_size
    capability = getattr(device, "compute_capability", "")
    name, reason = chosen_attention(arch, config, dtype, device.platform, capability, speculation)
    reason = unserved(capability) or reason
    experts = _experts(arch, parts)
    if name == "dense_experts" and experts is None:
        name = "dense"
    heads = (arch.H, arch.N // arch.K, page_size, kv_name(config, dtype))
    while name in KERNELS:
        fault = selftest.fault(selftest.command(name, *heads, experts, _latent(arch)))
        if not fault:
            break
        # Where attention fails the experts' kernel may still be right.
        name = "dense_experts" if name == "hopper" and experts is not None else "dense"
        reason = "; ".join(filter(None, (reason, fault)))
    if name != "hopper":
        log.warning("attention is dense on %s; not hopper: %s", device.device_kind, reason)
    options = dataclasses.replace(config.device, attention_backend=name)
    return dataclasses.replace(config, device=options)


def with_products(config: EngineConfig, params: Any, dtype: Any, device: Any) -> EngineConfig:
    """``config`` with XLA's products where ``auto`` means the kernel for quantised weights on ``device`` and that fails
    when it is tried."""
    forms = forms_for_hopper(params)
    asked, capability = config.device.kernels, getattr(device, "compute_capability", "")
    level, _ = chosen(asked, device.platform, dtype, capability, quantised=bool(forms))
    if asked != "auto" or level != HOPPER:
        return config
    fault = selftest.fault(selftest.command_of_products(forms))
    if not fault:
        return config
    log.warning("few rows by quantised weights: XLA's products, not quant_matmul: %s", fault)
    return dataclasses.replace(config, device=dataclasses.replace(config.device, kernels="xla"))


def _experts(arch: Arch, parts: int) -> tuple[int, int] | None:
    """The width of the model and a device's share of that of an expert; None: the kernels take none of them."""
    widths = [layer.ffn.F for layer in arch.layers if isinstance(layer.ffn, Moe)]
    if not widths:
        return None
    from pallas_kernels.grouped_matmul import serves  # kernels need a newer jax than CPUs do

    F = widths[0] // parts
    return (arch.D, F) if serves(arch.D, F) else None


def _latent(arch: Arch) -> tuple[int, int, int, int] | None:
    """As ``selftest.LatentSizes``; None: there are no latents."""
    found = next((x.attn.latent for x in arch.layers if x.attn.latent is not None), None)
    return None if found is None else (found.own, found.turned, found.rank, found.value)


def loop_over_experts(
    attention: str, arch: Arch, dtype: Any, scheme: Any = None, parts: int = 1
) -> str:
    """The reason why a GPU runs a loop over experts where a step has more than a few; empty: it runs the kernel for
    them, or there are none.

    Args:
        attention: the backend; empty: XLA's partitioner cuts the step, kernels for experts too are left out.
        parts: devices that share an expert.
    """
    from jserve.model.moe_hopper import unserved  # imports the kernels

    found = dict.fromkeys(x.ffn for x in arch.layers if isinstance(x.ffn, Moe))
    if not found:
        return ""
    if not attention:
        return "XLA's partitioner (sharding.mode auto) cannot cut it"
    if attention not in KERNELS:
        return f"it is of attention_backend hopper and dense_experts, this is {attention}"
    if scheme is not None and not scheme.widened:
        return f"it takes no weights in the form of {scheme.name}"
    reasons = (unserved(moe, arch.D, moe.F // parts, dtype) for moe in found)
    return next(filter(None, reasons), "")


def drafter_of(config: EngineConfig, given: tuple[Any, ...], progress: Progress) -> Any:
    """The drafter that ``speculative`` names, for a target of these (arch, mesh, rules, dtype)."""
    options = config.speculative
    if options.method == "ngram":
        return copying(options, config.n_drafts, given[0])
    if options.method not in DEVICE:
        return None
    return load_speculation(
        options.method,
        resolve(options.model, "", config.model.load_format),
        *given,
        shape=lambda deepest: shape(options, deepest),
        progress=lambda _, done, total: progress("load drafter", done, total),
        scan_nan=config.model.scan_nan,
        seed=config.model.seed + 1,
        tensor_parallel_size=options.tensor_parallel_size,
    )


def _dtype(config: EngineConfig, source: Source) -> Any:
    name = config.model.dtype if config.model.dtype != "auto" else dtype_name(source.config)
    return jnp.dtype(name)


def _say_forms(scheme: str, params: Any, dtype: str) -> None:
    """The log's line on what is quantised, and one where activations are not what a format was made for."""
    stored, rest = (n / 1e9 for n in n_bytes(params))
    log.info("quantization %s: %.3f GB; %.3f GB stay in %s", scheme, stored, rest, dtype)
    if "e2m1" in bytes_by_form(params, dtype):
        log.warning(
            "quantization %s: 4-bit floats are of weights alone, activations stay in %s",
            scheme,
            dtype,
        )


def _scheme(config: EngineConfig, source: Source, dtype: Any) -> Any:

    options = config.model
    return scheme_of(source.config, dtype, options.quantization, options.quantization_config)
