"""All options of jserve: CLI flags, YAML keys, ``JSERVE_*`` variables and Python arguments derive from here.

Options have flat names. Those of section ``speculative`` are dotted (``speculative.method``) and may also
come together, as a mapping or as JSON text under ``speculative``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from jserve.errors import ConfigError
from jserve.kv_layout import KV_FORMS
from jserve.option_names import dotted, flat_name, hint
from jserve.options import checked, opt
from jserve.sampling import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, MAX_PROMPT_LOGPROBS

DEVICE_SHARE = 0.95
"""Of an accelerator's memory: what this process takes (``xla`` tells XLA, whose own choice is three
quarters)."""
SCRATCH_SHARE = 0.05
"""Of what it took: kept for the scratch of the steps."""

USUAL_VOCAB_ROWS = 64
"""Sequences that can have penalties or biases at once, where the model's own defaults have none."""


@dataclass(frozen=True, slots=True)
class ByDevice:
    """The values of an option that the user leaves to the device."""

    cpu: int
    other: int

    def on(self, platform: str) -> int:
        return self.cpu if platform == "cpu" else self.other


BY_DEVICE = {
    "page_size": ByDevice(32, 64),
    "max_num_seqs": ByDevice(32, 256),
    "max_num_batched_tokens": ByDevice(512, 2048),
}
"""A GPU reads a page of 64 tokens and head by one bulk copy, where smaller ones take several, and weights for 256
rows as fast as for 32; on two cores every further row costs as much as the first."""

FLOATS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}
"""Other spellings of floating-point types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    model: str = opt(
        "", "HF or Orbax directory, GGUF file or hub name; empty serves the shipped model"
    )
    served_model_name: tuple[str, ...] = opt(
        (), "names in the API, the first one in answers; none takes the last part of the path"
    )
    tokenizer: str = opt("", "directory with tokenizer.json; empty takes the model's")
    revision: str = opt("", "hub revision")
    plugins: tuple[str, ...] = opt(
        (), "Python files or modules to run first, which register families and step features"
    )
    load_format: str = opt(
        "auto", "where weights come from", choices=("auto", "safetensors", "orbax", "dummy")
    )
    scan_nan: str = opt(
        "sample",
        "weights looked at for values that are not finite",
        choices=("off", "sample", "full"),
    )
    dtype: str = opt(
        "auto",
        "weights and activations",
        choices=("auto", "bfloat16", "float32", "float16"),
        aliases=FLOATS,
    )
    quantization: str = opt(
        "auto",
        "of weights: a form made on load; auto, or a format: the checkpoint's; none: widened",
        choices=(
            *("auto", "none", "fp8", "int8", "int8-weight-only", "int4"),
            *("auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "gguf"),
            *("gptq", "modelopt", "mxfp4"),
        ),
        aliases={
            **dict.fromkeys(("fp8_per_channel", "ptpc_fp8", "w8a8_fp8"), "fp8"),
            "w8a8_int8": "int8",
            "awq_marlin": "awq",
            "gptq_marlin": "gptq",
        },
    )
    quantization_config: str = opt(
        "", "of quantization: JSON object with ignore, group_size, method", json=dict
    )
    max_model_len: int = opt(0, "tokens of context; 0 takes the model's", min=0)
    seed: int = opt(0, "seed of dummy weights and of requests without one", min=0)
    chat_template: str = opt("", "file with a jinja2 chat template; empty takes the model's")
    tool_call_parser: str = opt(
        "auto",
        "how the model writes tool calls; 'auto' asks its chat template",
        choices=(
            *("auto", "none", "hermes", "llama3", "mistral", "deepseek_v3", "deepseek_v31"),
            *(
                "phi4_mini_json",
                "glm4",
                "cohere_command",
                "pythonic",
                "llama4_pythonic",
                "gemma3",
                "openai",
            ),
        ),
        aliases={
            "llama3_json": "llama3",
            "qwen25": "hermes",
            "qwen": "hermes",
            "llama4_json": "llama4_pythonic",
            "gpt-oss": "openai",
            "exaone4": "hermes",
        },
    )
    reasoning_parser: str = opt(
        "auto",
        "how the model writes thoughts; 'auto' asks its vocabulary",
        choices=(
            *("auto", "none", "think", "mistral", "exaone_deep", "cohere_command", "openai_gptoss"),
        ),
        aliases={
            **dict.fromkeys(("qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1"), "think"),
            "gpt-oss": "openai_gptoss",
            "exaone4": "think",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    page_size: int = opt(
        0, "tokens per KV page; 0: 32 on a CPU, else 64", choices=(0, 8, 16, 32, 64, 128)
    )
    n_pages: int = opt(0, "pages in the pool; 0 sizes it from memory", min=0)
    memory_utilization: float = opt(
        0.9, "share of device memory for weights and KV", min=0.05, max=0.98
    )
    kv_memory_gb: float = opt(0.0, "GiB for the KV pool; 0 sizes it from memory", min=0.0)
    kv_cache_dtype: str = opt(
        "auto",
        "KV storage; auto is the dtype of the activations",
        choices=("auto", "bfloat16", "float16", "float32", "fp8_e4m3", *KV_FORMS),
        aliases=FLOATS | {"fp8": "fp8_e4m3"},
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = opt(
        (),
        "layers whose KV stays in the dtype of the activations: numbers from 0, and sliding_window",
    )
    kv_cache_rotate: bool = opt(
        False,
        "turn queries and keys by a Hadamard matrix; with *_per_token_head",
    )
    kv_groups: str = opt(
        "auto",
        "pages of layers that look back alike, so that windows keep no more: if they can, on, off",
        choices=("auto", "on", "off"),
    )
    prefix_caching: bool = opt(True, "reuse the KV of shared prefixes")
    host_memory_gb: float = opt(
        0.0, "GiB of host memory for evicted KV pages; 0 is none", min=0.0, max=65536.0
    )
    disk_dir: str = opt(
        "", "directory for KV pages that outlive the server; needs host_memory_gb; empty is none"
    )
    disk_gb: float = opt(10.0, "GiB of files in disk_dir", min=0.001, max=1048576.0)
    kv_transfer_address: str = opt(
        "", "HOST:PORT where other engines get KV pages of disk_dir, port 0: any; empty: nowhere"
    )
    kv_transfer_key: str = opt("", "secret of the engines that get KV pages of each other")
    kv_events: str = opt(
        "", "ZeroMQ address where KV events in vLLM's format are published; empty: nowhere"
    )
    kv_events_replay: str = opt("", "ZeroMQ address where those who missed some ask for them")
    kv_events_topic: str = opt("", "topic of KV events; llm-d reads kv@POD@MODEL")
    handle_pages: int = opt(
        0, "KV pages that named cache handles may pin; 0 is half of the pool", min=0
    )
    session_ttl_s: float = opt(
        300.0, "seconds that the KV of a session is kept for its next turn", min=0.0, max=604800.0
    )

    def on(self, platform: str) -> CacheOptions:
        """With a page size where 0 leaves it to the device."""
        return dataclasses.replace(
            self, page_size=self.page_size or BY_DEVICE["page_size"].on(platform)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    max_num_seqs: int = opt(
        0, "sequences running at once; 0: 32 on a CPU, else 256", min=0, max=4096
    )
    max_penalized_seqs: int = opt(
        -1,
        "of these, with penalties or biases; 0: refused; -1: 64, or all if the model penalises",
        min=-1,
        max=4096,
    )
    max_num_batched_tokens: int = opt(
        0, "tokens of one step, decode and prefill together; 0: 512 on a CPU, else 2048", min=0
    )
    max_prefill_chunk: int = opt(
        0, "prefill tokens of one request in one step; 0 is the whole budget", min=0
    )
    max_prefill_tokens: int = opt(
        0, "prefill tokens of one step, all requests together; 0 is what the device takes", min=0
    )
    itl_bound_ms: float = opt(
        0.0,
        "longest step in ms while sequences decode, kept by smaller prefills; 0 is off",
        min=0.0,
    )
    preemption: str = opt(
        "auto",
        "KV of preempted sequences: recomputed, swapped (host_memory_gb), or whichever is faster",
        choices=("auto", "recompute", "swap"),
    )
    step_times: str = opt(
        "", "file of `jserve bench steps` for this engine; empty takes the times of the warm-up"
    )
    overlap: int = opt(1, "steps planned ahead of the device", min=0, max=2)
    max_waiting: int = opt(
        4096,
        "sequences in the queue before new ones are refused (lane interactive: an eighth more)",
        min=1,
    )
    max_waiting_tokens: int = opt(
        1 << 24, "prompt tokens in the queue before new requests are refused; 0 is no bound", min=0
    )
    max_queue_s: float = opt(
        0.0, "seconds of work in the queue before new requests are refused; 0 is no bound", min=0.0
    )
    tenant_share: float = opt(
        0.5, "share of the queue that one API key may fill before it gets 429", min=0.01, max=1.0
    )
    ageing_s: float = opt(
        30.0, "seconds after which a waiting request also takes its turn by arrival", min=0.0
    )
    weight_interactive: int = opt(16, "share of lane interactive while others wait", min=1)
    weight_standard: int = opt(4, "share of lane standard while others wait", min=1)
    weight_bulk: int = opt(1, "share of lane bulk while others wait", min=1)
    max_tokens_interactive: int = opt(0, "most max_tokens in lane interactive; 0 is no cap", min=0)
    max_tokens_standard: int = opt(0, "most max_tokens in lane standard; 0 is no cap", min=0)
    max_tokens_bulk: int = opt(0, "most max_tokens in lane bulk; 0 is no cap", min=0)
    journal: str = opt("", "file for every input of the scheduler, prompts included; empty is off")

    def on(self, platform: str) -> SchedulerOptions:
        """With numbers where 0 leaves them to the device."""
        names = ("max_num_seqs", "max_num_batched_tokens")
        chosen = {n: getattr(self, n) or BY_DEVICE[n].on(platform) for n in names}
        return dataclasses.replace(self, **chosen)

    def n_vocab_rows(self, *, penalises: bool) -> int:
        """Sequences that can have penalties or biases at once, of options that are ``on`` a platform.

        Args:
            penalises: whether requests that say nothing have a penalty, so that usually all have one.
        """
        if self.max_penalized_seqs >= 0:
            return min(self.max_num_seqs, self.max_penalized_seqs)
        return self.max_num_seqs if penalises else min(self.max_num_seqs, USUAL_VOCAB_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    tensor_parallel_size: int = opt(1, "devices the model is sharded over", min=1, max=256)
    expert_parallel_size: int = opt(
        1,
        "times so many devices: each has whole experts of its own, and a share of everything else",
        min=1,
        max=256,
    )
    num_redundant_experts: int = opt(
        0, "slots for copies of busy experts, in each layer, all devices together", min=0, max=1024
    )
    enable_eplb: bool = opt(
        False, "move experts between devices while requests run, so that their loads stay even"
    )
    eplb_step_interval: int = opt(3000, "steps between two such rearrangements", min=1)
    expert_load_metrics: bool = opt(False, "count the tokens of experts, for /metrics")
    sharding: str = opt(
        "",
        "mesh and rules: a YAML or JSON file, a JSON object, or sizes as tp=4",
        json=dict,
    )
    attention_backend: str = opt(
        "auto",
        "attention implementation",
        choices=(
            "auto",
            "ref",
            "xla",
            "native",
            "dense",
            "dense_experts",
            "hopper",
            "hopper_fused",
        ),
    )
    kernels: str = opt(
        "auto",
        "who multiplies: XLA, native kernels (CPU), hopper's (quantised weights) or the best",
        choices=("auto", "xla", "native", "hopper"),
    )
    cuda_graphs: str = opt(
        "step",
        "what runs as CUDA graphs on a GPU: the whole step, the parts XLA picks, or nothing",
        choices=("step", "xla", "off"),
    )
    attention_sinks: int = opt(
        0,
        "first tokens that stay visible beside the window of a windowed model (StreamingLLM)",
        min=0,
        max=1024,
    )
    max_drafts: int = opt(
        0,
        "draft tokens verified per row and step; 0 takes what speculative asks for",
        min=0,
        max=15,
    )
    prompt_logprobs: bool = opt(True, "compile the program that scores prompt tokens")
    max_prompt_logprobs: int = opt(
        MAX_LOGPROBS,
        "most likely tokens beside each prompt token at most, of requests by Python",
        min=1,
        max=MAX_PROMPT_LOGPROBS,
    )
    logprobs_mode: str = opt(
        "raw_logprobs",
        "log-probabilities of the model's own logits, or of what is drawn from",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    max_logprob_token_ids: int = opt(
        MAX_LOGPROB_TOKEN_IDS,
        "most ids in logprob_token_ids; 0 refuses it and ranks beyond the top 20",
        min=0,
        max=1024,
    )
    structured_outputs: bool = opt(True, "compile the programs that apply grammar masks")
    compile_cache: str = opt(
        "auto", "directory of compiled programs; 'auto' is the user cache, '' is off"
    )
    profile_dir: str = opt(
        "", "directory for profiles started on the admin port; empty allows none"
    )
    compile_threads: int = opt(0, "programs compiled at once; 0 is one per core", min=0)
    watchdog_s: float = opt(
        900.0,
        "seconds without progress of a start or a step before the engine process ends; 0 is never",
        min=0.0,
    )

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Devices along each axis of the mesh."""
        shape = {"ep": self.expert_parallel_size} if self.expert_parallel_size > 1 else {}
        return shape | {"tp": self.tensor_parallel_size}

    @property
    def tracks_experts(self) -> bool:
        """True if the device state has the places of experts and the tokens of each."""
        counts = self.enable_eplb or self.expert_load_metrics
        return counts or self.num_redundant_experts > 0

    @property
    def n_devices(self) -> int:
        return self.tensor_parallel_size * self.expert_parallel_size


DEFAULT_DRAFTS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    """Speculative decoding. Names are those of vLLM's ``speculative_config`` where it has them."""

    method: str = opt(
        "off",
        "who drafts",
        choices=("off", "ngram", "suffix", "draft", "eagle3", "medusa", "synthetic"),
    )
    model: str = opt("", "directory of the draft model or head")
    tensor_parallel_size: int = opt(
        0,
        "devices that split the drafter: 1 (none) or the model's; 0: the latter if it can be",
        min=0,
        max=256,
    )
    num_tokens: int = opt(
        0, "drafts per row and step at most; 0: 7, or one per Medusa head", min=0, max=15
    )
    max_rows: int = opt(
        0,
        "rows of a step beside which the device drafts at most; 0: 8 on a CPU, else 32",
        min=0,
        max=4096,
    )
    tree: str = opt(
        "",
        "drafts of the device as a tree: auto, [branches per depth] or [[path], ...]",
        json=(list, tuple),
    )
    tree_chances: str = opt(
        "",
        "tree auto: measured acceptance of drafts of rank 1, 2 ...: [0.6, 0.15, 0.07]",
        json=(list, tuple),
    )
    prompt_lookup_min: int = opt(2, "ngram: tokens that must match at least", min=1, max=16)
    prompt_lookup_max: int = opt(4, "ngram: tokens that are matched at most", min=1, max=16)
    suffix_min_match: int = opt(2, "suffix: tokens that must match at least", min=1, max=64)
    corpus: str = opt("", "suffix: UTF-8 text file that all requests may copy from")
    max_lookup_tokens: int = opt(
        16384, "newest tokens of a request that ngram and suffix search", min=64, max=1 << 20
    )
    synthetic_acceptance_rate: float = opt(
        0.7,
        "synthetic: chance that a draft is accepted; outputs are not the model's",
        min=0.0,
        max=1.0,
    )
    min_speed: float = opt(
        0.9, "least share of its speed that a row keeps when others draft", min=0.0, max=1.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = opt("127.0.0.1", "address to listen on")
    port: int = opt(8000, "port to listen on; 0 takes a free one", min=0, max=65535)
    api_key: tuple[str, ...] = opt((), "key that /v1 requires (repeatable)")
    api_keys_file: str = opt(
        "", "YAML file of tenants: digests of their keys and their limits; empty is none"
    )
    allowed_origins: tuple[str, ...] = opt(
        (), "origin whose pages may call the API from a browser; * is any (repeatable)"
    )
    quality_gate: str = opt(
        "",
        "report of jserve quality --gate --report: serve only if it is of this model and holds",
    )
    reasoning_field: str = opt(
        "both",
        "name of a thought in a chat completion",
        choices=("both", "reasoning", "reasoning_content"),
    )
    allow_taps: bool = opt(False, "give requests the values of taps that plugins register")
    strict_params: bool = opt(False, "refuse request fields that would have no effect")
    enable_admin: bool = opt(False, "listen on admin_port for commands of an operator")
    admin_host: str = opt("127.0.0.1", "address of the admin port")
    admin_port: int = opt(
        8001, "port of abort, reset and profile; 0 takes a free one", min=0, max=65535
    )
    public_metrics: bool = opt(
        True,
        "serve /metrics on the public port too, to whoever has a key; admin_port always has it",
    )
    max_body_mb: float = opt(8.0, "MiB of one request body", min=0.001, max=1024)
    keep_alive_s: float = opt(
        15.0, "seconds between SSE comments while a stream is idle; 0 is off", min=0
    )
    drain_timeout_s: float = opt(30.0, "seconds running requests get after SIGTERM", min=0)
    drain_delay_s: float = opt(
        0.0, "seconds the port stays open after SIGTERM at least, for a router to notice", min=0
    )
    max_restarts: int = opt(3, "engine restarts before the server gives up", min=0)
    stall_timeout_s: float = opt(
        120.0, "seconds without a step, with work waiting, before /health fails", min=1
    )
    ready_step_s: float = opt(
        30.0, "seconds without a step, with work waiting, before /ready fails; 0 is never", min=0
    )
    ready_failed_steps: int = opt(
        5, "steps that failed in a row before /ready fails; 0 is never", min=0
    )
    ready_nonfinite_share: float = opt(
        0.1,
        "share of a minute's sequences with NaN logits before /ready fails; 0 is never",
        min=0.0,
        max=1.0,
    )
    ready_slowness: float = opt(
        5.0,
        "times their usual time that steps take, for a minute, before /ready fails; 0 is never",
        min=0.0,
    )
    ui: bool = opt(True, "serve the page at / and /dashboard")
    in_process: bool = opt(False, "run the engine in a thread of the HTTP process")
    log_level: str = opt(
        "info", "log level on stderr", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Several replicas behind one server, on Ray Serve (the extra ``ray``)."""

    replicas: int = opt(
        0, "engines behind this server, on Ray Serve; 0: one engine, without Ray", min=0, max=256
    )
    max_replicas: int = opt(
        0,
        "most replicas, which are started and stopped by the load; 0: as many as --replicas",
        min=0,
        max=256,
    )
    ray_address: str = opt(
        "", "address of a Ray cluster, or auto; empty starts Ray on this machine"
    )
    ray_application: str = opt(
        "",
        "Serve application whose replicas are used, as of jserve kubernetes; empty deploys one",
    )
    router: str = opt(
        "seconds",
        "who gets a request: least price, least tokens times rows, emptier of two, in turn, any",
        choices=("seconds", "lmetric", "p2c", "round_robin", "random"),
    )
    hedge_share: float = opt(
        0.0,
        "of interactive requests, those that a second replica may get if their first token is late",
        min=0.0,
        max=1.0,
    )
    audit_share: float = opt(
        0.0,
        "of requests, those that another replica answers too, to compare; 0.001 is one in 1,000",
        min=0.0,
        max=1.0,
    )
    roles: str = opt(
        "",
        "who computes prompts for the others: prefill=1,decode=3, or auto; empty: all do both",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options. Frozen; build changed copies with ``dataclasses.replace`` or ``EngineConfig.of``."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    fleet: FleetOptions = field(default_factory=FleetOptions)

    @classmethod
    def of(cls, **flat: Any) -> EngineConfig:
        """A config from flat option names, e.g. ``EngineConfig.of(model="dir", page_size=32)``.

        Raises:
            ConfigError: an unknown option, a value of the wrong type or out of its range.
        """
        owners = {
            flat_name(section, f): (section, f)
            for section, options in sections()
            for f in dataclasses.fields(options)
        }
        groups: dict[str, dict[str, Any]] = {}
        for name, value in dotted(flat).items():
            if name not in owners:
                raise ConfigError(f"unknown option {name!r}{hint(name, owners)}", field=name)
            section, f = owners[name]
            groups.setdefault(section, {})[f.name] = checked(f, value, name)
        parts = {section: options(**groups.get(section, {})) for section, options in sections()}
        return cls(**parts)

    def flat(self) -> dict[str, Any]:
        """All options by flat name; ``EngineConfig.of(**config.flat()) == config``."""
        return {
            flat_name(section, f): getattr(getattr(self, section), f.name)
            for section, options in sections()
            for f in dataclasses.fields(options)
        }

    def on(self, platform: str) -> EngineConfig:
        """This config with a number wherever 0 leaves the choice to the device; ``platform`` is that of
        the devices, as jax calls it."""
        return dataclasses.replace(
            self, cache=self.cache.on(platform), scheduler=self.scheduler.on(platform)
        )

    @property
    def n_drafts(self) -> int:
        """Draft tokens that the programs verify per row and step."""
        options = self.speculative
        wanted = 0 if options.method == "off" else options.num_tokens or DEFAULT_DRAFTS
        return self.device.max_drafts or wanted


def sections() -> list[tuple[str, type]]:
    """(section name, options class) in order."""
    return [
        ("model", ModelOptions),
        ("cache", CacheOptions),
        ("scheduler", SchedulerOptions),
        ("device", DeviceOptions),
        ("speculative", SpeculativeOptions),
        ("server", ServerOptions),
        ("fleet", FleetOptions),
    ]
