"""A trainer beside the Python door, on two devices and with a vocabulary that does not divide over them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jserve import LLM, SamplingParams
from jserve.engine.wire import Control
from jserve.errors import BadRequest, WeightsError
from jserve.model.families import family_for
from jserve.model.param_spec import ParamSpec, is_spec
from jserve.runner.memory import DeviceMemory
from jserve.weights import orbax
from jserve.weights.adapters import AdapterDelta
from jserve.weights.layout import split
from jserve.weights.place import named
from tests.whole.conftest import SMALL_OPTIONS

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
    "page_size": 8,
    "compile_cache": SMALL_OPTIONS["compile_cache"],
    "prompt_logprobs": False,
    "structured_outputs": False,
}
PROMPTS = ["the quick brown fox", "lazy dog"]


@pytest.fixture(scope="module")
def odd_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a token more."""
    root = tmp_path_factory.mktemp("odd") / "odd-llama"
    shutil.copytree(tiny_dir, root)
    config = json.loads((root / "config.json").read_text()) | {"vocab_size": 321}
    (root / "config.json").write_text(json.dumps(config))
    return root


def drawn(root: Path, seed: int) -> Any:
    config = json.loads((root / "config.json").read_text())
    family = family_for(config)
    rng = np.random.default_rng(seed)

    def one(spec: ParamSpec) -> jax.Array:
        x = rng.standard_normal(spec.shape) * 0.25 + spec.init_mean
        return jnp.asarray(x, jnp.float32)

    return jax.tree.map(one, family.specs(family.arch(config), 1), is_leaf=is_spec)


@jax.jit
def gradients(params: Any) -> Any:
    return jax.grad(lambda p: sum(jnp.sum(x * x) for x in jax.tree.leaves(p)))(params)


@pytest.fixture(scope="module")
def train() -> Any:
    """A step of descent that takes its parameters' buffers, as trainers compile it."""

    def step(params: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients(params))

    return jax.jit(step, donate_argnums=0)


@pytest.fixture(scope="module")
def llm(odd_dir: Path) -> Iterator[LLM]:
    first = drawn(odd_dir, 0)
    with LLM(str(odd_dir), params=first, tensor_parallel_size=2, **OPTIONS) as made:
        for leaf in jax.tree.leaves(first):
            leaf.delete()
        yield made


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.slow
def test_a_training_loop_feeds_the_engine(llm: LLM, odd_dir: Path, train: Any) -> None:
    params = train(train(drawn(odd_dir, 0)))
    before = tokens(llm)
    llm.update_weights(params)
    fed = tokens(llm)
    kept = jax.tree.map(np.array, params)
    train(params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert tokens(llm) == fed != before
    fresh_options = {**OPTIONS, "tensor_parallel_size": 1}
    with LLM(str(odd_dir), params=kept, **fresh_options) as fresh:
        assert tokens(fresh) == fed


@pytest.mark.slow
def test_cached_prefixes_of_the_old_weights_are_gone(llm: LLM, odd_dir: Path) -> None:
    long = " ".join(["the quick brown fox jumps over the lazy dog"] * 2)
    for seed in (3, 4):
        llm.update_weights(drawn(odd_dir, seed))
        (first,) = llm.generate(long, GREEDY)
        (second,) = llm.generate(long, GREEDY)
        assert not first.num_cached_tokens
        assert second.num_cached_tokens
        assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_donated_leaf_is_named_and_the_engine_lives(llm: LLM, odd_dir: Path, train: Any) -> None:
    before = tokens(llm)
    params = drawn(odd_dir, 5)
    train(params)
    with pytest.raises(WeightsError, match=r"params\.embed: .*deleted"):
        llm.update_weights(params)
    wrong = drawn(odd_dir, 5)
    wrong["layers"][1]["o"] = wrong["layers"][1]["o"][:-1]
    with pytest.raises(WeightsError, match=r"params\.layers\.1\.o: shape"):
        llm.update_weights(wrong)
    assert tokens(llm) == before


@pytest.fixture(scope="module")
def even(tiny_dir: Path) -> Iterator[LLM]:
    """On one device, where nothing is padded."""
    with LLM(str(tiny_dir), **SMALL_OPTIONS) as made:
        yield made


def placed(llm: LLM, root: Path, seed: int) -> Any:
    """A trainer's weights as the engine keeps its own."""
    own = llm._engine.runner.params
    return jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), drawn(root, seed), own)


def buffers(params: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]


def test_shared_arrays_are_the_weights_and_their_loss_ends_requests_not_the_engine(
    even: LLM, tiny_dir: Path
) -> None:
    runner: Any = even._engine.runner
    even.update_weights(drawn(tiny_dir, 6))
    copied = tokens(even)
    shared, embed = placed(even, tiny_dir, 6), drawn(tiny_dir, 7)["embed"]
    compiled = runner.programs.late_compiles  # by the drawing above
    even.update_weights(shared, alias=True, version="shared")
    assert buffers(runner.params) == buffers(shared)
    assert tokens(even) == copied
    for leaf in jax.tree.leaves(shared):
        leaf.delete()
    for _ in range(5):
        with pytest.raises(WeightsError, match=r"params\..*deleted"):
            even.generate(PROMPTS[0], GREEDY)
    with pytest.raises(WeightsError, match="deleted"):
        even.update_weights({"embed": embed}, partial=True)
    with pytest.raises(WeightsError, match="deleted"):
        even.sleep()
    assert runner.programs.late_compiles == compiled
    even.update_weights(drawn(tiny_dir, 6))
    assert tokens(even) == copied


def test_other_weights_leave_those_that_were_shared_alone(even: LLM, tiny_dir: Path) -> None:
    """The engine overwrites buffers of its own, and has some again."""
    shared = placed(even, tiny_dir, 8)
    before = [np.array(leaf) for leaf in jax.tree.leaves(shared)]
    even.update_weights(shared, alias=True)
    with_eight = tokens(even)
    even.sleep(["weights"])
    even.wake(["weights"])
    assert tokens(even) == with_eight
    even.update_weights(shared, alias=True)
    embed = drawn(tiny_dir, 9)["embed"]
    even.update_weights({"embed": embed}, partial=True)
    partly = tokens(even)
    even.update_weights({**drawn(tiny_dir, 8), "embed": embed})
    assert tokens(even) == partly != with_eight
    for array, leaf in zip(before, jax.tree.leaves(shared), strict=True):
        assert np.array_equal(array, np.asarray(leaf))


def test_an_adapter_is_added_to_shared_weights_in_a_copy(even: LLM, tiny_dir: Path) -> None:
    params = drawn(tiny_dir, 8)
    rows, columns = params["layers"][0]["down"].shape
    rng = np.random.default_rng(5)
    factors = (
        rng.standard_normal((3, columns), np.float32),
        rng.standard_normal((rows, 3), np.float32),
    )
    delta = AdapterDelta({"model.layers.0.mlp.down_proj.weight": factors}, 0.1)
    even.update_weights(params)
    even.update_weights(delta)
    wanted = tokens(even)
    shared, programs = placed(even, tiny_dir, 8), even._engine.runner.programs  # type: ignore[attr-defined]
    compiled = programs.late_compiles  # by the drawing above
    even.update_weights(shared, alias=True)
    before = tokens(even)
    even.update_weights(delta)
    assert tokens(even) == wanted != before
    even.update_weights(shared, alias=True)
    assert tokens(even) == before
    assert programs.late_compiles == compiled


def test_what_would_have_to_be_copied_is_not_shared(even: LLM, tiny_dir: Path) -> None:
    before = tokens(even)
    params = drawn(tiny_dir, 5)
    with pytest.raises(WeightsError, match=r"params\..*alias takes a jax array of"):
        even.update_weights(jax.tree.map(np.asarray, params), alias=True)
    for wrong in (str(tiny_dir), names_of(params, tiny_dir)):
        with pytest.raises(WeightsError, match="only a tree") as caught:
            even.update_weights(wrong, alias=True)
        assert caught.value.field == "alias"
    for more in ({"partial": True}, {"donate": True}):
        with pytest.raises(WeightsError, match="alias"):
            even.update_weights(params, alias=True, **more)
    assert tokens(even) == before


def names_of(params: Any, root: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint."""
    config = json.loads((root / "config.json").read_text())
    family = family_for(config)
    specs = family.specs(family.arch(config), 1)
    found: dict[str, np.ndarray] = {}
    for (_, spec), leaf in zip(named(specs), jax.tree.leaves(params), strict=True):
        found |= split(spec, np.asarray(leaf))
    return found


@pytest.fixture
def nothing_compiles(llm: LLM) -> Iterator[None]:
    programs = llm._engine.runner.programs  # type: ignore[attr-defined]
    before = programs.late_compiles
    yield
    assert programs.late_compiles == before


@pytest.mark.usefixtures("nothing_compiles")
def test_checkpoint_names_and_files_are_other_ways_in(
    llm: LLM, odd_dir: Path, tmp_path: Path
) -> None:
    """A mapping, a stream in any order, a directory of either kind, and a part of the parameters."""
    first, other = drawn(odd_dir, 6), drawn(odd_dir, 7)
    llm.update_weights(first)
    want = tokens(llm)
    tensors = names_of(first, odd_dir)
    shutil.copytree(odd_dir, tmp_path / "saved")
    save_file(tensors, tmp_path / "saved" / "model.safetensors")
    orbax.save(tmp_path / "orbax", first, odd_dir)
    directories = [str(tmp_path / name) for name in ("saved", "orbax")]
    for source in (tensors, reversed(tensors.items()), *directories):
        llm.update_weights(other)
        assert tokens(llm) != want
        llm.update_weights(source)
        assert tokens(llm) == want
    some = {k: v for k, v in names_of(other, odd_dir).items() if ".self_attn." in k}
    with pytest.raises(WeightsError, match=r"params\.embed: missing"):
        llm.update_weights(some)
    llm.update_weights(some, partial=True)
    mixed = {
        **first,
        "layers": [
            {**a, **{k: b[k] for k in ("qkv", "o")}}
            for a, b in zip(first["layers"], other["layers"], strict=True)
        ],
    }
    changed = tokens(llm)
    llm.update_weights(mixed)
    assert tokens(llm) == changed != want


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "k_proj.weight: missing"),
        (lambda t: t.update({"model.layers.9.x": np.ones(3, np.float32)}), "layers.9.x: no param"),
        (lambda t: t.update({"model.norm.weight": np.ones(3, np.float32)}), "norm.weight: shape"),
        (lambda t: t["model.norm.weight"].fill(np.nan), "norm.weight: has NaN"),
    ],
)
def test_tensors_that_do_not_fit_are_named(llm: LLM, odd_dir: Path, fault: Any, match: str) -> None:
    before = tokens(llm)
    tensors = {k: v.copy() for k, v in names_of(drawn(odd_dir, 8), odd_dir).items()}
    fault(tensors)
    with pytest.raises(WeightsError, match=match):
        llm.update_weights(tensors)
    assert tokens(llm) == before


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("running", ["recompute", "mix"])
def test_amid_a_stream(llm: LLM, odd_dir: Path, running: str) -> None:
    """A wrong leaf changes nothing; other weights do from the next token on, and after a recompute the text goes
    on as in an engine that is given the prompt and the tokens so far."""
    llm.update_weights(drawn(odd_dir, 9), version="old")
    (old,) = llm.generate(PROMPTS[0], GREEDY)
    wrong, new = drawn(odd_dir, 10), drawn(odd_dir, 10)
    wrong["final_norm"] = np.asarray(wrong["final_norm"])[:-1]
    job = llm._prompts.request(PROMPTS[0], GREEDY)  # as ``stream``, with ids
    engine = llm._engine
    engine.submit(job.request)
    llm._streams_in = threading.get_ident()
    while engine.busy:
        for out in engine.step():
            job.take(out)
        n = len(job.output.outputs[0].token_ids)
        if n == 3:
            with pytest.raises(WeightsError, match="final_norm"):
                llm.update_weights(wrong, running=running)
        if n == 5 and llm.state().version == "old":
            state = llm.update_weights(new, running=running, version="new")
            assert state.seconds > 0
    llm._streams_in = None
    (choice,) = job.output.outputs
    (first, second) = choice.weight_versions
    assert (first.version, first.start, second.version, second.end) == ("old", 0, "new", 12)
    assert first.end == second.start
    at = first.end
    assert choice.token_ids[:at] == old.outputs[0].token_ids[:at]
    rest = SamplingParams(temperature=0, max_tokens=12 - at, ignore_eos=True)
    prompt = [*job.request.prompt_ids, *choice.token_ids[:at]]
    llm._operate(action="reset_prefix_cache")
    (fresh,) = llm.generate({"prompt_token_ids": prompt}, rest)
    assert not fresh.num_cached_tokens
    goes_on = fresh.outputs[0].token_ids == choice.token_ids[at:]
    assert goes_on or running == "mix"


def amid(llm: LLM, update: Any, *, n: int = 3) -> tuple[Any, Any, list[int]]:
    """(a request that has drawn ``n`` tokens when ``update`` runs, one that comes right after it, tokens of the first
    whenever the second draws)."""
    first, second = (llm._prompts.request(prompt, GREEDY) for prompt in PROMPTS)
    engine, beside = llm._engine, []
    jobs = {job.request.id: job for job in (first, second)}
    engine.submit(first.request)
    llm._streams_in = threading.get_ident()
    while engine.busy:
        for out in engine.step():
            jobs[out.request_id].take(out)
            if out.request_id == second.request.id:
                beside.append(len(first.output.outputs[0].token_ids))
        if update is not None and len(first.output.outputs[0].token_ids) >= n:
            update()
            engine.submit(second.request)
            update = None
    llm._streams_in = None
    return first.output.outputs[0], second.output.outputs[0], beside


@pytest.mark.parametrize("alias", [False, True])
def test_two_versions_run_side_by_side(even: LLM, tiny_dir: Path, alias: bool) -> None:
    """Tokens of either are those of an engine that has one; nothing compiles, and the old copy is let go."""
    runner: Any = even._engine.runner
    want = []
    for seed in (20, 21):
        even.update_weights(drawn(tiny_dir, seed))
        want.append(tokens(even))
    even.update_weights(drawn(tiny_dir, 20), version="old")
    old = jax.tree.leaves(runner.params)
    new = placed(even, tiny_dir, 21)
    compiled = runner.programs.late_compiles  # by the drawing above
    states = []

    def update() -> None:
        states.append(even.update_weights(new, running="beside", version="new", alias=alias))
        assert not any(leaf.is_deleted() for leaf in old)
        with pytest.raises(BadRequest, match="1 sequences end under the weights 'old'"):
            even.update_weights(new)

    first, second, beside = amid(even, update)
    assert states[0].ending == 1
    assert [first.token_ids, second.token_ids] == [want[0][0], want[1][1]]
    assert [span.version for span in first.weight_versions] == ["old"]
    assert [span.version for span in second.weight_versions] == ["new"]
    assert beside[0] < 12, "the second begins before the first has ended"
    assert all(leaf.is_deleted() for leaf in old)
    assert (buffers(runner.params) == buffers(new)) == alias
    assert tokens(even) == want[1]
    assert even.state().ending == 0
    assert runner.programs.late_compiles == compiled


@pytest.mark.parametrize("running", ["finish", "abort"])
def test_running_requests_end_before_the_weights_change(
    even: LLM, tiny_dir: Path, running: str
) -> None:
    """``finish``: with all their tokens, of the old weights; ``abort``: with those that they had. What comes after is
    of the new ones alone."""
    want = []
    for seed in (22, 23):
        even.update_weights(drawn(tiny_dir, seed))
        want.append(tokens(even))
    even.update_weights(drawn(tiny_dir, 22), version="old")
    new, answers = drawn(tiny_dir, 23), []
    programs: Any = even._engine.runner.programs  # type: ignore[attr-defined]
    compiled = programs.late_compiles  # by the drawing above

    def update() -> None:
        fields = {"source": new, "running": running, "version": "new"}
        even._engine.ask(Control(id="u", action="update_weights", **fields))

    first, second, beside = amid(even, update)
    answers += even._engine.take_answers()
    assert [(a.id, a.error, a.info["version"]) for a in answers] == [("u", None, "new")]
    n = len(first.token_ids)
    assert first.token_ids == want[0][0][:n]
    assert (n == 12, first.finish_reason) == (
        (True, "length") if running == "finish" else (False, "abort")
    )
    assert second.token_ids == want[1][1], "it waits for the new weights"
    assert set(beside) == {n}
    assert [span.version for span in first.weight_versions] == ["old"]
    assert [span.version for span in second.weight_versions] == ["new"]
    assert tokens(even) == want[1]
    assert programs.late_compiles == compiled


def test_a_second_copy_needs_room(
    even: LLM, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    even.update_weights(drawn(tiny_dir, 20))
    want, new = tokens(even), drawn(tiny_dir, 21)
    full = DeviceMemory(total=2**20, taken=2**20 - 5, is_host=False)
    monkeypatch.setattr(DeviceMemory, "of", lambda device: full)

    def update() -> None:
        with pytest.raises(WeightsError, match=r"0\.00 are free: lower") as caught:
            even.update_weights(new, running="beside", donate=True)
        assert caught.value.field == "running"
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))

    first, second, _ = amid(even, update)
    assert [first.token_ids, second.token_ids] == want


@pytest.mark.usefixtures("nothing_compiles")
def test_sleep_gives_the_memory_back(llm: LLM) -> None:
    before = tokens(llm)
    runner: Any = llm._engine.runner
    llm.sleep()
    leaves = jax.tree.leaves((runner.params, runner.state))
    assert all(leaf.is_deleted() for leaf in leaves)
    with pytest.raises(RuntimeError, match="asleep"):
        llm.generate(PROMPTS[0], GREEDY)
    assert llm.wake(["weights"]).asleep == ("kv",)
    llm.wake()
    assert tokens(llm) == before


def test_donated_trees_are_deleted_and_pauses_are_errors_here(llm: LLM, odd_dir: Path) -> None:
    params, programs = drawn(odd_dir, 11), llm._engine.runner.programs  # type: ignore[attr-defined]
    compiled = programs.late_compiles  # by the drawing above
    llm.update_weights(params, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    tokens(llm)
    assert programs.late_compiles == compiled
    assert llm.pause("keep").paused
    with pytest.raises(RuntimeError, match="resume"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.resume()
    tokens(llm)


def test_min_tokens_decides_at_its_border(llm: LLM, odd_dir: Path) -> None:
    """A stop id as the token after ``min_tokens`` outputs ends the answer, and one before them is
    not drawn."""
    llm.update_weights(drawn(odd_dir, 0))
    (out,) = llm.generate(PROMPTS[0], GREEDY)
    plain = list(out.outputs[0].token_ids)
    at = next(i for i in range(3, len(plain)) if plain[i] not in plain[:i])

    def stopped(min_tokens: int) -> Any:
        params = SamplingParams(
            temperature=0,
            max_tokens=12,
            ignore_eos=True,
            stop_token_ids=(plain[at],),
            min_tokens=min_tokens,
        )
        return llm.generate(PROMPTS[0], params)[0].outputs[0]

    for min_tokens in (at - 1, at):
        assert stopped(min_tokens).finish_reason == "stop"
        assert list(stopped(min_tokens).token_ids)[:at] == plain[:at]
        assert len(stopped(min_tokens).token_ids) <= at + 1
    late = list(stopped(at + 1).token_ids)
    assert late[:at] == plain[:at]
    assert len(late) > at
    assert late[at] != plain[at]
