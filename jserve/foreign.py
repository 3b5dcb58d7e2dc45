"""Explains launch flags of vLLM, SGLang, llama.cpp and TGI and names the jserve option.

It owns the table and the one message about all such flags of a command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence

NOTHING = "nothing is needed"
_MODEL = "give the model without a flag: jserve serve MODEL"
_COMPILED = f"{NOTHING}: every program is compiled at the start"
_LOGGED = f"{NOTHING}: one line a request, and no prompt is ever logged; see --log-level"
_QUANTISED = "use --quantization"
_ADAPTERS = "adapters are not served"
_GROUPS = "use --sharding dp=N,tp=M, or --replicas N"
_ONE_AXIS = "only --tensor-parallel-size and --expert-parallel-size split a model; run several servers behind a router"
_EXPERTS = (
    "use --expert-parallel-size N: N times --tensor-parallel-size devices, which split each expert"
)
_TLS = "let a proxy in front do TLS"
_REQUEST = "a request says this, or the model's generation_config.json"
_THREADS = f"{NOTHING}: XLA takes the cores that the process may use"
_HUB = "set HF_HOME for the hub's directory"

ADVICE = {
    # vLLM
    "--enforce-eager": _COMPILED,
    "--compilation-config": _COMPILED,
    "--cuda-graph-sizes": _COMPILED,
    "--max-seq-len-to-capture": _COMPILED,
    "--enable-auto-tool-choice": f"{NOTHING}: tools work wherever the chat template has them",
    "--trust-remote-code": "code of a model is never run; leave it out",
    "--enable-chunked-prefill": f"{NOTHING}: it is always on; see --max-prefill-chunk",
    "--no-enable-chunked-prefill": "prefills are always cut; see --max-prefill-chunk",
    "--max-logprobs": "a request may ask for 20 at most",
    "--root-path": "let the proxy take the prefix off",
    "--disable-log-requests": _LOGGED,
    "--enable-log-requests": _LOGGED,
    "--disable-log-stats": f"{NOTHING}: counters are at /metrics",
    "--disable-uvicorn-access-log": "use --log-level warning",
    "--uvicorn-log-level": "use --log-level",
    "--swap-space": "use --host-memory-gb",
    "--cpu-offload-gb": "weights stay on the device; --host-memory-gb is for KV",
    "--distributed-executor-backend": NOTHING,
    "--pipeline-parallel-size": _ONE_AXIS,
    "--data-parallel-size": _GROUPS,
    "--enable-expert-parallel": _EXPERTS,
    "--eplb-config": "use --num-redundant-experts and --eplb-step-interval",
    "--enable-lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--limit-mm-per-prompt": "only text is served",
    "--guided-decoding-backend": f"{NOTHING}: see --structured-outputs",
    "--structured-outputs-config": f"{NOTHING}: see --structured-outputs",
    "--chat-template-content-format": NOTHING,
    "--response-role": NOTHING,
    "--scheduling-policy": f"{NOTHING}: requests name a lane and a priority",
    "--num-scheduler-steps": "use --overlap",
    "--async-scheduling": f"{NOTHING}: see --overlap",
    "--task": "only text generation is served",
    "--runner": "only text generation is served",
    "--tokenizer-mode": NOTHING,
    "--generation-config": _REQUEST,
    "--override-generation-config": _REQUEST,
    "--hf-overrides": "edit the model's config.json",
    "--download-dir": _HUB,
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--allowed-methods": f"{NOTHING}: see --allowed-origins",
    "--allowed-headers": f"{NOTHING}: see --allowed-origins",
    "--allow-credentials": f"{NOTHING}: see --allowed-origins",
    "--disable-frontend-multiprocessing": "use --in-process",
    "--enable-reasoning": f"{NOTHING}: see --reasoning-parser",
    "--enable-prompt-tokens-details": f"{NOTHING}: usage has cached tokens",
    "--enable-force-include-usage": "a request asks with stream_options.include_usage",
    "--return-tokens-as-token-ids": "a request asks with return_token_ids",
    "--kv-transfer-config": "KV is not sent to other servers; see --host-memory-gb, --disk-dir",
    "--device": "JAX_PLATFORMS chooses the device",
    # SGLang
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--tokenizer-path": "use --tokenizer",
    "--tp-size": "use --tensor-parallel-size",
    "--dp-size": _GROUPS,
    "--ep-size": _EXPERTS,
    "--ep-num-redundant-experts": "use --num-redundant-experts",
    "--eplb-rebalance-num-iterations": "use --eplb-step-interval",
    "--pp-size": _ONE_AXIS,
    "--context-length": "use --max-model-len",
    "--mem-fraction-static": "use --memory-utilization",
    "--max-running-requests": "use --max-num-seqs",
    "--max-queued-requests": "use --max-waiting",
    "--chunked-prefill-size": "use --max-prefill-chunk",
    "--max-total-tokens": "use --max-model-len for a request, --kv-memory-gb for all",
    "--disable-radix-cache": "use --no-prefix-caching",
    "--disable-cuda-graph": _COMPILED,
    "--cuda-graph-max-bs": _COMPILED,
    "--enable-torch-compile": _COMPILED,
    "--schedule-policy": f"{NOTHING}: requests name a lane and a priority",
    "--schedule-conservativeness": NOTHING,
    "--grammar-backend": f"{NOTHING}: see --structured-outputs",
    "--sampling-backend": NOTHING,
    "--random-seed": "use --seed",
    "--stream-interval": NOTHING,
    "--watchdog-timeout": "use --stall-timeout-s",
    "--enable-metrics": f"{NOTHING}: counters are at /metrics",
    "--enable-cache-report": f"{NOTHING}: usage has cached tokens",
    "--log-requests": _LOGGED,
    "--skip-server-warmup": f"{NOTHING}: see --compile-cache",
    "--speculative-algorithm": "use --speculative.method",
    "--speculative-draft-model-path": "use --speculative.model",
    "--speculative-num-draft-tokens": "use --speculative.num-tokens",
    "--speculative-num-steps": "use --speculative.num-tokens",
    "--speculative-eagle-topk": "use --speculative.tree",
    # llama.cpp
    "-m": _MODEL,
    "--hf-repo": "give the hub's name as MODEL",
    "-hf": "give the hub's name as MODEL",
    "--alias": "use --served-model-name",
    "-a": "use --served-model-name",
    "--n-gpu-layers": f"{NOTHING}: all layers are on the device",
    "--gpu-layers": f"{NOTHING}: all layers are on the device",
    "-ngl": f"{NOTHING}: all layers are on the device",
    "--ctx-size": "use --max-model-len (of one request, not of all)",
    "-c": "use --max-model-len (of one request, not of all)",
    "--parallel": "use --max-num-seqs",
    "-np": "use --max-num-seqs",
    "--cont-batching": f"{NOTHING}: it is always on",
    "-cb": f"{NOTHING}: it is always on",
    "--flash-attn": f"{NOTHING}: see --attention-backend",
    "-fa": f"{NOTHING}: see --attention-backend",
    "--threads": _THREADS,
    "-t": _THREADS,
    "--threads-batch": _THREADS,
    "--batch-size": "use --max-num-batched-tokens",
    "-b": "use --max-num-batched-tokens",
    "--ubatch-size": "use --max-num-batched-tokens",
    "-ub": "use --max-num-batched-tokens",
    "--mlock": NOTHING,
    "--no-mmap": NOTHING,
    "--jinja": f"{NOTHING}: the model's chat template is applied",
    "--chat-template-file": "use --chat-template",
    "--cache-type-k": "use --kv-cache-dtype",
    "--cache-type-v": "use --kv-cache-dtype",
    "-ctk": "use --kv-cache-dtype",
    "-ctv": "use --kv-cache-dtype",
    "--cache-reuse": f"{NOTHING}: see --prefix-caching",
    "--metrics": f"{NOTHING}: counters are at /metrics",
    "--slots": f"{NOTHING}: see /dashboard",
    "--props": NOTHING,
    "--no-webui": "use --no-ui",
    "--n-predict": _REQUEST,
    "--predict": _REQUEST,
    "-n": _REQUEST,
    "--temp": _REQUEST,
    "--reasoning-format": "use --reasoning-field",
    "--reasoning-budget": "a request says thinking_token_budget",
    "--api-key-file": "use --api-keys-file",
    "--model-draft": "use --speculative.model",
    "-md": "use --speculative.model",
    "--draft-max": "use --speculative.num-tokens",
    "--lora": _ADAPTERS,
    "--embedding": "only text generation is served",
    # TGI
    "--model-id": _MODEL,
    "--num-shard": "use --tensor-parallel-size",
    "--sharded": NOTHING,
    "--quantize": _QUANTISED,
    "--hostname": "use --host",
    "--max-concurrent-requests": "use --max-waiting",
    "--max-input-length": "use --max-model-len",
    "--max-input-tokens": "use --max-model-len",
    "--max-batch-prefill-tokens": "use --max-num-batched-tokens",
    "--max-batch-total-tokens": "use --kv-memory-gb",
    "--max-batch-size": "use --max-num-seqs",
    "--waiting-served-ratio": NOTHING,
    "--cuda-memory-fraction": "use --memory-utilization",
    "--cors-allow-origin": "use --allowed-origins",
    "--disable-grammar-support": "use --no-structured-outputs",
    "--huggingface-hub-cache": _HUB,
    "--json-output": "logs are lines of text",
}
"""Flag -> what to write instead, or that nothing is needed."""


def message(args: Sequence[str], known: Collection[str]) -> str:
    """One text about all flags in ``args`` that are not in ``known``, if one of them is in ``ADVICE``; "" if
    none is (the parser then says what it says of a misspelt flag).

    Args:
        args: of one command, as the shell gave them.
        known: the command's own flags.
    """
    found = list(dict.fromkeys(_unknown(args, known)))
    if not any(flag in ADVICE for flag in found):
        return ""
    lines = [f"  {flag}: {ADVICE.get(flag) or _guess(flag, known)}" for flag in found]
    return "\n".join(["not options of jserve:", *lines])


def _unknown(args: Sequence[str], known: Collection[str]) -> Iterator[str]:
    for arg in args:
        if arg == "--":
            return
        flag = arg.partition("=")[0]
        if flag.startswith("--"):
            flag = f"--{flag[2:].replace('_', '-')}"  # vLLM takes both; our parser says what is wrong with it
        if flag not in known and (flag.startswith("--") or flag in ADVICE):
            yield flag


def _guess(flag: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(flag, [*known], n=1)
    return f"did you mean {close[0]}?" if close else "no such option"
