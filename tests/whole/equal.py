"""Randomised workloads for the real engine, and the plainest way to run the same requests: one by one.

A workload is requests with arrival steps plus one way of running them (overlap, budget, chunk, pool size,
prefix cache, drafts, buckets). Its outputs must equal those of each request alone, with nothing clever on.
One ``ModelRunner`` serves all workloads: a tighter pool is only a smaller number told to the scheduler.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.fleet.data_parallel import DataParallelEngine
from jserve.model.families import family_for
from jserve.model.features import SCORE
from jserve.model.mesh import make_mesh, mesh_of
from jserve.model.rope import for_requests
from jserve.model.shard import ShardRules, padded, shardings
from jserve.model.view import Bucket
from jserve.ports import InFlight, Proposer, StepTime
from jserve.runner.buckets import Ladder, Needs
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.sched import policy
from jserve.sched.scheduler import Scheduler
from jserve.sharding import Sharding
from jserve.testing import FakeProposer
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import Output, Request, Sequence, StepPlan
from jserve.weights.loader import load
from jserve.weights.place import tp_size
from jserve.weights.source import Source
from tests import programs
from tests.model.assembly import assemble_all

V = 96
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "n_pages": 400,
    "max_model_len": 160,
    "max_drafts": 3,
    "compile_cache": "",
}
BUCKETS = (
    Bucket(D=2, P=0, F=0, J=1),
    Bucket(D=8, P=0, F=0, J=4),
    Bucket(D=2, P=16, F=4, J=1),
    Bucket(D=8, P=64, F=8, J=4),
    Bucket(D=8, P=64, F=8, J=4, features=(SCORE,)),
)
LARGEST = (Bucket(D=8, P=64, F=8, J=4, features=(SCORE,)),)
"""One that fits all steps: it compiles in a fifth of the time."""


Weights = Callable[[Mapping[str, Any], Any, ShardRules], tuple[Any, Any, Any]]
"""(config, mesh, rules) -> (family, arch, its parameters)."""


def drawn(stated: Mapping[str, Any], mesh: Any, rules: ShardRules) -> tuple[Any, Any, Any]:
    """Random weights in float32. The last norm turns every other sign, or the embedding, which is tied, would make each
    token its own successor with a probability near 1."""
    family = family_for(stated)
    source = Source(
        name="tiny", directory=None, format="dummy", weights=None, config=stated, generation={}
    )  # type: ignore[arg-type]
    arch, dtype = family.arch(stated), jnp.dtype("float32")
    params = load(family, arch, source, mesh, rules, dtype, seed=3)
    signs_D = jnp.where(jnp.arange(arch.D) % 2, -10.0, 10.0)
    scaled = {"embed": params["embed"] * 3, "final_norm": params["final_norm"] * signs_D}
    return family, arch, {**params, **scaled}


def make_runner(
    tp: int = 1,
    speculation: Callable[..., Any] | None = None,
    buckets: Seq[Bucket] = BUCKETS,
    sharding: Any = None,
    mesh: Any = None,
    model: Mapping[str, Any] = MappingProxyType({}),
    weights: Weights | None = None,
    **options: Any,
) -> ModelRunner:
    """The tiny model with drawn weights, over ``tp`` devices or as ``sharding`` says; drafted for by what
    ``speculation`` makes of its arch, its parameters and the mesh.

    Args:
        mesh: of other devices than the first ones.
        model: other values in its config.
        weights: others than those of ``drawn``; ``tests.whole.quantised`` has quantised ones.
    """
    stated = {**TINY, **model}
    asked = Sharding.of(sharding or f"tp={tp}")
    mesh = mesh_of(asked) if mesh is None else mesh
    rules = ShardRules.of_sharding(asked, mesh.shape)
    family, arch, params = (weights or drawn)(stated, mesh, rules)
    ladder = Ladder(buckets=tuple(buckets))
    drafts = None if speculation is None else speculation(arch, params, mesh)
    config = EngineConfig.of(**OPTIONS | options)
    return ModelRunner(
        family,
        arch,
        params,
        mesh,
        config,
        rules=rules,
        ladder=ladder,
        speculation=drafts,
        files=programs.kept(),
    )


def runner_of(
    architecture: str,
    config: dict[str, Any],
    speculation: Callable[..., Any] | None = None,
    buckets: Seq[Bucket] = BUCKETS,
    tp: int = 1,
    ep: int = 1,
    **options: Any,
) -> ModelRunner:
    """As ``make_runner``, of transformers' tiny model of an architecture: norms, biases and sinks are drawn too.

    Args:
        ep: groups of ``tp`` devices that have different experts.
    """
    from tests.model import hf  # skips where torch is absent

    size = {"vocab_size": V, "max_position_embeddings": 256}
    model, config = hf.tiny(architecture, **size | config)
    family, mesh = family_for(config), make_mesh(tp, ep=ep)
    arch = for_requests(family.arch(config), OPTIONS["max_model_len"])
    rules = ShardRules.of_mesh(mesh.shape, options.get("num_redundant_experts", 0))
    specs = padded(family.specs(arch, tp_size(mesh, rules)), rules, mesh.shape)
    params = assemble_all(specs, hf.weights(model), jnp.dtype("float32"))
    params = jax.device_put(params, shardings(specs, mesh, rules))
    return ModelRunner(
        family,
        arch,
        params,
        mesh,
        EngineConfig.of(**OPTIONS | options),
        rules=rules,
        ladder=Ladder(buckets=tuple(buckets)),
        speculation=None if speculation is None else speculation(arch, params, mesh),
        files=programs.kept(),
    )


class RandomBuckets:
    """Runs each plan in any bucket that takes it, not the cheapest."""

    def __init__(self, runner: ModelRunner, rng: random.Random) -> None:
        self.runner, self.rng = runner, rng
        self.limits = runner.limits

    def launch(self, plan: StepPlan) -> InFlight:
        fitting = [b for b in BUCKETS if Needs.of(plan).fit(b)]
        return self.runner.launch(plan, self.rng.choice(fitting))

    def is_done(self, flight: InFlight) -> bool:
        return self.runner.is_done(flight)

    def collect(self, flight: InFlight) -> Any:
        return self.runner.collect(flight)


class Guesses(FakeProposer):
    """Drafts that are right, wrong or mixed: the known continuation with some tokens changed."""

    def __init__(self, truth: dict[tuple[str, int], list[int]], rng: random.Random) -> None:
        self.truth, self.rng = truth, rng

    def propose(self, seq: Sequence, most: int) -> list[int]:
        told = self.truth[seq.request.id, seq.index]
        at = seq.n_output + seq.in_flight
        right = told[at : at + self.rng.randint(0, most)]
        return [t if self.rng.random() < 0.7 else self.rng.randrange(V) for t in right]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a workload is run."""

    overlap: int
    budget: int
    chunk: int
    n_pages: int
    prefix_caching: bool
    drafts: bool
    random_buckets: bool
    n_vocab_rows: int = 8

    @classmethod
    def draw(cls, rng: random.Random) -> Way:
        return cls(
            overlap=rng.choice((0, 1, 1, 2)),
            budget=rng.choice((8, 13, 32, 64)),
            chunk=rng.choice((0, 1, 7, 8, 9, 31)),
            n_pages=rng.choice((26, 40, 400)),
            prefix_caching=rng.random() < 0.7,
            drafts=rng.random() < 0.4,
            random_buckets=rng.random() < 0.5,
            n_vocab_rows=rng.choice((1, 2, 8)),
        )


PLAIN = Way(
    overlap=0,
    budget=64,
    chunk=0,
    n_pages=400,
    prefix_caching=False,
    drafts=False,
    random_buckets=False,
)


def draw_params(rng: random.Random) -> SamplingParams:
    """Any combination of sampling fields."""
    extras: dict[str, Any] = {}
    if rng.random() < 0.3:
        extras |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    if rng.random() < 0.3:
        extras["logit_bias"] = {rng.randrange(V): rng.choice((-100.0, 3.0)) for _ in range(4)}
    if rng.random() < 0.15:
        extras["allowed_token_ids"] = tuple(rng.sample(range(V), 20))
    if rng.random() < 0.2:
        extras["bad_token_ids"] = tuple(
            tuple(rng.randrange(V) for _ in range(rng.randint(1, 2))) for _ in range(5)
        )
    if rng.random() < 0.4:
        extras["stop_token_ids"] = tuple(rng.sample(range(V), 6))
        extras["min_tokens"] = rng.choice((0, 5))
    return SamplingParams(
        n=rng.choice((1, 1, 1, 3)),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 0, 5)),
        top_p=rng.choice((1.0, 0.8)),
        min_p=rng.choice((0.0, 0.1)),
        seed=rng.choice((None, 0, -5, 2**62)),
        max_tokens=rng.randint(5, 40),
        logprobs=rng.choice((None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, None, 2)),
        **extras,
    )


def draw_requests(rng: random.Random, tag: str) -> list[Request]:
    """Prompts of 1 to 90 tokens over a few shared prefixes."""
    stems = [[rng.randrange(V) for _ in range(rng.choice((8, 16, 33)))] for _ in range(2)]
    found = []
    for i in range(rng.randint(3, 9)):
        stem = rng.choice((*stems, []))
        tail = [rng.randrange(V) for _ in range(rng.choice((1, 2, 7, 8, 9, 25, 55)))]
        params = draw_params(rng)
        found.append(Request(id=f"{tag}-{i}", prompt_ids=tuple(stem + tail), params=params))
    return found


Answer = tuple[list[int], str, list[float] | None, Any]
"""Tokens, finish reason, log-probabilities, prompt log-probabilities."""
Between = Callable[[Scheduler], None]


def run(
    runner: ModelRunner | Seq[ModelRunner],
    requests: list[Request],
    way: Way,
    rng: random.Random,
    truth: dict[tuple[str, int], list[int]] | None = None,
    proposer: Proposer | None = None,
    preempts: bool = False,
    between: Between | None = None,
) -> dict[tuple[str, int], Answer]:
    """Run all requests, arriving at random steps, and gather what each choice got; as ``outputs_of``."""
    return gathered(outputs_of(runner, requests, way, rng, truth, proposer, preempts, between))


@lru_cache
def _known(runner: ModelRunner) -> dict[str, dict[tuple[str, int], Answer]]:
    """What each request got on its own, by its id."""
    return {}


def alone(runner: ModelRunner, requests: Seq[Request]) -> dict[tuple[str, int], Answer]:
    """Every request on its own, with nothing clever on; as ``outputs_of``. Ids tell requests apart."""
    known = _known(runner)
    for request in requests:
        if request.id not in known:
            known[request.id] = run(runner, [request], PLAIN, random.Random(0))
    return {key: answer for request in requests for key, answer in known[request.id].items()}


def outputs_of(
    runner: ModelRunner | Seq[ModelRunner],
    requests: list[Request],
    way: Way,
    rng: random.Random,
    truth: dict[tuple[str, int], list[int]] | None = None,
    proposer: Proposer | None = None,
    preempts: bool = False,
    between: Between | None = None,
) -> list[Output]:
    """What the engine said, in order; of several runners, what an engine of groups of devices did.

    ``proposer`` drafts in every row it can, whatever that is worth; ``preempts``: after each step
    someone loses its pages; ``between`` is called after each step.
    """
    config = EngineConfig.of(
        **OPTIONS
        | {
            "max_num_batched_tokens": way.budget,
            "max_prefill_chunk": way.chunk,
            "prefix_caching": way.prefix_caching,
            "overlap": way.overlap,
        }
    )
    if proposer is None and way.drafts:
        proposer = Guesses(truth or {}, rng)

    def engine_of(runner: ModelRunner) -> Engine:
        sizes = {"n_pages": way.n_pages, "n_vocab_rows": way.n_vocab_rows}
        limits = dataclasses.replace(runner.limits, **sizes)
        scheduler = Scheduler(limits, config, proposer=proposer)
        drafting = scheduler.speculation
        drafting.costs, drafting.min_speed = FREE, 0.0
        device: Any = RandomBuckets(runner, rng) if way.random_buckets else runner
        return Engine(scheduler, device, overlap=way.overlap)

    engines = [engine_of(each) for each in (runner if isinstance(runner, Seq) else [runner])]
    engine = engines[0] if len(engines) == 1 else DataParallelEngine(engines)
    waiting, outputs = list(requests), []
    for _ in range(4000):
        while waiting and (rng.random() < 0.4 or not engine.busy):
            engine.submit(waiting.pop(0))
        outputs += engine.step()
        for each in engines:
            if preempts:
                _preempt(each.scheduler, rng)
            if between is not None:
                between(each.scheduler)
        if not waiting and not engine.busy:
            break
    assert not engine.busy, "the workload did not end"
    return outputs


FREE = MeasuredCosts([StepTime(n_decode=8, n_prefill=64, n_context=0, seconds=1e-3, width=4)])
"""All programs cost the same, so drafts are always worth a try."""


def _preempt(scheduler: Scheduler, rng: random.Random) -> None:
    able = [seq for seq in scheduler.resources.running if not policy.protected(seq)]
    if able:
        scheduler.resources.preempt(rng.choice(able))


def gathered(outputs: Seq[Output]) -> dict[tuple[str, int], Answer]:
    found: dict[tuple[str, int], list[Output]] = {}
    for out in outputs:
        found.setdefault((out.request_id, out.index), []).append(out)
    return {key: _answer(parts) for key, parts in found.items()}


def _answer(parts: list[Output]) -> Answer:
    tokens = [t for part in parts for t in part.token_ids]
    ends = [str(part.finish) + str(part.error or "") for part in parts if part.finish is not None]
    assert len(ends) == 1, "exactly one end"
    logprobs = [t.logprob for part in parts for t in part.logprobs or ()]
    prompt = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
    scores = (
        [None if t is None else (t.token, round(t.logprob, 3)) for t in prompt[0]]
        if prompt
        else None
    )
    return tokens, ends[0], logprobs, scores
