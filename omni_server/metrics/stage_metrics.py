"""Metrics of one autoregressive stage, counted as vLLM counts them.

Kept as plain numbers, which cost next to nothing per token; `omni_server.metrics.pipeline` names them.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import Histogram

from omni_server.metrics.buckets import FIRST_OUTPUT_S, PER_TOKEN_S, REQUEST_S

Clock = Callable[[], float]


def _histogram(buckets: tuple[float, ...]) -> Histogram:
    """Without a registry: it is read by `omni_server.metrics.pipeline`, which gives it its name."""
    return Histogram("seconds", "Seconds.", buckets=buckets, registry=None)


@dataclass
class ArStageMetrics:
    """Belongs to one event loop."""

    num_running: int = 0
    """This and the next two as the scheduler last reported them."""
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Used fraction of the KV cache, 0 to 1."""
    prompt_tokens: int = 0
    """Of prompts whose first token has been sampled."""
    cached_prompt_tokens: int = 0
    """Of these, hits of the prefix cache."""
    generation_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason: stop, length, abort, error."""
    first_token_s: Histogram = field(default_factory=lambda: _histogram(FIRST_OUTPUT_S))
    per_token_s: Histogram = field(default_factory=lambda: _histogram(PER_TOKEN_S))
    """One value per request: mean time between its tokens."""
    request_s: Histogram = field(default_factory=lambda: _histogram(REQUEST_S))

    def clear(self) -> None:
        """Forget what was counted: the warm-up does not count."""
        self.prompt_tokens = self.cached_prompt_tokens = self.generation_tokens = 0
        self.ended.clear()
        self.first_token_s = _histogram(FIRST_OUTPUT_S)
        self.per_token_s = _histogram(PER_TOKEN_S)
        self.request_s = _histogram(REQUEST_S)

    def reported(self, *, num_running: int, num_waiting: int, kv_cache_usage: float) -> None:
        self.num_running, self.num_waiting, self.kv_cache_usage = num_running, num_waiting, kv_cache_usage

    def request(
        self, num_prompt_tokens: int, *, has_each_token: bool, clock: Clock = time.perf_counter
    ) -> "RequestMeter":
        """A request that is submitted to the stage now. Without `has_each_token`, its tokens arrive in blocks
        and the times of single tokens are unknown."""
        return RequestMeter(self, num_prompt_tokens, has_each_token, clock)


class RequestMeter:
    """One request of the stage."""

    def __init__(
        self, metrics: ArStageMetrics, num_prompt_tokens: int, has_each_token: bool, clock: Clock
    ) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._has_each_token = has_each_token
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._last = self._began
        self._num_first_tokens = 0
        self._num_tokens = 0
        self._is_over = False

    def tokens(self, count: int, *, num_cached: int) -> None:
        """`count` tokens have arrived; `num_cached` tokens of the prompt were hits of the prefix cache."""
        if count == 0:
            return
        metrics = self._metrics
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
            self._num_first_tokens = count
            metrics.prompt_tokens += self._num_prompt_tokens
            metrics.cached_prompt_tokens += num_cached
            if self._has_each_token:
                metrics.first_token_s.observe(self._last - self._began)
        self._num_tokens += count
        metrics.generation_tokens += count

    def ended(self, reason: str) -> None:
        """Counted once."""
        if self._is_over:
            return
        self._is_over = True
        metrics = self._metrics
        metrics.ended[reason] += 1
        if reason not in ("stop", "length"):
            return
        metrics.request_s.observe(self._clock() - self._began)
        num_later = self._num_tokens - self._num_first_tokens
        if self._has_each_token and self._first is not None and num_later > 0:
            metrics.per_token_s.observe((self._last - self._first) / num_later)
