"""A diffusion runner over a base class that only loads a model, and requests for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import PoolingParams
from vllm.config import LoadConfig
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from omni_server.errors import StageError
from omni_server.protocol.diffusion import INPUT_KEY, STREAMS_KEY
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.transport.result import decode_result
from stages.runtime.diffusion_model import DiffusionBatch, DiffusionModel
from stages.runtime.diffusion_runner import DiffusionModelRunnerMixin


@dataclass
class SchedulerConfig:
    enable_chunked_prefill: bool = False


@dataclass
class EngineConfig:
    model: torch.nn.Module
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    additional_config: DiffusionRuntimeConfig | None = None
    load_config: LoadConfig = field(default_factory=LoadConfig)


class PlatformRunner:
    """What the mixin needs of vLLM's runner."""

    def __init__(self, vllm_config: EngineConfig, device: torch.device) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.load_config = vllm_config.load_config

    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.model = self.vllm_config.model

    def get_model(self) -> torch.nn.Module:
        return self.model


class Runner(DiffusionModelRunnerMixin, PlatformRunner):
    pass


def runner_for(model: torch.nn.Module) -> Runner:
    runner = Runner(EngineConfig(model), torch.device("cpu"))
    runner.load_model()
    return runner


class Sampler(DiffusionModel):
    """Answers by `answer`, and remembers the batches it was given."""

    def __init__(self, answer: Callable[[DiffusionBatch], object]) -> None:
        super().__init__(vllm_config=None)
        self.answer = answer
        self.batches: list[DiffusionBatch] = []

    def sample(self, batch: DiffusionBatch) -> Any:
        self.batches.append(batch)
        return self.answer(batch)


def sums(batch: DiffusionBatch) -> list[torch.Tensor]:
    """A result that tells the requests apart: the sum of the token ids, three times."""
    return [ids.sum().float().expand(3) for ids in batch.token_ids]


def new_request(
    request_id: str, token_ids: list[int], payload: object = b"in", *, num_streams: int | None = None
) -> NewRequestData:
    extra = None if payload is None else {INPUT_KEY: payload}
    if extra is not None and num_streams is not None:
        extra[STREAMS_KEY] = num_streams
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=[],
        sampling_params=None,
        pooling_params=PoolingParams(task="plugin", extra_kwargs=extra),
        block_ids=(),
        num_computed_tokens=0,
        lora_request=None,
    )


def step(*requests: NewRequestData, finished: tuple[str, ...] = ()) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(requests)
    output.num_scheduled_tokens = {r.req_id: len(r.prompt_token_ids or []) for r in requests}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.finished_req_ids = set(finished)
    return output


THREE = (new_request("a", [1, 2]), new_request("b", [10]), new_request("c", [100, 200, 300]))


def outcomes(output: ModelRunnerOutput) -> dict[str, list[float] | str]:
    """Per request its result or the message of its failure, in the output's order."""
    assert list(output.req_id_to_index) == output.req_ids
    assert list(output.req_id_to_index.values()) == list(range(len(output.req_ids)))
    assert output.sampled_token_ids == [[] for _ in output.req_ids]
    assert output.pooler_output is not None
    assert len(output.pooler_output) == len(output.req_ids)
    found: dict[str, list[float] | str] = {}
    for request_id, result in zip(output.req_ids, output.pooler_output, strict=True):
        assert isinstance(result, torch.Tensor)
        assert result.device.type == "cpu"
        try:
            found[request_id] = decode_result(result, "code2wav").tolist()
        except StageError as error:
            found[request_id] = error.message.removeprefix("stage 'code2wav': ")
    return found


RIGHT = {"a": [3.0] * 3, "b": [10.0] * 3, "c": [600.0] * 3}
