"""The Python door on a tiny model: outputs, streams, errors, weights handed over and swapped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jserve import LLM, AsyncLLM, EngineConfig, RequestOptions, SamplingParams, build
from jserve.errors import BadRequest, CacheNotFound, ConfigError, ContextTooLong, WeightsError
from jserve.sched.record.replay import replay
from tests.whole.conftest import SMALL_OPTIONS

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_dir: Path):
    with LLM(str(tiny_dir), **SMALL_OPTIONS, max_waiting=1024) as made:
        yield made


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["the quick", "fox", "a much longer prompt that spans several pages " * 2]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in prompts]
    assert [o.prompt for o in together] == prompts
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    for out in together:
        choice = out.outputs[0]
        assert out.finished
        assert choice.finish_reason == "length"
        assert len(choice.token_ids) == 12
        assert choice.text == llm.tokenizer.decode(choice.token_ids)


@pytest.mark.slow
def test_more_prompts_than_the_queue_holds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []

    @contextlib.contextmanager
    def recorded(title: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
        assert (total, shown) == (1300, True)
        yield record

    def record(done: int) -> None:
        shown.append(done)

    monkeypatch.setattr("jserve.llm.progress_bar", recorded)
    assert llm.config.scheduler.max_waiting < 1300
    prompts = [[3 + i % 7, 3 + i // 7 % 40] for i in range(1300)]
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    assert [o.prompt_token_ids for o in outs] == prompts
    assert all(len(o.outputs[0].token_ids) == 1 for o in outs)
    assert shown == sorted(shown)
    assert shown[-1] == 1300
    assert len(set(shown)) > 100


def test_token_ids_and_dicts_are_prompts_too(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the quick")
    runs = llm.generate([ids, {"prompt_token_ids": ids}, {"prompt": "the quick"}], GREEDY)
    assert len({tuple(o.outputs[0].token_ids) for o in runs}) == 1


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate("the quick", GREEDY)[0].outputs[0].text
    assert "".join(llm.stream("the quick", GREEDY)) == whole


def test_a_cache_handle_is_made_used_renewed_and_dropped(llm: LLM) -> None:
    document, question = "the quick brown fox jumps over the dog " * 4, "what jumps?"
    cold = llm.generate(document + question, GREEDY, options=RequestOptions(cache_salt="other"))
    made = llm.create_cache("doc", document, ttl_s=60)
    assert (made.name, made.pinned, made.n_uses) == ("doc", True, 0)
    rest = llm.tokenizer.encode(document + question)[made.n_tokens :]
    warm = llm.generate([rest], GREEDY, options=RequestOptions(cache="doc"))
    assert warm[0].outputs[0].token_ids == cold[0].outputs[0].token_ids
    assert warm[0].num_cached_tokens >= made.n_pages * llm.config.cache.page_size
    assert llm.renew_cache("doc", 600).expires_in_s > 500
    assert [c.n_uses for c in llm.caches()] == [1]
    with pytest.raises(CacheNotFound):
        llm.caches("doc", tenant="somebody else")
    llm.drop_cache("doc")
    assert llm.caches() == []
    with pytest.raises(CacheNotFound):
        llm.generate("x", GREEDY, options=RequestOptions(cache="doc"))
    with pytest.raises(BadRequest, match="ttl_s"):
        llm.create_cache("doc", document, ttl_s=-1)


def test_options_are_checked_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="lane"):
        llm.generate("x", GREEDY, options=RequestOptions(lane="express"))
    with pytest.raises(BadRequest, match="deadline_ms"):
        llm.generate("x", GREEDY, options=RequestOptions(deadline_ms=-1))
    out = llm.generate("x", GREEDY, options=RequestOptions(lane="bulk", session="s"))
    assert len(out[0].outputs[0].token_ids) == 12


def test_a_closed_stream_frees_everything(llm: LLM) -> None:
    stream = llm.stream("the quick", GREEDY)
    next(stream)
    stream.close()
    assert not llm._engine.busy
    assert llm._engine.stats().running == 0


@pytest.mark.timeout(30)
def test_an_open_stream_is_named_and_not_waited_for(llm: LLM) -> None:
    stream = llm.stream("the quick", GREEDY)
    next(stream)
    for call in (lambda: llm.generate("fox", GREEDY), llm.caches, lambda: next(llm.stream("a"))):
        with pytest.raises(RuntimeError, match="stream of this LLM is open"):
            call()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(llm.generate, "fox", GREEDY)
        rest = "".join(stream)
        assert rest
        assert other.result()[0].finished, "another thread waits for its turn"
    assert llm.generate("fox", GREEDY)[0].finished


def test_stop_strings_cut_text_and_tokens(llm: LLM) -> None:
    free = llm.generate("the quick", GREEDY)[0].outputs[0]
    stop = free.text[3:5]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    cut = llm.generate("the quick", params)[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]


def test_n_choices_with_a_seed_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, logprobs=2)
    first, again = (llm.generate("the quick", params)[0] for _ in range(2))
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) > 1
    for i, choice in enumerate(first.outputs):
        alone = SamplingParams(temperature=1.0, seed=5 + i, max_tokens=8)
        assert llm.generate("the quick", alone)[0].outputs[0].token_ids == choice.token_ids
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        for token, found in zip(choice.token_ids, choice.logprobs, strict=True):
            assert next(iter(found)) == token
            assert len(found) == 2 + (found[token].rank > 2)
            others = [at.rank for t, at in found.items() if t != token]
            assert others == [rank for rank in (1, 2) if rank != found[token].rank]
            assert found[token].decoded_token == llm.tokenizer.token_text(token)
        drawn = zip(choice.token_ids, choice.logprobs, strict=True)
        total = sum(found[token].logprob for token, found in drawn)
        assert choice.cumulative_logprob == pytest.approx(total)


def test_log_probabilities_of_named_ids(llm: LLM) -> None:
    every = tuple(range(320))
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=6, logprob_token_ids=every[::3])
    (choice,) = llm.generate("the quick", params)[0].outputs
    assert choice.logprobs is not None
    for token, found in zip(choice.token_ids, choice.logprobs, strict=True):
        assert list(found) == [token, *(i for i in every[::3] if i != token)]
        assert found[token].rank is not None
        assert {at.rank for t, at in found.items() if t != token} == {None}
    with pytest.raises(BadRequest) as caught:
        SamplingParams(logprobs=2, logprob_token_ids=(1,))
    assert caught.value.field == "logprob_token_ids"


def test_served_names(tiny_dir: Path) -> None:
    given = EngineConfig.of(
        model=str(tiny_dir), load_format="dummy", served_model_name=["a", "b", "a"]
    )
    text = build.text_side(given)
    assert (text.name, text.aliases) == ("a", ("b",))
    text = build.text_side(EngineConfig.of(model=str(tiny_dir), load_format="dummy"))
    assert (text.name, text.aliases) == ("tiny-llama", ())


def test_chat_renders_the_template(llm: LLM) -> None:
    out = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0]
    text = llm.tokenizer.decode(out.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_dialogue_is_read_as_over_http(llm: LLM) -> None:
    plain = llm.chat([{"role": "user", "content": "hi\nyou"}], GREEDY)[0].prompt_token_ids
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    assert llm.chat([{"role": "user", "content": parts}], GREEDY)[0].prompt_token_ids == plain
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the qu"}]
    out = llm.chat(said, GREEDY, continue_final_message=True)[0]
    assert llm.tokenizer.decode(out.prompt_token_ids).endswith("the qu")


@pytest.mark.parametrize(
    ("message", "template", "field"),
    [
        ({"content": "hi"}, {"tool_choice": "required"}, "tool_choice"),
        ({"content": "hi"}, {"chat_template": "{{ x }}"}, "chat_template"),
        ({"content": "hi"}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"content": "hi"}, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
        ({"content": [{"type": "image_url"}]}, {}, "messages[0].content[0]"),
        ({"content": "hi", "role": "nobody"}, {}, "messages[0].role"),
        ("hi", {}, "messages[0]"),
    ],
)
def test_what_a_dialogue_cannot_hold_is_refused_by_name(
    llm: LLM, message: Any, template: dict, field: str
) -> None:
    said = {"role": "user", **message} if isinstance(message, dict) else message
    with pytest.raises(BadRequest) as caught:
        llm.chat([[said]], GREEDY, **template)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "hi"},
        {},
        {"prompt": None},
        {"prompt_token_ids": "ids"},
        [None],
        [5, "a"],
        b"bytes",
        [b"bytes"],
        3,
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(BadRequest, match="prompt"):
        llm.generate(prompt, GREEDY)  # type: ignore[arg-type]


def test_a_bad_word_is_not_said_behind_a_blank_either(llm: LLM) -> None:
    ids = llm.tokenizer.encode(" fox", add_special_tokens=False)
    assert len(ids) == 1
    favoured = SamplingParams(temperature=0, max_tokens=4, logit_bias={ids[0]: 100.0})
    assert "fox" in llm.generate("the quick", favoured)[0].outputs[0].text
    banned = replace(favoured, bad_words=("fox",))
    assert "fox" not in llm.generate("the quick", banned)[0].outputs[0].text


@pytest.mark.parametrize(
    ("prompt", "params", "error", "word"),
    [
        ([], GREEDY, BadRequest, "prompt"),
        ([999999], GREEDY, BadRequest, "prompt"),
        ([-1], GREEDY, BadRequest, "prompt"),
        ([5] * 200, GREEDY, ContextTooLong, "160"),
        ([5], SamplingParams(max_tokens=500), ContextTooLong, "160"),
        ([5], SamplingParams(logit_bias={999999: 1.0}), BadRequest, "logit_bias"),
        ([5], SamplingParams(allowed_token_ids=(999999,)), BadRequest, "allowed_token_ids"),
        ([5], SamplingParams(stop_token_ids=(-4,)), BadRequest, "stop_token_ids"),
    ],
)
def test_a_bad_request_raises_and_harms_nothing(llm: LLM, prompt, params, error, word) -> None:
    before = llm.generate("the quick", GREEDY)[0].outputs[0].token_ids
    with pytest.raises(error, match=word):
        llm.generate([[5, 6], {"prompt_token_ids": prompt}], [GREEDY, params])
    assert llm.generate("the quick", GREEDY)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("seed", 2**63),
        ("max_tokens", -1),
        ("logprobs", 21),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("stop", ("",)),
        ("allowed_token_ids", ()),
        ("logit_bias", {1: 101.0}),
    ],
)
def test_sampling_fields_are_range_checked_by_name(field: str, value: object) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_weights_handed_over_and_swapped(llm: LLM, tiny_dir: Path) -> None:
    """``params=`` and ``update_weights``: a live program's weights serve at once, on one set of programs."""
    mine = jax.tree.map(np.asarray, llm._engine.runner.params)  # type: ignore[attr-defined]
    other = jax.tree.map(lambda x: x[..., ::-1], mine)
    options = {k: v for k, v in SMALL_OPTIONS.items() if k != "load_format"}
    with LLM(str(tiny_dir), params=mine, load_format="dummy", **options) as second:
        want = llm.generate("the quick", GREEDY)[0].outputs[0].token_ids
        assert second.generate("the quick", GREEDY)[0].outputs[0].token_ids == want
        second.update_weights(other)
        changed = second.generate("the quick", GREEDY)[0].outputs[0].token_ids
        assert changed != want
        second.update_weights(mine)
        assert second.generate("the quick", GREEDY)[0].outputs[0].token_ids == want
        broken = {**mine, "norm": np.ones(3, np.float32)}
        with pytest.raises(WeightsError, match="norm"):
            second.update_weights(broken)
        assert second.generate("the quick", GREEDY)[0].outputs[0].token_ids == want
    second.close()
    with pytest.raises(RuntimeError, match="this LLM was closed"):
        second.generate("the quick", GREEDY)


def test_a_config_that_is_not_supported_is_refused_by_key(tiny_dir: Path, tmp_path: Path) -> None:
    for file in tiny_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="hidden_act"):
        LLM(str(tmp_path), **SMALL_OPTIONS)


async def test_async_generate_streams_and_cancels(tiny_dir: Path, llm: LLM) -> None:
    want = llm.generate("the quick", GREEDY)[0].outputs[0].token_ids
    async with AsyncLLM(str(tiny_dir), **SMALL_OPTIONS) as made:
        seen = [list(o.outputs[0].token_ids) async for o in made.generate("the quick", GREEDY)]
        assert seen[-1] == want
        half = made.generate("the quick", GREEDY)
        await anext(half)
        await half.aclose()
        again = [o async for o in made.generate("the quick", GREEDY)]
        assert again[-1].outputs[0].token_ids == want


@pytest.mark.slow
async def test_the_async_door_takes_arrays_and_a_mesh_and_is_operated(
    tiny_dir: Path, llm: LLM
) -> None:
    """As ``LLM`` does; a trainer's arrays are its own once the engine has started."""
    here, other = jax.devices()[:2]
    own = llm._engine.runner.params  # type: ignore[attr-defined]
    host = jax.tree.map(np.asarray, own)
    given = jax.device_put(host, here)
    refs = [weakref.ref(leaf) for leaf in jax.tree.leaves(given)]
    want = llm.generate("the quick", GREEDY)[0].outputs[0].token_ids

    async def tokens() -> list[int]:
        outs = [out async for out in made.generate("the quick", GREEDY)]
        return outs[-1].outputs[0].token_ids

    mesh = jax.make_mesh((1,), ("tp",), devices=[other])
    async with AsyncLLM(str(tiny_dir), params=given, mesh=mesh, **SMALL_OPTIONS) as made:
        del given
        gc.collect()
        assert all(ref() is None for ref in refs), "the engine keeps what it has copied"
        assert made.engine.info["device"].startswith("1 x")
        assert await tokens() == want
        assert (await made.pause()).paused
        waits = asyncio.create_task(tokens())
        new = {**host, "final_norm": -host["final_norm"]}
        assert (await made.update_weights(new, version="new")).version == "new"
        assert not waits.done()
        assert not (await made.resume()).paused
        changed = await waits
        assert changed != want
        assert (await made.sleep()).asleep == ("kv", "weights")
        waits = asyncio.create_task(tokens())
        assert (await made.wake(["weights"])).asleep == ("kv",)
        assert not waits.done()
        assert (await made.wake()).asleep == ()
        assert await waits == changed
        await made.update_weights(host)
        assert await tokens() == want
        for leaf in jax.tree.leaves(own):
            assert leaf.devices() == {here}
    for name in ("params", "mesh"):
        with pytest.raises(ConfigError) as caught:
            AsyncLLM(str(tiny_dir), **{name: host}, replicas=2, **SMALL_OPTIONS)
        assert caught.value.field == name


@pytest.mark.slow
def test_the_journal_of_a_real_run_replays(tiny_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with LLM(str(tiny_dir), **SMALL_OPTIONS, journal=str(path)) as made:
        outputs = made.generate(["the quick", "fox " * 20], GREEDY, use_tqdm=False)
        replayed = replay(path, made._engine.runner.limits, made.config)
    told = [t for out in replayed.outputs for t in out.token_ids]
    assert sorted(told) == sorted(t for o in outputs for t in o.outputs[0].token_ids)
    assert replayed.n_steps > 10
