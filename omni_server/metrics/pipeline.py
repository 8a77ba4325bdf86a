"""What the stages and the queues between them measure, in Prometheus' text format.

Autoregressive stages have vLLM's names and labels, with the label `stage` in addition.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_server.metrics.stage_metrics import ArStageMetrics

_LABELS = ("model_name", "engine", "stage")
_ENGINE = "0"
"""vLLM's number of a data-parallel rank; a stage has one."""

_GAUGES: tuple[tuple[str, str, Callable[[ArStageMetrics], float]], ...] = (
    (
        "vllm:num_requests_running",
        "Requests in the stage's batch; reported at most every 0.25 s, and when the stage falls idle.",
        lambda stage: stage.num_running,
    ),
    (
        "vllm:num_requests_waiting",
        "Requests that wait for a place in the stage's batch; reported like vllm:num_requests_running.",
        lambda stage: stage.num_waiting,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Used share of the stage's KV cache, 0 to 1; reported like vllm:num_requests_running.",
        lambda stage: stage.kv_cache_usage,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ArStageMetrics], float]], ...] = (
    ("vllm:prompt_tokens", "Tokens of prompts that the stage has read.", lambda stage: stage.prompt_tokens),
    (
        "vllm:prompt_tokens_cached",
        "Of vllm:prompt_tokens, those found in the prefix cache.",
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
        "From handing a request to the stage to its first token; empty for a stage that sends tokens in blocks.",
        lambda stage: stage.first_token_s,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a request; empty for a stage that sends tokens in blocks.",
        lambda stage: stage.per_token_s,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "From handing a request to the stage to its end, for those that were finished.",
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
    """Steps that went through it since the start."""


@dataclass(frozen=True)
class StageLevel:
    """How a stage is."""

    is_up: bool
    num_restarts: int
    """Begun since the server's start."""
    num_corrupt: Mapping[str, int] = field(default_factory=dict)
    """Requests that ended because of corrupt data, by what was wrong."""


def pipeline_text(
    model_name: str,
    ar_stages: Mapping[str, ArStageMetrics],
    active: Mapping[str, int],
    queues: Mapping[tuple[str, str], QueueLevel],
    stages: Mapping[str, StageLevel],
) -> bytes:
    """`active` holds the unfinished requests of all stages by name, `stages` how they are; `queues` is keyed by the
    stages that it joins."""
    registry = CollectorRegistry()
    registry.register(_Pipeline(model_name, ar_stages, active, queues, stages))
    return generate_latest(registry)


class _Pipeline(Collector):
    def __init__(
        self,
        model_name: str,
        ar_stages: Mapping[str, ArStageMetrics],
        active: Mapping[str, int],
        queues: Mapping[tuple[str, str], QueueLevel],
        stages: Mapping[str, StageLevel],
    ) -> None:
        self._labels = {name: (model_name, _ENGINE, name) for name in ar_stages}
        self._ar_stages = ar_stages
        self._active = active
        self._queues = queues
        self._stages = stages

    def collect(self) -> Iterator[Metric]:
        yield from self._stage_families()
        active = GaugeMetricFamily("omni_active_requests", "Requests that a stage has not finished.", labels=["stage"])
        for name, count in self._active.items():
            active.add_metric([name], count)
        yield active
        is_up = GaugeMetricFamily("omni_stage_up", "1 while the stage's engine runs, else 0.", labels=["stage"])
        restarts = CounterMetricFamily(
            "omni_stage_restarts", "Restarts of a stage that were begun, successful or not.", labels=["stage"]
        )
        corrupt = CounterMetricFamily(
            "omni_corrupt_data",
            "Requests that ended because data of a stage could not be right, by what was wrong with it.",
            labels=["stage", "kind"],
        )
        for name, level in self._stages.items():
            is_up.add_metric([name], float(level.is_up))
            restarts.add_metric([name], level.num_restarts)
            for kind, count in level.num_corrupt.items():
                corrupt.add_metric([name, kind], count)
        yield from (is_up, restarts, corrupt)
        yield from self._queue_families()

    def _stage_families(self) -> Iterator[Metric]:
        stages = [(self._labels[name], stage) for name, stage in self._ar_stages.items()]
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
            "vllm:request_success", "Requests that ended, by finish reason.", labels=(*_LABELS, "finished_reason")
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
        labels = ["from_stage", "to_stage"]
        slots = GaugeMetricFamily("omni_shared_memory_slots", "Slots of the queue between two stages.", labels=labels)
        in_use = GaugeMetricFamily(
            "omni_shared_memory_slots_in_use", "Of these, those whose rows have not been read yet.", labels=labels
        )
        published = CounterMetricFamily(
            "omni_shared_memory_steps", "Steps whose rows went through the queue.", labels=labels
        )
        for edge, level in self._queues.items():
            slots.add_metric(edge, level.capacity)
            in_use.add_metric(edge, level.in_use)
            published.add_metric(edge, level.published)
        yield from (slots, in_use, published)


def _add_samples(family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram) -> None:
    names = dict(zip(_LABELS, labels, strict=True))
    (metric,) = histogram.collect()
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            suffix = sample.name.removeprefix(metric.name)
            family.add_sample(family.name + suffix, names | sample.labels, sample.value)
