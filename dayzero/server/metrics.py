"""Numbers for Prometheus: the engine's, the requests', and HTTP's.

Everything of the engine and its requests is exported twice, under ``dayzero:`` and under the ``vllm:`` names that
dashboards and gateways scrape; what only this engine has is exported under ``dayzero:`` alone. Each app has a registry
of its own. Gauges are read from the engine's status at the moment of the scrape, so a wedged engine shows as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dayzero.engine.api import Engine, EngineStatus

OWN, SHARED = ("dayzero:",), ("dayzero:", "vllm:")
LABELS = ("model_name", "engine")
FINISHES = ("stop", "length", "abort", "error")

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
GAP_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FEW = (1, 2, 5, 10, 20, 50, 100)
TOKENS = tuple(k * 10**e for e in range(7) for k in (1, 2, 5))

# Counter of Progress -> (name, what it counts). A counter that the engine does not report has not happened.
ENGINE_COUNTERS = {
    "preemptions": ("num_preemptions", "Requests that lost their blocks to others and were recomputed."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "external_prefix_queries": ("external_prefix_cache_queries", "Prompt tokens looked up in a cache elsewhere."),
    "external_prefix_hits": ("external_prefix_cache_hits", "Prompt tokens found in a cache elsewhere."),
    "mm_queries": ("mm_cache_queries", "Images looked up in the cache of encoded images."),
    "mm_hits": ("mm_cache_hits", "Images found in the cache of encoded images."),
    "drafts": ("spec_decode_num_drafts", "Drafts proposed."),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Tokens in drafts."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Tokens of drafts that were right."),
}
# Histogram -> (buckets, what it measures), one observation a finished sequence unless it says otherwise.
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (TTFT_S, "From the request's arrival to its first token."),
    "inter_token_latency_seconds": (GAP_S, "Between one output of a sequence and the next (one observation each)."),
    "request_time_per_output_token_seconds": (GAP_S, "Mean time of a token behind the first."),
    "time_per_output_token_seconds": (GAP_S, "Old name of request_time_per_output_token_seconds."),
    "e2e_request_latency_seconds": (REQUEST_S, "From arrival to the last token."),
    "request_queue_time_seconds": (REQUEST_S, "From arrival to the first step."),
    "request_prefill_time_seconds": (REQUEST_S, "From the first step to the first token."),
    "request_decode_time_seconds": (REQUEST_S, "From the first token to the last."),
    "request_inference_time_seconds": (REQUEST_S, "From the first step to the last token."),
    "request_prompt_tokens": (TOKENS, "Tokens of the prompt."),
    "request_generation_tokens": (TOKENS, "Tokens generated."),
    "request_max_num_generation_tokens": (TOKENS, "Most tokens of any answer of the request (one a request)."),
    "request_params_max_tokens": (TOKENS, "max_tokens, as asked for or as the context leaves."),
    "request_params_n": (FEW, "n (one a request)."),
    "iteration_tokens_total": (STEP_TOKENS, "Tokens computed in a step (one observation a step)."),
}


class Renamed(Collector):
    """What ``inner`` collects, once under each prefix."""

    def __init__(self, inner: CollectorRegistry, prefixes: Iterable[str]) -> None:
        self._inner, self._prefixes = inner, tuple(prefixes)

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            for prefix in self._prefixes:
                out = Metric(prefix + metric.name, metric.documentation, metric.type)
                out.samples = [
                    sample._replace(name=prefix + sample.name)
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield out


class EngineNumbers(Collector):
    """The engine's status as metrics, read when they are asked for."""

    def __init__(self, engine: Engine, labels: tuple[str, str]) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        yield from self._gauges(status)
        yield from self._counters(status)
        if status.state in ("ready", "draining"):
            info = self._engine.info
            facts = {"block_size": str(info.page_tokens), "num_gpu_blocks": str(info.pool_tokens // info.page_tokens),
                     "cache_dtype": info.dtype, "max_model_len": str(info.max_model_len)}  # fmt: skip
            for prefix in SHARED:
                out = GaugeMetricFamily(f"{prefix}cache_config_info", "The cache, in labels.", labels=(*LABELS, *facts))
                out.add_metric((*self._labels, *facts.values()), 1)
                yield out

    def _gauges(self, status: EngineStatus) -> Iterator[Metric]:
        progress = status.progress
        running, waiting = (progress.running, progress.waiting) if progress else (0, 0)
        usage = progress.usage if progress else 0.0
        alive = status.state in ("ready", "draining") and not status.stalled
        yield from self._gauge(SHARED, "num_requests_running", "Requests that hold a slot.", running)
        yield from self._gauge(SHARED, "num_requests_waiting", "Requests that wait for a slot.", waiting)
        yield from self._gauge(SHARED, "kv_cache_usage_perc", "Share of the cache pool in use, 0 to 1.", usage)
        yield from self._gauge(SHARED, "gpu_cache_usage_perc", "Old name of kv_cache_usage_perc.", usage)
        yield from self._gauge(SHARED, "engine_healthy", "1: the engine lives and makes progress.", alive)
        yield from self._gauge(OWN, "engine_stalled", "1: work is queued and no step ends.", status.stalled)
        yield from self._gauge(OWN, "engine_ready", "1: the engine takes requests.", status.state == "ready")
        last, slowest = (progress.last_step, progress.slowest) if progress else (0.0, 0.0)
        yield from self._gauge(OWN, "engine_last_step_timestamp_seconds", "When the newest step ended.", last)
        yield from self._gauge(OWN, "engine_slowest_step_seconds", "Slowest of the last 100 steps.", slowest)
        share = progress.host_share if progress else 0.0
        yield from self._gauge(OWN, "engine_host_share", "Share of step time outside operators, 0 to 1.", share)
        loaded, to_load = (progress.loaded, progress.to_load) if progress else (0.0, 0.0)
        yield from self._gauge(OWN, "weights_loaded_bytes", "Bytes of weights read so far.", loaded)
        yield from self._gauge(OWN, "weights_to_load_bytes", "Bytes of weights to read.", to_load)

    def _counters(self, status: EngineStatus) -> Iterator[Metric]:
        progress = status.progress
        counters = dict(progress.counters) if progress else {}
        counters.pop("steps", None)  # Progress.step itself is exported
        for key, (name, text) in ENGINE_COUNTERS.items():
            yield from self._counter(SHARED, name, text, counters.pop(key, 0.0))
        yield from self._counter(OWN, "engine_steps", "Steps the engine has ended.", progress.step if progress else 0)
        yield from self._counter(OWN, "engine_deaths", "Times the engine process ended unasked.", status.died)
        for key in sorted(counters):  # the engine's own list, a fixed one
            yield from self._counter(OWN, f"engine_{key}", f"The engine's counter {key}.", counters[key])

    def _gauge(self, prefixes: Iterable[str], name: str, text: str, value: float) -> Iterator[Metric]:
        for prefix in prefixes:
            out = GaugeMetricFamily(prefix + name, text, labels=LABELS)
            out.add_metric(self._labels, float(value))
            yield out

    def _counter(self, prefixes: Iterable[str], name: str, text: str, value: float) -> Iterator[Metric]:
        for prefix in prefixes:
            out = CounterMetricFamily(prefix + name, text, labels=LABELS)
            out.add_metric(self._labels, float(value))
            yield out


class Metrics:
    """One app's metrics. ``text()`` is what /metrics answers."""

    def __init__(self, engine: Engine, model_name: str, engine_label: str) -> None:
        labels = (model_name, engine_label)
        self.registry = CollectorRegistry()
        shared, own, http = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
        self._histograms: dict[str, Any] = {
            name: Histogram(name, text, LABELS, buckets=buckets, registry=shared).labels(*labels)
            for name, (buckets, text) in HISTOGRAMS.items()
        }

        def counter(name: str, text: str, registry: CollectorRegistry = shared) -> Any:
            return Counter(name, text, LABELS, registry=registry).labels(*labels)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were computed or found in the cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.corrupted_requests = counter("corrupted_requests", "Requests ended because their logits were no numbers.")
        self.admission_rejections = counter("admission_rejections", "Requests refused because too many waited.")
        success = Counter("request_success", "Sequences that ended.", (*LABELS, "finished_reason"), registry=shared)
        self._finished = {reason: success.labels(*labels, reason) for reason in FINISHES}
        self.client_gone = counter("requests_client_gone", "Requests whose client left before the end.", own)
        self.ignored_fields = counter("requests_with_ignored_fields", "Requests with fields that nothing read.", own)
        self.tool_problems = counter("tool_problems", "Tool calls that were not what they should be.", own)
        self._http = Counter("http_requests", "HTTP requests.", ("handler", "method", "status"), registry=http)
        self._http_s = Histogram(
            "http_request_duration_seconds", "Time to answer, streams to their end.", ("handler", "method"),
            buckets=HTTP_S, registry=http,
        )  # fmt: skip
        self._http_codes = Counter("http_errors", "Answers of 400 and above.", ("handler", "code"), registry=own)
        self.registry.register(Renamed(shared, SHARED))
        self.registry.register(Renamed(own, OWN))
        self.registry.register(Renamed(http, ("",)))
        self.registry.register(EngineNumbers(engine, labels))
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram. Clocks of two processes can differ by a little: not below zero."""
        self._histograms[name].observe(max(value, 0.0))

    def finished(self, reason: str) -> None:
        self._finished[reason].inc()

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """handler: the route, not the path. status: in whole hundreds, as dashboards of this field group it."""
        self._http.labels(handler, method, f"{status // 100}xx").inc()
        self._http_s.labels(handler, method).observe(seconds)
        if status >= 400:
            self._http_codes.labels(handler, str(status)).inc()
