"""Values at points of the model, for requests that ask: those of a pass over the whole text, at any batch and
chunking; programs of others are untouched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jserve import LLM, SamplingParams, functional, tap
from jserve.errors import BadRequest, ConfigError
from jserve.model import features
from jserve.model.features import register_feature
from jserve.model.features.tap import where_asked
from jserve.model.hand import step_model
from jserve.model.step import make_step
from jserve.model.view import Bucket, StepDims, buffer_size
from tests.model.assembly import assemble_all
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.test_serve import Server, client

POINTS = ("blocks.0.hook_mlp_out", "blocks.1.hook_resid_post")
HEADS = ("blocks.0.attn.hook_q", "blocks.1.attn.hook_rot_q", "blocks.1.attn.hook_z")
KEYS = ("blocks.0.attn.hook_k", "blocks.1.attn.hook_v", "blocks.1.attn.hook_rot_k")
PROMPTS = ["the fox", " ".join(["the quick brown fox jumps over the lazy dog"] * 3)]
"""One of them longer than a chunk of prefill."""


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_REGISTERED", {})
        register_feature(tap("probe", *POINTS, prompt=True))
        register_feature(tap("size", POINTS[1], reduce=lambda x_PD: (x_PD**2).sum(), prompt=True))
        register_feature(tap("heads", *HEADS, prompt=True))
        register_feature(tap("keys", *KEYS, prompt=True))
        with LLM(str(tiny_dir), **SMALL_OPTIONS, page_size=16) as made:
            yield made


def asked(*names: str, of: Any = True, **rest: Any) -> SamplingParams:
    extra = dict.fromkeys(names, of)
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=extra, **rest)


def whole(llm: LLM, out: Any, points: tuple[str, ...] = POINTS) -> np.ndarray:
    """float32[tokens, points, ...] of the text in one pass, from its first token to the last but one."""
    model = functional.model(json.loads((Path(llm.config.model.model) / "config.json").read_text()))
    ids = jnp.array([*out.prompt_token_ids, *out.outputs[0].token_ids])
    params = llm._engine.runner.params  # type: ignore[attr-defined]
    run = jax.jit(partial(functional.forward, model), static_argnames="taps")
    _, found = run(params, ids, jnp.zeros_like(ids), taps=points)
    return np.stack([found[name][:-1] for name in points], axis=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_values_are_those_of_the_whole_text_at_any_batch_and_chunking(llm: LLM) -> None:
    params = [asked("probe", "keys"), asked("probe", "size", "heads"), asked()]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert llm._engine.runner.programs.late_compiles == 0  # type: ignore[attr-defined]
    for out in outs[:2]:
        found = np.array(out.outputs[0].extra["probe"], np.float32)
        want = whole(llm, out)[len(out.prompt_token_ids) - 1 :]
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
        assert not out.prompt_extra
    for out, name, points in ((outs[0], "keys", KEYS), (outs[1], "heads", HEADS)):
        found = np.array(out.outputs[0].extra[name], np.float32)
        want = whole(llm, out, points)[len(out.prompt_token_ids) - 1 :]
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4, err_msg=name)
    size = np.array(outs[1].outputs[0].extra["size"])
    want = (np.array(outs[1].outputs[0].extra["probe"])[:, 1] ** 2).sum(axis=1)
    np.testing.assert_allclose(size, want, rtol=1e-4)
    assert "size" not in outs[0].outputs[0].extra
    assert not outs[2].outputs[0].extra
    assert outs[2].outputs[0].token_ids == outs[0].outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_prompt_has_values_of_every_token_whatever_is_cached(llm: LLM) -> None:
    """Two in chunks beside a short one and one that asks for drawn tokens alone; then all again, cached."""
    params = [
        asked("probe", "size", "heads", of="prompt"),
        asked("probe", "keys", of="prompt"),
        asked("probe"),
        asked("size", of="prompt", n=2),
    ]
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    programs = llm._engine.runner.programs  # type: ignore[attr-defined]
    for again in (False, True):
        compiled = programs.late_compiles  # by the passes over whole texts
        outs = llm.generate(prompts, params, use_tqdm=False)
        assert programs.late_compiles == compiled
        for out in outs[:2]:
            n = len(out.prompt_token_ids)
            told, drawn = out.prompt_extra["probe"], out.outputs[0].extra["probe"]
            assert (len(told), out.num_cached_tokens) == (n, 0)
            assert isinstance(told[0], np.ndarray)
            assert np.array_equal(told[-1], drawn[0]), (
                "the last token of the prompt is where the first is drawn"
            )
            found = np.array([*told, *drawn[1:]], np.float32)
            np.testing.assert_allclose(found, whole(llm, out), rtol=1e-4, atol=1e-4)
        for out, name, points in ((outs[0], "heads", HEADS), (outs[1], "keys", KEYS)):
            found = np.array([*out.prompt_extra[name], *out.outputs[0].extra[name][1:]], np.float32)
            want = whole(llm, out, points)
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4, err_msg=name)
        probe, size = (np.array(outs[0].prompt_extra[name]) for name in ("probe", "size"))
        np.testing.assert_allclose(size, (probe[:, 1] ** 2).sum(axis=1), rtol=1e-4)
        assert not outs[2].prompt_extra
        assert not again or outs[2].num_cached_tokens > 0
        np.testing.assert_allclose(outs[3].prompt_extra["size"], size, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_values_of_a_prompt_are_the_hidden_states_of_transformers(llm: LLM) -> None:
    torch = pytest.importorskip("torch")
    from tests.model import hf

    config = json.loads((Path(llm.config.model.model) / "config.json").read_text())
    model = functional.model(config)
    oracle, _ = hf.tiny(
        "LlamaForCausalLM", **{k: v for k, v in config.items() if k != "architectures"}
    )
    names = ("blocks.1.hook_resid_pre", "ln_final.hook_normalized")
    values = ("blocks.0.attn.hook_v",)
    params = assemble_all(model.specs, hf.weights(oracle), model.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_REGISTERED", {})
        register_feature(tap("states", *names, prompt=True))
        register_feature(tap("values", *values, prompt=True))
        with LLM(llm.config.model.model, params=params, **SMALL_OPTIONS) as made:
            both = asked("states", "values", of="prompt")
            (out,) = made.generate([PROMPTS[1]], both, use_tqdm=False)
    seen: list[Any] = []
    attn = oracle.model.layers[0].self_attn
    attn.v_proj.register_forward_hook(lambda module, args, out: seen.append(out[0].numpy()))
    with torch.no_grad():
        ids = torch.tensor([out.prompt_token_ids])
        states = oracle(ids, output_hidden_states=True).hidden_states
    found = np.array(out.prompt_extra["values"])
    np.testing.assert_allclose(found.reshape(seen[0].shape), seen[0], rtol=1e-4, atol=1e-4)
    want = np.stack([states[1][0].numpy(), states[-1][0].numpy()], axis=1)
    np.testing.assert_allclose(out.prompt_extra["states"], want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_asked_is_checked(llm: LLM) -> None:
    for wrong in ("all", 1, ["prompt"]):
        with pytest.raises(BadRequest, match='probe: must be true or "prompt"'):
            llm.generate("x", SamplingParams(extra_args={"probe": wrong}))
    drawn_only = tap("probe", *POINTS)
    with pytest.raises(ValueError, match="must be true, not 'prompt'"):
        drawn_only.check("prompt")


@pytest.mark.parametrize(
    ("asks", "of_prompt", "said"), [(False, False, 0), (True, False, 1), (True, True, 2)]
)
def test_reductions_are_computed_where_somebody_asks(
    asks: bool, of_prompt: bool, said: int
) -> None:
    """Beside rows that ask for another tap of the same program they are skipped, whatever is in the stream."""
    probe = tap("size", *POINTS, reduce=lambda x_PD: (x_PD**2).sum(), prompt=True)
    dims = StepDims(C=2, M=1, Z=16, V=8)
    (asked,) = probe.fields(Bucket(D=2, P=0, F=0), dims)
    views = {asked.name: np.full((), 7, np.int32)}
    row = SimpleNamespace(
        choice=SimpleNamespace(request=SimpleNamespace(params=SamplingParams(extra_args={"x": 1}))),
        prompt_features=("size",) if of_prompt else (),
    )
    if asks:
        row.choice.request.params = SamplingParams(extra_args={"size": True})
    probe.pack(views, [row], [0], dims)  # type: ignore[arg-type]
    assert views[asked.name] == said
    found = where_asked(jnp.asarray(said > 0), jax.vmap(lambda x_D: x_D.sum()), jnp.ones((2, 3)))
    assert found.tolist() == ([3.0, 3.0] if said else [0.0, 0.0])


@pytest.mark.slow
def test_a_plain_program_has_nothing_of_it(tiny_dir: Path) -> None:
    """The lowered step is the same text whether or not a tap is registered; only the tapped bucket's differs."""
    model = step_model(json.loads((tiny_dir / "config.json").read_text()))
    plain = Bucket(D=2, P=0, F=0)

    def text(bucket: Bucket) -> str:
        buf = jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), jnp.int32)
        step = jax.jit(make_step(model, bucket), donate_argnums=1)
        return step.lower(model.abstract_params(), model.abstract_state(), buf).as_text()

    probe = tap("probe", *POINTS)
    before = text(plain)
    register_feature(probe)
    try:
        assert text(plain) == before
        assert text(plain.with_also(probe)) != before
        prompts = tap("probe", *POINTS, prompt=True)
        assert text(plain.with_also(prompts)) == text(plain.with_also(probe))
        chunk = Bucket(D=2, P=4, F=1)
        assert text(chunk.with_also(prompts)) != text(chunk.with_also(probe))
    finally:
        features._REGISTERED.pop("probe")
    with pytest.raises(ConfigError, match="names no point") as caught:
        text(plain.with_also(tap("wrong", "blocks.9.hook_mlp_out")))
    assert caught.value.field == "wrong"
    mixed = tap("mixed", "blocks.0.attn.hook_*")
    with pytest.raises(ConfigError, match=r"several shapes, \[8, 8\], \[4, 8\]") as caught:
        text(plain.with_also(mixed))
    assert caught.value.field == "mixed"


PLUGIN = """
import jserve
jserve.register_feature(jserve.tap("probe", "blocks.0.hook_mlp_out", prompt=True))
jserve.register_feature(
    jserve.tap("size", "blocks.0.hook_mlp_out", reduce=lambda x_PD: (x_PD**2).sum())
)
"""


ASKED: dict[str, Any] = {
    "model": "tiny-llama",
    "prompt": "the fox",
    "max_tokens": 5,
    "temperature": 0,
}
ASKED["extra_body"] = {"ignore_eos": True, "vllm_xargs": {"probe": "prompt", "size": True}}


def check_values(server: Server) -> None:
    """Of ``PLUGIN``'s taps: arrays of the engine's process are nested lists in an answer and in its stream."""
    ask = client(server).completions.create
    (choice,) = ask(**ASKED).choices
    drawn, size = (np.array(choice.extra[name]) for name in ("probe", "size"))
    prompt = np.array(choice.prompt_extra["probe"])
    assert drawn.shape == (5, 1, 32)
    assert prompt.shape[1:] == (1, 32)
    np.testing.assert_array_equal(prompt[-1], drawn[0])
    np.testing.assert_allclose((drawn**2).sum(axis=(1, 2)), size, rtol=1e-4)
    pieces = [c.choices[0] for c in ask(**ASKED, stream=True)]
    extra = [piece.extra["probe"] for piece in pieces if getattr(piece, "extra", None)]
    np.testing.assert_array_equal(np.concatenate(extra), drawn)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_gives_them_where_it_may(tiny_dir: Path, tmp_path: Path) -> None:
    """Without the flag a name is refused."""
    plugin = tmp_path / "own_taps.py"
    plugin.write_text(PLUGIN)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    for allowed in (False, True):
        options = SMALL_OPTIONS | {"compile_cache": cache, "allow_taps": allowed}
        server = Server(tiny_dir, tmp_path / "log", **options, plugins=plugin)
        try:
            if allowed:
                check_values(server)
            else:
                with pytest.raises(openai.BadRequestError, match="--allow-taps"):
                    client(server).completions.create(**ASKED)
        finally:
            assert server.stop() == 0
