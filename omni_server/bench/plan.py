"""The load levels of a run, with every request built before the first one is sent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omni_server.bench.adapters import Adapter, Question
from omni_server.bench.exchange import PreparedRequest
from omni_server.bench.load import poisson_arrivals_s
from omni_server.bench.results import LoadKind, level_label
from omni_server.bench.workload import Workload, make_turn


@dataclass(frozen=True)
class LevelPlan:
    kind: LoadKind
    load: float
    requests: int
    warmup: int
    number: int
    """Of the level in its run: prompts of different levels differ."""

    @property
    def label(self) -> str:
        return level_label(self.kind, self.load)

    def arrivals_s(self, seed: int) -> list[float]:
        """Of an open loop; the same for the same seed."""
        return poisson_arrivals_s(self.load, self.requests, np.random.default_rng([seed, self.number]))


def plan_levels(
    *,
    concurrency: Sequence[int] | None,
    request_rate: Sequence[float] | None,
    requests_per_client: int,
    num_requests: int,
    warmup: int,
) -> list[LevelPlan]:
    """One of `concurrency` and `request_rate` is given."""
    if concurrency is not None:
        return [
            LevelPlan("closed", clients, clients * requests_per_client, warmup, number)
            for number, clients in enumerate(concurrency)
        ]
    assert request_rate is not None
    return [LevelPlan("open", rate, num_requests, warmup, number) for number, rate in enumerate(request_rate)]


@dataclass(frozen=True)
class RequestFactory:
    """Builds the requests of a run; the same seed gives the same requests."""

    adapter: Adapter
    model: str
    voice: str
    workload: Workload
    temperature: float
    sample_tolerance: int
    seed: int

    def requests(self, level: LevelPlan) -> tuple[list[PreparedRequest], list[PreparedRequest]]:
        """Those that warm the server up, and those that are measured."""
        built = [self._request(level.number, index) for index in range(level.warmup + level.requests)]
        return built[: level.warmup], built[level.warmup :]

    def _request(self, level: int, index: int) -> PreparedRequest:
        turn = make_turn(self.workload, np.random.default_rng([self.seed, level, index]))
        question = Question(self.model, self.workload, turn, self.temperature, self.voice)
        return PreparedRequest(
            index=index,
            body=self.adapter.body(question),
            text_tokens=self.workload.text_tokens,
            samples=self.workload.expected_samples,
            sample_tolerance=self.sample_tolerance,
        )
