"""The Python interface: ``LLM`` (blocking, in process) and ``AsyncLLM``. Field names are vLLM's.

It owns the ways to run an engine from Python: in one go, piece by piece, on an event loop; cache handles; the
progress bar.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

from jserve import build
from jserve.config import EngineConfig
from jserve.engine.driven import DrivenEngine
from jserve.engine.wire import HandleCommand
from jserve.errors import BadRequest, ConfigError, error_of
from jserve.feed import Feed
from jserve.operations import EngineState, Operations, control_of
from jserve.outputs import PartialOutput, RequestOutput, failure_of
from jserve.progress import progress_bar
from jserve.prompts import Message, Prompt, Prompts, listed
from jserve.request_options import RequestOptions
from jserve.sampling import SamplingParams
from jserve.text.chat.speech import speech_of
from jserve.types import Finish, HandleInfo, Output

NOTHING_DRAWN = SamplingParams(temperature=0.0, max_tokens=0)


class _Door:
    """The common part of ``LLM`` and ``AsyncLLM``: options, tokenizer, the way from prompts to requests."""

    def __init__(
        self,
        model: str,
        config: EngineConfig | None,
        options: dict[str, Any],
        *,
        weights: bool = True,
    ) -> None:
        flat = {**(config.flat() if config else {}), **options}
        if model:
            flat["model"] = str(model)
        self.config = EngineConfig.of(**flat)
        text = build.text_side(self.config, weights=weights)
        self.model_name, self.tokenizer, self._defaults = text.name, text.tokenizer, text.defaults
        speech = speech_of(self.config.model, text.chat, text.tokenizer)
        self._prompts = Prompts(text.tokenizer, text.chat, text.eos_ids, speech)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (generation_config.json) over ours."""
        return SamplingParams(**self._defaults)


class LLM(_Door, Operations):
    """Offline generation in this process.

    Args:
        model: HF directory, Orbax directory or hub name; empty takes the shipped model.
        config: options as one value; ``options`` are flat option names and win over it.
        params: weights as a pytree (a live training program's, an ``nnx`` state); no files are read then
            but config.json and the tokenizer of ``model``. They are copied: while the caller keeps its
            arrays, the weights take twice the memory.
        mesh: a ``jax.sharding.Mesh`` with an axis "tp", or with any that option ``sharding`` (a ``Sharding``, or what
            it is made of) names; by default the first devices.

    Raises:
        ConfigError: an option, config.json key, tokenizer or weight cannot be honoured.
    """

    def __init__(
        self,
        model: str = "",
        *,
        config: EngineConfig | None = None,
        params: Any = None,
        mesh: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(model, config, options, weights=params is None)
        if self.config.fleet.replicas:
            raise ConfigError("LLM has one engine; AsyncLLM takes replicas", field="replicas")
        build.check_one_engine(self.config)
        self._lock = threading.Lock()
        self._closed = False
        self._streams_in: int | None = None
        """The thread with an open ``stream``, which has the engine to itself."""
        self._engine: DrivenEngine
        self._engine, self.info = build.engines(self.config, params=params, mesh=mesh)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the device memory. The object is unusable afterwards. Idempotent."""
        if not self._closed:
            self._closed = True
            build.close(self._engine)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        options: RequestOptions | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; outputs in the order of the prompts. There may be more of them
        than the queue holds: they are handed in as there is room.

        Args:
            prompts: text, token ids, dicts with "prompt" or "prompt_token_ids", or a list of these.
            sampling_params: one for all, or one per prompt.
            options: lane, deadlines, caches and the like, for all of them.
            use_tqdm: show a progress bar on stderr.

        Raises:
            BadRequest: a prompt or a sampling field is wrong for this model; nothing is generated then.
        """
        many = listed(prompts)
        params = self._params(sampling_params, len(many))
        with self._turn(works=True):
            jobs = [
                self._prompts.request(p, s, options=options)
                for p, s in zip(many, params, strict=True)
            ]
            self._run(jobs, use_tqdm)
        return [job.output for job in jobs]

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        options: RequestOptions | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one dialogue or many. Messages are those of a chat completion, and ``template`` may hold
        what ``prompts.DIALOGUE`` names; else as ``generate``.

        Raises:
            BadRequest: a message or a name that the model's chat template has no use for.
        """
        dialogues = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._prompts.dialogue(d, template) for d in dialogues]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, options=options, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text of one completion, piece by piece. The engine is busy with it until the iterator has
        ended; closing that cancels the request.

        Raises:
            BadRequest: as ``generate``. RuntimeError: another stream of this thread is open.
        """
        job = self._prompts.request(prompt, params or self.get_default_sampling_params())
        with self._turn(works=True):
            self._streams_in = threading.get_ident()
            self._engine.submit(job.request)
            sent = 0
            try:
                while not job.output.finished:
                    self._take(self._engine.step(), {job.request.id: job})
                    text = job.output.outputs[0].text
                    yield text[sent:]
                    sent = len(text)
            finally:
                self._streams_in = None
                self._cancel([job])

    def stream_chat(
        self, messages: Seq[Message], params: SamplingParams | None = None, **template: Any
    ) -> Iterator[str]:
        """``stream`` of a dialogue's next answer."""
        return self.stream(self._prompts.dialogue(messages, template), params)

    def create_cache(
        self,
        name: str,
        prompt: Prompt,
        *,
        ttl_s: float = 3600.0,
        options: RequestOptions | None = None,
    ) -> HandleInfo:
        """Compute ``prompt`` once and pin its KV as ``name`` for ``ttl_s`` seconds; requests use it by
        ``RequestOptions(cache=name)``.

        Raises:
            BadRequest: a name in use, a prompt shorter than a page, a TTL out of range.
            CacheFull: handles may pin no more pages.
        """
        job = self._prompts.request(
            prompt,
            NOTHING_DRAWN,
            options=replace(options or RequestOptions(), cache=name),
            drawn=False,
        )
        with self._turn(works=True):
            self._engine.create(job.request, ttl_s)
            for out in self._engine.drain():
                if out.request_id == job.request.id and out.finish is Finish.ERROR:
                    raise failure_of(out)
        return self.caches(name, tenant=job.request.tenant)[0]

    def caches(self, name: str | None = None, *, tenant: str = "") -> list[HandleInfo]:
        """The cache handles of ``tenant``, or the one called ``name``. Raises CacheNotFound."""
        return self._handle("find", tenant, name)

    def renew_cache(self, name: str, ttl_s: float, *, tenant: str = "") -> HandleInfo:
        """Let a cache handle live for ``ttl_s`` seconds from now. Raises CacheNotFound."""
        return self._handle("renew", tenant, name, ttl_s)[0]

    def drop_cache(self, name: str, *, tenant: str = "") -> HandleInfo:
        """Forget a cache handle; its pages are evicted when room is needed. Raises CacheNotFound."""
        return self._handle("drop", tenant, name)[0]

    def _handle(
        self, action: Any, tenant: str, name: str | None, ttl_s: float = 0.0
    ) -> list[HandleInfo]:
        asked = HandleCommand(
            id=self._prompts.new_id(), action=action, tenant=tenant, name=name, ttl_s=ttl_s
        )
        with self._turn():
            self._engine.ask(asked)
            self._engine.drain()
            (answer,) = self._engine.take_answers()
        if answer.error is not None:
            raise error_of(answer.error_code, answer.error, field=answer.error_field)
        return list(answer.handles)

    def _operate(self, **command: Any) -> EngineState:
        """Also between two pieces of a stream of this thread, which then goes on."""
        asked, streaming = control_of(command), self._streams_in == threading.get_ident()
        with contextlib.nullcontext() if streaming else self._turn():
            info = self._engine.carry_out(asked)
            if info is None and streaming:
                self._engine.give_up_pending()
                raise RuntimeError("the open stream would wait for its own end")
            if info is None:
                self._engine.drain()
                (answer,) = self._engine.take_answers()
                if answer.error is not None:
                    raise error_of(answer.error_code, answer.error, field=answer.error_field)
                info = answer.info
        return EngineState.of(info)

    @contextlib.contextmanager
    def _turn(self, *, works: bool = False) -> Iterator[None]:
        """The engine is this thread's alone inside; ``works``: it is to take requests.

        Raises:
            RuntimeError: it is closed; or a stream of this thread has it, or it is paused or asleep, so that to wait
            would be for ever.
        """
        if self._closed:
            raise RuntimeError("this LLM was closed")
        if self._streams_in == threading.get_ident():
            raise RuntimeError("a stream of this LLM is open: read it to its end or close it")
        with self._lock:
            if works and self._engine.closed:
                raise RuntimeError("this LLM is paused or asleep: call resume() or wake() first")
            yield

    def _params(
        self, given: SamplingParams | Seq[SamplingParams] | None, n: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * n
        if len(given) != n:
            raise BadRequest(
                f"{len(given)} sampling_params for {n} prompts", field="sampling_params"
            )
        return list(given)

    def _run(self, jobs: list[PartialOutput], progress: bool) -> None:
        left = {job.request.id: job for job in jobs}
        feed = Feed(self._engine, [job.request for job in jobs])
        try:
            with progress_bar("generating", len(jobs), shown=progress and len(jobs) > 1) as bar:
                while left:
                    feed.push()
                    for job in self._take(feed.sift(self._engine.step()), left):
                        del left[job.request.id]
                    bar(len(jobs) - len(left))
        finally:
            self._cancel(jobs)

    def _take(
        self, outputs: Iterable[Output], jobs: Mapping[str, PartialOutput]
    ) -> list[PartialOutput]:
        """Collect ``outputs``; the jobs that they finished."""
        done = []
        for out in outputs:
            job = jobs.get(out.request_id)
            if job is None or job.output.finished:
                continue
            if job.take(out) is not None:
                self._engine.cancel(out.request_id, out.index)
            if job.output.finished:
                done.append(job)
        return done

    def _cancel(self, jobs: Iterable[PartialOutput]) -> None:
        """End what is unfinished (an error, ctrl-c, a closed iterator) and run the engine dry."""
        for job in jobs:
            if not job.output.finished:
                self._engine.cancel(job.request.id)
        self._engine.drain()


class AsyncLLM(_Door, Operations):
    """The same for asyncio: one engine thread, or ``replicas=N`` on Ray Serve; many concurrent ``generate`` calls.

    Args:
        params: as of ``LLM``; kept until ``start`` has copied them. Not for replicas, as ``mesh``.

    Raises:
        ConfigError: as ``LLM``; or replicas without Ray Serve, which the extra ``jserve[ray]`` installs.
    """

    def __init__(
        self,
        model: str = "",
        *,
        config: EngineConfig | None = None,
        params: Any = None,
        mesh: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(model, config, options, weights=params is None)
        self.engine = build.serving_engine(
            self.config, in_process=True, params=params, mesh=mesh, max_restarts=0
        )

    async def start(self) -> dict[str, Any]:
        """Load and compile. Returns facts about model, device and memory."""
        return await self.engine.start()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.engine.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the request's output so far after every step; closing the generator cancels it."""
        params = sampling_params or self.get_default_sampling_params()
        job = self._prompts.request(prompt, params, id=request_id, options=options)
        stream = self.engine.generate(job.request)
        try:
            async for out in stream:
                if job.take(out) is not None:
                    self.engine.abort(job.request.id, out.index)
                yield job.output
                if job.output.finished:
                    break
        finally:
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    async def _operate(self, **command: Any) -> EngineState:
        return EngineState.of(await self.engine.control(control_of(command)))
