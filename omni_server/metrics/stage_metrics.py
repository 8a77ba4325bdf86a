"""Metrics of the stages and the queues between them, in Prometheus' text format.

Metrics of autoregressive stages are counted as in vLLM and have vLLM's names and labels, plus the label
`stage`; the label `engine` is the number of the stage's replica. They are plain numbers, which cost next to
nothing per token. Other metrics of a stage with several replicas have the label `replica`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_server.metrics.buckets import FIRST_OUTPUT_S, PER_TOKEN_S, REQUEST_S
from omni_server.metrics.replica_name import split_replica_name

Clock = Callable[[], float]


def _histogram(buckets: tuple[float, ...]) -> Histogram:
    """Has no registry: `pipeline_text` gives it its name."""
    return Histogram("seconds", "Seconds.", buckets=buckets, registry=None)


@dataclass
class ArStageMetrics:
    """Belongs to one event loop."""

    num_running: int = 0
    """This and the next two are as the scheduler last reported them."""
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Used fraction of the KV cache, 0 to 1."""
    prompt_tokens: int = 0
    """Counted once the first token has been sampled."""
    cached_prompt_tokens: int = 0
    """Prompt tokens that hit the prefix cache."""
    generation_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason: stop, length, abort, error."""
    first_token_s: Histogram = field(default_factory=lambda: _histogram(FIRST_OUTPUT_S))
    per_token_s: Histogram = field(default_factory=lambda: _histogram(PER_TOKEN_S))
    """One value per request: mean time between its tokens."""
    request_s: Histogram = field(default_factory=lambda: _histogram(REQUEST_S))

    def clear(self) -> None:
        """Resets the counts: the warm-up does not count."""
        vars(self).update(vars(ArStageMetrics(self.num_running, self.num_waiting, self.kv_cache_usage)))

    def reported(self, *, num_running: int, num_waiting: int, kv_cache_usage: float) -> None:
        self.num_running, self.num_waiting, self.kv_cache_usage = num_running, num_waiting, kv_cache_usage


class RequestMeter:
    """Measures one request, which is submitted now."""

    def __init__(
        self,
        metrics: ArStageMetrics,
        num_prompt_tokens: int,
        *,
        has_first_token: bool,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Without `has_first_token`, the first token comes with others, and its time is unknown."""
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._has_first_token = has_first_token
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._last = self._began
        self._num_first_tokens = 0
        self._num_tokens = 0
        self._is_over = False

    def tokens(self, count: int, *, num_cached: int) -> None:
        """Records `count` new tokens; `num_cached` tokens of the prompt hit the prefix cache."""
        if count == 0:
            return
        metrics = self._metrics
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
            self._num_first_tokens = count
            metrics.prompt_tokens += self._num_prompt_tokens
            metrics.cached_prompt_tokens += num_cached
            if self._has_first_token:
                metrics.first_token_s.observe(self._last - self._began)
        self._num_tokens += count
        metrics.generation_tokens += count

    def ended(self, reason: str) -> None:
        """Counts only once."""
        if self._is_over:
            return
        self._is_over = True
        metrics = self._metrics
        metrics.ended[reason] += 1
        if reason not in ("stop", "length"):
            return
        metrics.request_s.observe(self._clock() - self._began)
        num_later = self._num_tokens - self._num_first_tokens
        if self._first is not None and num_later > 0:
            metrics.per_token_s.observe((self._last - self._first) / num_later)


_LABELS = ("model_name", "engine", "stage")
"""vLLM's `engine` is the data-parallel rank. A stage has one, and numbers its replicas in its place."""

_GAUGES: tuple[tuple[str, str, Callable[[ArStageMetrics], float]], ...] = (
    (
        "vllm:num_requests_running",
        "Requests in the stage's batch; reported at most every 0.25 s, and when the stage falls idle.",
        lambda stage: stage.num_running,
    ),
    (
        "vllm:num_requests_waiting",
        "Requests waiting for a slot in the stage's batch; reported like vllm:num_requests_running.",
        lambda stage: stage.num_waiting,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Used fraction of the stage's KV cache, 0 to 1; reported like vllm:num_requests_running.",
        lambda stage: stage.kv_cache_usage,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ArStageMetrics], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens that the stage has processed.", lambda stage: stage.prompt_tokens),
    (
        "vllm:prompt_tokens_cached",
        "Of vllm:prompt_tokens, those that hit the prefix cache.",
        lambda stage: stage.cached_prompt_tokens,
    ),
    (
        "vllm:generation_tokens",
        "Tokens that the stage has sampled, end tokens included.",
        lambda stage: stage.generation_tokens,
    ),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ArStageMetrics], Histogram]], ...] = (
    (
        "vllm:time_to_first_token_seconds",
        "From submission to the stage to the first token, if that token is sent alone.",
        lambda stage: stage.first_token_s,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a request.",
        lambda stage: stage.per_token_s,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "From submission to the stage to the end, of successful requests.",
        lambda stage: stage.request_s,
    ),
)
_FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class QueueLevel:
    """State of a shared-memory queue."""

    capacity: int
    in_use: int
    published: int
    """Slots written since the start, one per step of the producer."""


@dataclass(frozen=True)
class StageLevel:
    """State of a stage."""

    is_up: bool
    has_failed: bool
    """It has died too often, and is not restarted for now."""
    num_restarts: int
    """Since the server's start."""
    num_corrupt: Mapping[str, int] = field(default_factory=dict)
    """Requests that failed because of corrupt data, by kind."""


def pipeline_text(
    model_name: str,
    ar_stages: Mapping[str, ArStageMetrics],
    active: Mapping[str, int],
    queues: Mapping[tuple[str, str], QueueLevel],
    stages: Mapping[str, StageLevel],
) -> bytes:
    """`active` counts the unfinished requests. All but `queues` are keyed by the replica's name
    (`omni_server.metrics.replica_name`), and `queues` by the source's and the target stage."""
    return generate_latest(_Pipeline(model_name, ar_stages, active, queues, stages))


@dataclass(frozen=True)
class _Pipeline(Collector):
    model_name: str
    ar_stages: Mapping[str, ArStageMetrics]
    active: Mapping[str, int]
    queues: Mapping[tuple[str, str], QueueLevel]
    stages: Mapping[str, StageLevel]

    def collect(self) -> Iterator[Metric]:
        yield from self._stage_families()
        # A metric without a value for the last label has no such label.
        labels = ["stage", "replica"]
        active = GaugeMetricFamily("omni_active_requests", "Unfinished requests per stage.", labels=labels)
        for name, count in self.active.items():
            active.add_metric(_labels(name), count)
        yield active
        is_up = GaugeMetricFamily("omni_stage_up", "1 while the stage's engine runs, else 0.", labels=labels)
        failed = GaugeMetricFamily(
            "omni_stage_failed",
            "1 while the stage's engine is not restarted any more, else 0.",
            labels=labels,
        )
        restarts = CounterMetricFamily(
            "omni_stage_restarts", "Restarts of a stage, successful or not.", labels=labels
        )
        corrupt = CounterMetricFamily(
            "omni_corrupt_data",
            "Requests that failed because a stage's data was corrupt, by kind of corruption.",
            labels=["kind", *labels],
        )
        for name, level in self.stages.items():
            is_up.add_metric(_labels(name), float(level.is_up))
            failed.add_metric(_labels(name), float(level.has_failed))
            restarts.add_metric(_labels(name), level.num_restarts)
            for kind, count in level.num_corrupt.items():
                corrupt.add_metric([kind, *_labels(name)], count)
        yield from (is_up, failed, restarts, corrupt)
        yield from self._queue_families()

    def _stage_families(self) -> Iterator[Metric]:
        stages = []
        for replica, stage in self.ar_stages.items():
            name, number = split_replica_name(replica)
            stages.append(((self.model_name, number or "0", name), stage))
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for labels, stage in stages:
                gauge.add_metric(labels, value(stage))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for labels, stage in stages:
                counter.add_metric(labels, value(stage))
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Finished requests, by finish reason.",
            labels=(*_LABELS, "finished_reason"),
        )
        for labels, stage in stages:
            for reason in dict.fromkeys((*_FINISH_REASONS, *stage.ended)):
                ended.add_metric((*labels, reason), stage.ended[reason])
        yield ended
        for name, text, read in _HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=_LABELS)
            for labels, stage in stages:
                _add_samples(histogram, labels, read(stage))
            yield histogram

    def _queue_families(self) -> Iterator[Metric]:
        labels = ["to_stage", "from_stage", "replica"]  # the replica of the stage that sends
        slots = GaugeMetricFamily(
            "omni_shared_memory_slots", "Slots of the queue between two stages.", labels=labels
        )
        in_use = GaugeMetricFamily(
            "omni_shared_memory_slots_in_use",
            "Slots whose rows have not been read yet.",
            labels=labels,
        )
        published = CounterMetricFamily(
            "omni_shared_memory_steps",
            "Steps of the producer whose rows went through the queue.",
            labels=labels,
        )
        for (source, target), level in self.queues.items():
            ends = [target, *_labels(source)]
            slots.add_metric(ends, level.capacity)
            in_use.add_metric(ends, level.in_use)
            published.add_metric(ends, level.published)
        yield from (slots, in_use, published)


def _labels(name: str) -> list[str]:
    """The stage, and the replica if there are several."""
    stage, number = split_replica_name(name)
    return [stage] if number is None else [stage, number]


def _add_samples(family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram) -> None:
    names = dict(zip(_LABELS, labels, strict=True))
    (metric,) = histogram.collect()
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            suffix = sample.name.removeprefix(metric.name)
            family.add_sample(family.name + suffix, names | sample.labels, sample.value)
