"""Exports the engine's counters as Prometheus metrics at scrape time."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jserve.engine.face import EngineFace
from jserve.types import Lane

# Names of the scheduler's counters -> (metric, help). Anything else is exported under its own name.
_COUNTERS = {
    "cache_query_tokens": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "cache_hit_tokens": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("num_preemptions", "Sequences that lost their pages and start over."),
    "finished": ("sequences_finished", "Sequences ended, for whatever reason."),
    "decode_rows_total": ("decode_rows", "Rows of steps that decoded or verified."),
    "decode_tokens_total": ("decode_tokens", "Tokens these rows drew; per row: tokens per step."),
    "step_seconds_total": ("step_seconds", "Device time of all steps."),
    "decode_step_seconds_total": ("decode_step_seconds", "Device time of steps without prefill."),
    "decode_step_gap_seconds_total": (
        "decode_step_gap_seconds",
        "Time the device waited for the host before such steps.",
    ),
    "decode_steps_total": ("decode_steps", "Steps without prefill."),
    "spec_decode_drafting_seconds_total": (
        "spec_decode_drafting_seconds",
        "Of this, drafting on the device (what steps that draft take longer).",
    ),
    "spec_decode_host_seconds_total": (
        "spec_decode_host_seconds",
        "Host time that proposers took.",
    ),
}
_GAUGES = {
    "waiting_tokens": (
        "waiting_prompt_tokens",
        "Prompt tokens that wait for their first admission.",
    ),
    "overload_level": (
        "overload_level",
        "0 calm, 1 bulk is shed, 2 and prefills are short, 3 and standard is shed.",
    ),
    "overload_load": ("overload_load", "How full the queue is; 1 is full."),
    "preempted": ("num_requests_preempted", "Sequences that wait after losing their pages."),
    "pages_total": ("kv_pages", "KV pages in the pool."),
    "pages_free": ("kv_pages_free", "KV pages that hold nothing."),
    "pages_cached": ("kv_pages_cached", "KV pages kept for reuse only."),
}


# Values by lane come as "<lane>_<name>"; name -> (metric, help).
_LANE_GAUGES = {
    "waiting": ("lane_requests_waiting", "Sequences waiting, by lane."),
    "running": ("lane_requests_running", "Sequences running, by lane."),
}
_LANE_COUNTERS = {
    "refused": ("lane_refused", "Requests refused for want of room or of time, by lane."),
    "expired": ("lane_deadline_exceeded", "Sequences ended by their deadline, by lane."),
    "finished": ("lane_sequences_finished", "Sequences ended, for whatever reason, by lane."),
    "prompt_tokens": ("lane_prompt_tokens", "Prompt tokens of ended sequences, by lane."),
    "cached_tokens": ("lane_prompt_tokens_cached", "Of these, tokens found in the cache, by lane."),
    "output_tokens": ("lane_generation_tokens", "Tokens drawn by ended sequences, by lane."),
}


FLEET_GAUGES = {
    "fleet_load": "Work that replicas are offered, in device seconds of a full engine a second.",
    "replicas_needed": "Replicas that this load needs; 0 before the first minute.",
}
FLEET_COUNTERS = {
    "engine_audited": "Answers that another replica computed once more.",
    "engine_audit_mismatches": "Of these, answers of replicas that were not what the others said.",
    "engine_hedged": "Requests that were sent to a second replica because their first token was late.",
    "engine_hedges_won": "Of these, those that the second replica answered.",
    "engine_ejected": "Times that a replica was put out because it was slow.",
    "engine_silent": "Times that a replica with work said nothing for too long.",
    "engine_moved": "Requests that went on elsewhere though their replica lived.",
    "engine_remote_prefills": "Prompts that a prefill replica computed.",
    "engine_remote_prefills_failed": "Prompts that a prefill replica was to compute and did not.",
}
"""Help of what there is with replicas only."""


# Help of what is exported under its own name.
_HELP = {
    **FLEET_GAUGES,
    **FLEET_COUNTERS,
    "spec_decode_num_drafts": "Rows that tried drafts, by proposer.",
    "spec_decode_num_draft_tokens": "Drafts tried, by proposer and lane.",
    "spec_decode_num_accepted_tokens": "Drafts accepted, by proposer and lane.",
    "spec_decode_num_draft_tokens_per_pos": "Drafts tried, by proposer, lane and place in the row.",
    "spec_decode_num_accepted_tokens_per_pos": "Drafts accepted, by proposer, lane and place.",
    "cache_handles": "Named caches.",
    "cache_handle_pages": "KV pages that named caches pin.",
    "cache_handle_quota_pages": "KV pages that they may pin.",
    "cache_handle_uses_total": "Requests that named a cache.",
    "cache_sessions": "Sessions whose KV is kept for the next turn.",
    "compiles_after_ready_total": "Programs compiled after the server was ready: 0, or a fault.",
    "disk_pages": "KV pages on disk.",
    "disk_pages_known": "KV pages on disk that a prefix can be found in.",
    "disk_pages_read_total": "KV pages read from disk into host memory.",
    "disk_pages_missed_total": "KV pages asked of the disk that it could not give.",
    "disk_pages_written_total": "KV pages written to disk.",
    "disk_pages_broken_total": "Files of KV pages that were broken, and removed.",
    "disk_read_only": "1 while a failed write keeps the disk read-only.",
    "disk_writes_dropped_total": "KV pages not written because too many writes waited.",
    "disk_writes_failed_total": "Writes of KV pages that failed.",
    "expert_load": "Tokens that experts on each device computed, all layers together; a token counts once an expert.",
    "expert_load_hottest_share": "Share of the busiest expert of any layer in the choices of its layer, of late.",
    "expert_load_max_over_mean": "Load of the fullest device over the mean of all, mean of the layers, of late.",
    "expert_load_max_over_mean_worst": "The same of the layer where it is highest.",
    "expert_moves_total": "Copies and exchanges of experts between slots.",
    "expert_rebalances_total": "Times that new places of experts were planned.",
    "host_pages": "KV pages that host memory holds at most.",
    "host_pages_used": "KV pages in host memory.",
    "host_pages_private": "Of these, pages of swapped sequences.",
    "host_pages_saved_total": "Evicted KV pages copied to host memory.",
    "host_pages_stowed_total": "KV pages of swapped sequences copied to host memory.",
    "host_pages_loaded_total": "KV pages copied back to the device.",
    "host_pages_dropped_total": "KV pages evicted from host memory.",
    "kv_transfer_pages_received_total": "KV pages that came from other engines over TCP.",
    "kv_transfer_pages_sent_total": "KV pages that went to other engines over TCP.",
    "paused": "1 while an operator holds new requests back.",
    "weight_updates_total": "Times that the weights were replaced.",
    "weight_update_seconds_total": "Seconds that replacing the weights took, in which no step was launched.",
    "weight_recomputed_tokens_total": "Tokens of running sequences whose KV was computed anew for other weights.",
    "prefill_tokens_total": "Tokens planned to be computed before their sequence decodes, recomputed ones too.",
    "offered_seconds_total": "Work of admitted requests, in device seconds of a full engine.",
    "saved_seconds_total": "Device seconds of prefill that the prefix cache saved.",
    "queue_seconds": "Seconds of work that wait.",
    "prefix_waits_total": "Sequences that waited for a prefix that another one was computing.",
    "requests_faulty_total": "Requests ended because their steps raise, found by bisection.",
    "requests_unschedulable_total": "Requests ended because they could not be run.",
    "sequences_nonfinite_total": "Sequences ended by logits that are not finite.",
    "step_faults_total": "Steps that raised.",
    "steps_failed_in_row": "Steps that raised since one came back.",
    "step_slowness": "How many times their usual time steps take of late.",
    "swaps_out_total": "Sequences swapped to host memory when they were preempted.",
    "swaps_back_total": "Swapped sequences that came back.",
    "swaps_lost_total": "Swapped sequences that were computed again.",
    "vocab_rows": "Sequences that can have penalties or biases at once.",
    "vocab_rows_used": "Running sequences with penalties or biases.",
    "vocab_row_waits_total": "Sequences with penalties or biases that waited for others of that kind.",
    "engine_aborted": "Requests aborted, by their client or an operator.",
    "engine_deaths": "Ends of the engine's process that nobody asked for.",
    "engine_dropped_outputs": "Outputs of choices that had ended.",
    "engine_faults": "Faults that the engine reported.",
    "engine_restarts": "Starts of the engine's process after a death.",
    "engine_resumed": "Requests that another engine went on with, each time.",
    "engine_slow_readers": "Requests ended because their client read too slowly.",
    "engine_degraded": "Times that the engine became degraded and refused new requests.",
}


class EngineCollector(Collector):
    """Reads the engine's latest counters when scraped."""

    def __init__(self, model: str, engine: EngineFace) -> None:
        self._model = model
        self._engine = engine

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        stats = self._engine.stats()
        yield self._gauge("num_requests_running", "Sequences running.", stats.running)
        yield self._gauge("num_requests_waiting", "Sequences waiting.", stats.waiting)
        yield self._gauge("num_requests_active", "Requests not yet ended.", self._engine.n_active)
        waiting = self._engine.n_buffered_bytes
        yield self._gauge("buffered_output_bytes", "Outputs that wait for slow readers.", waiting)
        yield self._gauge("server_tasks", "Asyncio tasks of the HTTP process.", _n_tasks())
        yield self._gauge("steps_in_flight", "Steps launched and not collected.", stats.in_flight)
        yield self._kernels()
        yield self._forms()
        yield self._paths()
        yield self._replicas()
        yield self._counter("engine_steps", "Steps of the engine since it started.", stats.step)
        values = dict(stats.values)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", _usage(values)
        )
        yield from self._by_lane(values)
        yield from self._labelled(values)
        for name, value in sorted(values.items()):
            yield self._value(name, value)
        for name, value in sorted(self._engine.counters.items()):
            event = f"engine_{_clean(name).removeprefix('engine_')}"
            yield self._counter(event, _HELP.get(event, f"Counter {event}."), value)

    def _kernels(self) -> Any:
        """The kernels that compute the products, as a label."""
        family = GaugeMetricFamily(
            "jserve:kernels_info",
            "Always 1; level of the native CPU kernels, hopper for that of weights in groups, or xla and why.",
            labels=["model_name", "level", "reason"],
        )
        info = self._engine.info
        labels = [str(info.get("kernels", "xla")), str(info.get("no_kernels", ""))]
        family.add_metric([self._model, *labels], 1.0)
        return family

    def _replicas(self) -> Any:
        """Replicas by state; a single engine is one."""
        states = Counter(one.state for one in self._engine.replicas())
        states = states or Counter({"ready": int(self._engine.ready)})
        family = GaugeMetricFamily(
            "jserve:replicas", "Replicas that take part, by state.", labels=["model_name", "state"]
        )
        for state, n in sorted(states.items()):
            family.add_metric([self._model, state], float(n))
        return family

    def _forms(self) -> Any:
        """Bytes of the weights in each form, what stayed in the type of the model among them."""
        family = GaugeMetricFamily(
            "jserve:weight_form_bytes",
            "Bytes of the weights in each form; those that are not quantised have the name of their type.",
            labels=["model_name", "form"],
        )
        for form, n in self._engine.info.get("form_bytes", {}).items():
            family.add_metric([self._model, form], float(n))
        return family

    def _paths(self) -> Any:
        """The paths of products with matrices in each quantised form."""
        family = GaugeMetricFamily(
            "jserve:weight_form_path",
            "The most tokens of a program whose products with matrices in a quantised form take a path: native kernels,"
            " the kernel for GPUs (quant_matmul), or XLA's products, of numbers as they are (xla), of groups"
            " (xla-blocks) or of a widened matrix.",
            labels=["model_name", "form", "path"],
        )
        for form, taken in self._engine.info.get("paths", {}).items():
            for path, (_, most) in taken.items():
                family.add_metric([self._model, form, path], float(most))
        return family

    def _by_lane(self, values: dict[str, float]) -> Iterator[Any]:
        """One family per name with a label for the lane; takes what it tells out of ``values``."""
        kinds = ((_LANE_GAUGES, GaugeMetricFamily), (_LANE_COUNTERS, CounterMetricFamily))
        for names, kind in kinds:
            for name, (metric, help) in names.items():
                family = kind(f"jserve:{metric}", help, labels=["model_name", "lane"])
                for lane in Lane:
                    value = values.pop(f"{lane}_{name}", None)
                    if value is not None:
                        family.add_metric([self._model, lane.value], float(value))
                if family.samples:
                    yield family

    def _labelled(self, values: dict[str, float]) -> Iterator[Any]:
        """Counters called ``name_total{label=value,...}``, one family per name; takes them out of
        ``values``."""
        families: dict[str, list[tuple[list[str], list[str], float]]] = {}
        for key in sorted(k for k in values if "{" in k):
            name, _, inside = key.rstrip("}").partition("{")
            pairs = [pair.partition("=") for pair in inside.split(",")]
            labels, parsed = [p[0] for p in pairs], [p[2] for p in pairs]
            families.setdefault(name, []).append((labels, parsed, values.pop(key)))
        for name, samples in families.items():
            clean = _clean(name).removesuffix("_total")
            labels = ["model_name", *samples[0][0]]
            family = CounterMetricFamily(f"jserve:{clean}", _HELP.get(clean, clean), labels=labels)
            for _, parsed, value in samples:
                family.add_metric([self._model, *parsed], float(value))
            yield family

    def _value(self, name: str, value: float) -> Any:
        if name in _GAUGES:
            return self._gauge(*_GAUGES[name], value)
        if name in _COUNTERS:
            return self._counter(*_COUNTERS[name], value)
        clean = _clean(name)
        help = _HELP.get(clean, f"Value {clean}.")
        if clean.endswith("_total"):
            return self._counter(clean.removesuffix("_total"), help, value)
        return self._gauge(clean, help, value)

    def _gauge(self, name: str, help: str, value: float) -> Any:
        family = GaugeMetricFamily(f"jserve:{name}", help, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family

    def _counter(self, name: str, help: str, value: float) -> Any:
        family = CounterMetricFamily(f"jserve:{name}", help, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family


def _n_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # scraped outside of the server's loop
        return 0


def _usage(values: Mapping[str, float]) -> float:
    total = values.get("pages_total", 0)
    idle = values.get("pages_free", 0) + values.get("pages_cached", 0)
    return min(1.0, max(0.0, 1.0 - idle / total)) if total else 0.0


def _clean(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)[:64]
