"""The trial of attention kernels in a child process: what it says of children that fail, hang and abort, and what an
engine serves then."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import build_runner
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.kv_layout import KV_FORMS
from jserve.model import attention, native
from jserve.model.arch import Arch, Moe, Router, resized as with_heads
from jserve.model.families import family_for
from jserve.model.quant import Form, QTensor
from jserve.runner import selftest, sizes
from jserve.runner.sizes import chosen_attention
from tests.model.published import V2_LITE, resized
from tests.runner.harness import ARCH


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("raise SystemExit(0)", ""),
        (
            "import sys; print('decode differs', file=sys.stderr); sys.exit(4)",
            "code 4: decode differs",
        ),
        ("raise SystemExit(7)", "code 7: it said nothing"),
        ("import os; os.abort()", "signal 6"),
        ("import time; time.sleep(600)", "no result within 1 s"),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", "no result"),
    ],
)
def test_how_a_child_ends_says_what_is_wrong(code: str, want: str) -> None:
    found = selftest.fault(child(code), limit_s=1.0 if "sleep" in code else 60.0)
    assert (want in found) if want else found == ""


def test_a_child_runs_the_cases_of_a_backend() -> None:
    """With its real command, the CPU's backend in place of the kernels."""
    assert selftest.fault(selftest.command("xla", 16, 2, 16, "bfloat16")) == ""


def test_wrong_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from jserve.model.attn_xla import XLA

    wrong = dataclasses.replace(XLA, attend=lambda args, kv, view: 1.1 * XLA.attend(args, kv, view))
    monkeypatch.setattr("jserve.model.attn_xla.XLA", wrong)
    found = selftest.differs("xla", 16, 2, 16, "float32")
    assert "decode differs" in found
    assert "prefill differs" in found


def test_a_child_takes_little_of_the_device() -> None:
    code = "import os, sys; sys.exit(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] != 'false')"
    assert selftest.fault(child(code)) == ""


H200, A100 = (
    SimpleNamespace(platform="gpu", compute_capability=c, device_kind=k)
    for c, k in (("9.0", "NVIDIA H200"), ("8.0", "NVIDIA A100"))
)


@pytest.fixture
def new_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen does not depend on the jax of the test."""
    monkeypatch.setattr(attention.jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(attention, "cuda_version", lambda: 0)
    hopper = attention.AttentionBackend(
        name="hopper",
        kv_axis=1,
        kv_shape=lambda K, H, P, Z: (P, K, Z, H),
        write_kv=lambda *_: None,  # type: ignore[arg-type,return-value]
        attend=lambda *_: None,  # type: ignore[arg-type,return-value]
        move=lambda *_: None,  # type: ignore[arg-type,return-value]
        has_sinks=False,
    )
    monkeypatch.setitem(attention._BACKENDS, "hopper", "tests.runner.test_selftest:FAKE_HOPPER")
    monkeypatch.setattr(sys.modules[__name__], "FAKE_HOPPER", hopper, raising=False)


def served(monkeypatch: pytest.MonkeyPatch, device: Any, code: str, **options: Any) -> str:
    monkeypatch.setattr(selftest, "command", lambda *_: child(code))
    config = EngineConfig.of(**options)
    config = build_runner.with_attention(config, ARCH, jnp.dtype(jnp.bfloat16), device, None)
    return config.device.attention_backend


@pytest.mark.usefixtures("new_jax")
def test_kernels_that_pass_are_served(monkeypatch, caplog) -> None:
    assert served(monkeypatch, H200, "") == "hopper"
    assert not caplog.records


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("code", ["raise SystemExit('decode differs')", "import os; os.abort()"])
def test_kernels_that_fail_are_not_served_and_one_line_says_why(monkeypatch, caplog, code) -> None:
    caplog.set_level(logging.INFO)
    assert served(monkeypatch, H200, code) == "dense"
    (line,) = caplog.messages
    assert "attention is dense on NVIDIA H200; not hopper: the test ended with" in line


@pytest.mark.usefixtures("new_jax")
def test_other_gpus_get_dense_without_a_test(monkeypatch, caplog) -> None:
    assert served(monkeypatch, A100, "raise SystemExit('not to be run')") == "dense"
    assert "for compute capability 9.0, this device has 8.0" in caplog.text


@pytest.mark.usefixtures("new_jax")
def test_who_is_named_is_served_untested(monkeypatch) -> None:
    fails = "raise SystemExit(1)"
    assert served(monkeypatch, H200, fails, attention_backend="hopper") == "hopper"
    assert served(monkeypatch, A100, fails, attention_backend="xla") == "xla"


@pytest.mark.usefixtures("new_jax")
def test_what_auto_means_by_device_and_model() -> None:
    def name(capability: str, platform: str = "gpu", **options: Any) -> str:
        config = EngineConfig.of(**options)
        return chosen_attention(ARCH, config, jnp.dtype(jnp.bfloat16), platform, capability)[0]

    assert name("", "cpu") == "xla"
    assert name("9.0") == "hopper"
    assert name("8.9") == name("10.0") == name("") == "dense"
    assert name("9.0", attention_backend="dense") == "dense"
    with pytest.raises(
        ConfigError, match=r"hopper: its kernels are for .* 9\.0, this .* 8\.0"
    ) as e:
        name("8.0", attention_backend="hopper")
    assert e.value.field == "attention_backend"


INT8, INT4 = KV_FORMS


def test_the_cases_run_over_kv_with_scales() -> None:
    assert selftest.differs("xla", 16, 2, 16, INT8) == ""


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"kv_cache_dtype": INT8}, "hopper"),
        ({"kv_cache_dtype": INT8, "kv_cache_dtype_skip_layers": ("0",)}, "hopper"),
        ({"kv_cache_dtype": INT8, "page_size": 16}, "dense"),
        ({"kv_cache_dtype": INT4}, "dense"),
    ],
)
def test_which_kv_the_kernels_get_and_are_tried_with(
    monkeypatch, options: dict[str, Any], backend: str
) -> None:
    monkeypatch.setitem(attention._BACKENDS, "hopper", "jserve.model.attn_hopper:hopper")
    tried = []
    monkeypatch.setattr(selftest, "command", lambda *case: tried.append(case) or child(""))
    arch, bf16 = with_heads(ARCH, H=128), jnp.dtype(jnp.bfloat16)
    config = EngineConfig.of(**options)
    found = build_runner.with_attention(config, arch, bf16, H200, None)
    assert found.device.attention_backend == backend
    assert [case[4] for case in tried] == [INT8] * (backend == "hopper")
    if backend == "dense":
        with pytest.raises(ConfigError, match="attention_backend hopper"):
            sizes.stored_kv(
                config.on("gpu"),
                attention.backend("hopper", "gpu"),
                bf16,
                sizes.with_kv_options(arch, config, bf16, None),
            )


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("cuda", "broken"),
    [(12070, False), (12080, True), (12090, True), (12091, False), (13000, False)],
)
def test_a_compiler_that_miscompiles_is_not_used(monkeypatch, cuda: int, broken: bool) -> None:
    monkeypatch.setattr(attention, "cuda_version", lambda: cuda)
    assert attention.candidates("auto", "gpu", "9.0")[0] == ("dense" if broken else "hopper")
    if broken:
        with pytest.raises(ConfigError, match=r"CUDA 12\.[89] miscompiles causal masks"):
            attention.candidates("hopper", "gpu", "9.0")


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("version", [(0, 10, 2), (0, 12, 0)])
def test_another_jax_has_no_kernels(monkeypatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(attention.jax, "__version_info__", version)
    assert attention.candidates("auto", "gpu", "9.0") == ("dense",)


def latent_arch(F: int) -> Arch:
    """DeepSeek's layers with experts of this width."""
    config = {**resized(V2_LITE), "hidden_size": 128, "moe_intermediate_size": F}
    return family_for(config).arch(config)


@pytest.mark.usefixtures("new_jax")
def test_experts_have_their_kernel_where_attention_has_none(monkeypatch, caplog) -> None:
    """Of latents, where the kernel takes the experts and passes."""
    bf16 = jnp.dtype(jnp.bfloat16)

    def served(arch: Arch, code: str, **options: Any) -> str:
        monkeypatch.setattr(selftest, "command", lambda *_: child(code))
        config = EngineConfig.of(**options)
        return build_runner.with_attention(config, arch, bf16, H200, None).device.attention_backend

    assert served(latent_arch(64), "") == "dense_experts"
    assert (
        "dense on NVIDIA H200; not hopper: attention_backend hopper does not serve the latent"
        in caplog.text
    )
    assert served(latent_arch(64), "raise SystemExit('experts differ')") == "dense"
    assert served(latent_arch(64), "", attention_backend="dense") == "dense"
    assert served(latent_arch(48), "raise SystemExit('not to be run')") == "dense"


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("wrong", "served"),
    [({"hopper"}, "dense_experts"), ({"hopper", "dense_experts"}, "dense"), (set(), "hopper")],
)
def test_where_attention_fails_experts_may_keep_their_kernel(
    monkeypatch, caplog, wrong: set[str], served: str
) -> None:
    def tried(name: str, *_: Any) -> list[str]:
        return child("raise SystemExit('rows differ')" if name in wrong else "")

    monkeypatch.setattr(selftest, "command", tried)
    moe = replace(MOE, F=64)
    arch = replace(ARCH, D=128, layers=tuple(replace(x, ffn=moe) for x in ARCH.layers))
    arch, bf16 = with_heads(arch, H=128), jnp.dtype(jnp.bfloat16)
    found = build_runner.with_attention(EngineConfig.of(), arch, bf16, H200, None)
    assert found.device.attention_backend == served
    assert ("rows differ" in caplog.text) == bool(wrong)


@pytest.mark.usefixtures("new_jax")
def test_a_model_without_experts_has_no_use_for_their_kernel() -> None:
    with pytest.raises(ConfigError, match=r"for models with experts, .* dense serves it") as error:
        attention.check_layers(
            attention.backend("dense_experts", "gpu"), ARCH, jnp.bfloat16, (), 64
        )
    assert error.value.field == "attention_backend"


def test_the_trial_of_experts_runs_no_attention(monkeypatch) -> None:
    ran = []
    found = {"dense_experts": SimpleNamespace(for_experts=True), "xla": attention.backend("xla")}
    monkeypatch.setattr(attention, "backend", lambda name, _: found[name])
    monkeypatch.setattr(selftest, "_outputs", lambda name, *_: ran.append(name) or np.ones(3))
    monkeypatch.setattr(selftest, "_experts", lambda *_: np.ones(3))
    assert selftest.differs("dense_experts", 576, 8, 16, "bfloat16", (128, 64)) == ""
    assert ran == []
    assert selftest.differs("xla", 64, 8, 16, "bfloat16", (128, 64)) == ""
    assert len(ran) == 4


MOE = Moe(E=4, X=2, F=128, router=Router(), activation="silu")
GELU = replace(MOE, activation="gelu")
PACKED = SimpleNamespace(name="mxfp4", widened=False)


@pytest.mark.parametrize(
    ("moe", "attention", "scheme", "parts", "says"),
    [
        (MOE, "hopper", None, 1, ""),
        (MOE, "hopper", SimpleNamespace(name="fp8", widened=True), 1, ""),
        (MOE, "dense_experts", None, 1, ""),
        (MOE, "dense", None, 1, "dense_experts, this is dense"),
        (MOE, "", None, 1, "sharding.mode auto"),
        (MOE, "hopper", PACKED, 1, "mxfp4"),
        (MOE, "hopper", None, 4, "32 of an expert"),
        (GELU, "hopper", None, 1, "hidden_act gelu"),
    ],
)
def test_a_loop_over_experts_has_a_reason(
    moe: Moe, attention: str, scheme: Any, parts: int, says: str
) -> None:
    arch = replace(ARCH, D=256, layers=tuple(replace(x, ffn=moe) for x in ARCH.layers))
    bf16 = jnp.dtype(jnp.bfloat16)
    found = build_runner.loop_over_experts(attention, arch, bf16, scheme, parts)
    assert (says in found) if says else (found == "")
    assert build_runner.loop_over_experts(attention, ARCH, bf16, scheme, parts) == ""


def test_a_dtype_that_the_kernel_lacks_is_a_reason() -> None:
    arch = replace(ARCH, D=256, layers=tuple(replace(x, ffn=MOE) for x in ARCH.layers))
    assert "float32" in build_runner.loop_over_experts("hopper", arch, jnp.dtype(jnp.float32))


FOUR = Form(kind="int4", group=128)


def matrix(form: Form) -> dict[str, Any]:
    """Parameters of which only shapes are looked at."""
    of = jax.ShapeDtypeStruct
    q, scale = (
        of((256, form.stored(512)), jnp.uint8),
        of((256, form.groups(512)), jnp.float32),
    )
    return {"w": QTensor(q, scale, None, form)}


def products(monkeypatch: pytest.MonkeyPatch, code: str, params: Any, **options: Any) -> str:
    """Option ``kernels`` of an engine with these weights on an H200."""
    monkeypatch.setattr(selftest, "command_of_products", lambda forms: child(code))
    config = EngineConfig.of(**options)
    return build_runner.with_products(config, params, BF16, H200).device.kernels


BF16 = jnp.dtype(jnp.bfloat16)


@pytest.mark.usefixtures("new_jax")
def test_products_that_pass_are_served(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert products(monkeypatch, "", matrix(FOUR)) == "auto"
    level, reason = native.chosen("auto", "gpu", BF16, "9.0", quantised=True)
    assert (level, reason) == ("hopper", "")
    assert not caplog.records


@pytest.mark.usefixtures("new_jax")
def test_products_that_fail_are_xlas_and_one_line_says_why(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert products(monkeypatch, "raise SystemExit('int4 differs')", matrix(FOUR)) == "xla"
    (line,) = caplog.messages
    assert "XLA's products, not quant_matmul: the test ended with code 1: int4 differs" in line


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("params", "options"),
    [
        (matrix(FOUR), {"kernels": "hopper"}),
        (matrix(FOUR), {"kernels": "xla"}),
        (matrix(Form(kind="int8")), {}),
        (matrix(replace(FOUR, dtype="float32")), {}),
        ({"expert_down": matrix(FOUR)["w"]}, {}),
    ],
)
def test_products_are_tried_only_where_auto_means_them(monkeypatch, params, options) -> None:
    found = products(monkeypatch, "raise SystemExit(1)", params, **options)
    assert found == options.get("kernels", "auto")


@pytest.mark.usefixtures("new_jax")
def test_why_there_is_no_kernel_of_products(monkeypatch) -> None:
    chosen = partial(native.chosen, "auto", "gpu", BF16)
    assert "groups" in chosen("9.0")[1]
    assert "compute capability 9.0" in chosen("8.0", quantised=True)[1]
    for asked, platform, capability, why in (
        ("hopper", "cpu", "", "for GPUs"),
        ("hopper", "gpu", "8.0", "compute capability"),
        ("native", "gpu", "9.0", "for CPUs"),
    ):
        with pytest.raises(ConfigError, match=f"kernels {asked}: .*{why}") as e:
            native.chosen(asked, platform, BF16, capability, quantised=True)
        assert e.value.field == "kernels"


@pytest.mark.slow
def test_a_child_of_products_gets_the_forms(monkeypatch) -> None:
    """With its real command; XLA's product in the place of the kernel."""
    form = replace(FOUR, zeros=True, made_as=FOUR)
    code = selftest.command_of_products([form])[2]
    patch = (
        "from jserve.model import quant, quant_hopper; quant_hopper.product = {};"
        "from jserve.runner import selftest; selftest.PRODUCT_ROWS = (1,);"
    )
    assert selftest.fault(child(patch.format("quant.product") + code)) == ""
    wrong = patch.format("lambda x, w: 1.1 * quant.product(x, w)")
    assert "int4 in groups of 128, 1 rows differs" in selftest.fault(child(wrong + code))
