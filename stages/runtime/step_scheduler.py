"""The scheduler of stages whose requests take many steps over the same tokens, such as denoising an image.

The tokens of a request's prompt are those of its image. A step computes all of them, and the next step
computes them again, until the executor returns a result. So `max_num_batched_tokens` limits what a step
computes, requests join and leave between two steps, and priorities and aborts are vLLM's own.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput


@dataclass
class StepOutput(ModelRunnerOutput):
    """A step's results: None for a request that takes further steps."""

    events: dict[str, list[bytes]] = field(default_factory=dict)
    """Encoded `omni_server.protocol.images.StageEvent`, by request."""


class StepScheduler(Scheduler):
    """vLLM's scheduler, for `StepOutput`. An event is sent as an output that does not finish its request."""

    def update_from_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        outputs = super().update_from_output(scheduler_output, output)
        events = output.events if isinstance(output, StepOutput) else {}
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            request.num_computed_tokens = 0
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.extend(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[],
                    pooling_output=torch.frombuffer(bytearray(event), dtype=torch.uint8),
                )
                for event in events.get(request_id, ())
            )
        return outputs
