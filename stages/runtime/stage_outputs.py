"""Changes that a stage's scheduler makes to a step's messages to the server: token blocks, load reports,
corrupt requests."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from omni_server.config.chunk_plan import output_ends
from omni_server.protocol.corruption import Corruption, encode_corruption
from stages.runtime.stage_step import attached_findings

LOAD_REPORT_INTERVAL_S = 0.25
"""Between reports while the stage is busy. A stage that becomes idle reports immediately."""

# -- token blocks


@dataclass
class TokenBlock:
    """Tokens of one request that have not been sent to the server yet. They are sent in blocks of these
    `sizes` (`TOKENS_PER_OUTPUT_KEY`), with the codes predicted for them if `has_codes`."""

    sizes: Sequence[int]
    has_codes: bool = False
    """The results that come with the request's tokens are codes. Others, rows, are sent immediately."""
    num_sampled: int = 0
    unsent: list[int] = field(default_factory=list)
    unsent_codes: list[torch.Tensor] = field(default_factory=list)  # each [n, num_predicted]
    prefill_stats: PrefillStats | None = None

    def __post_init__(self) -> None:
        self._ends = output_ends(self.sizes)
        self._end = next(self._ends)

    def add(self, output: EngineCoreOutput) -> bool:
        """Add one step's output. Returns whether to send it; if so, it now includes all tokens held back
        before."""
        if self.has_codes and output.pooling_output is not None:
            self.unsent_codes.append(output.pooling_output)
            output.pooling_output = None
        self.unsent += output.new_token_ids
        self.num_sampled += len(output.new_token_ids)
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats
        is_complete = self.num_sampled >= self._end
        while self.num_sampled >= self._end:
            self._end = next(self._ends)
        if not is_complete and output.finish_reason is None and output.pooling_output is None:
            return False
        output.new_token_ids, self.unsent = self.unsent, []
        if self.unsent_codes:
            output.pooling_output, self.unsent_codes = torch.cat(self.unsent_codes), []
        output.prefill_stats, self.prefill_stats = self.prefill_stats, None
        return True


def hold_incomplete_blocks(outputs: dict[int, EngineCoreOutputs], blocks: Mapping[str, TokenBlock]) -> None:
    """Remove outputs that need not be sent yet from `outputs` (by client), and drop messages left without
    content."""
    for client, group in list(outputs.items()):
        group.outputs = [
            output
            for output in group.outputs
            if (block := blocks.get(output.request_id)) is None or block.add(output)
        ]
        if not group.outputs and group.scheduler_stats is None and not group.finished_requests:
            del outputs[client]


# -- load


class LoadReport:
    """Reports a stage's load to the server with messages that are sent anyway. One per scheduler.

    vLLM's own statistics (`log_stats`) would add a message to every step without output, defeating the token
    blocks, and a record per token in the server process, which all requests share.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock()
        self._was_idle = True

    def attach(self, scheduler: Scheduler, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Call after each step with its messages to the server, by client. Does nothing if one of them
        already has statistics."""
        if any(group.scheduler_stats is not None for group in outputs.values()):
            return
        num_running, num_waiting = scheduler.get_request_counts()
        is_idle = num_running == num_waiting == 0
        now = self._clock()
        # Once idle, the stage may send no message for a while that could carry the report.
        if self._was_idle if is_idle else (not outputs or now < self._due):
            return
        self._due = now + LOAD_REPORT_INTERVAL_S
        self._was_idle = is_idle
        message = next(iter(outputs.values()), None)
        if message is None:
            message = outputs[0] = EngineCoreOutputs()
        message.scheduler_stats = SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            kv_cache_usage=scheduler.get_kv_cache_usage(),
        )


# -- corrupt requests


def step_findings(output: ModelRunnerOutput) -> dict[str, Corruption]:
    """The corruption that the workers found in a step, by request id. vLLM counts the bad logits
    (`VLLM_COMPUTE_NANS_IN_LOGITS`); the workers attach what they find in rows and in the logits of predicted
    codes. Of several findings about a request, reports the cause: first its rows, then its next token's
    logits, then the codes predicted for that token."""
    counts = output.num_nans_in_logits or {}
    counted = {
        request_id: Corruption("logits", f"{count} of the next token's scores are not finite numbers")
        for request_id, count in counts.items()
        if count
    }
    attached = attached_findings(output)
    of_rows = {request_id: found for request_id, found in attached.items() if found.kind != "logits"}
    return {**attached, **counted, **of_rows}


def end_corrupt_requests(
    scheduler: Scheduler, findings: Mapping[str, Corruption]
) -> list[tuple[int, EngineCoreOutput]]:
    """End each of these requests as an abort would; skips requests that have already ended. Returns outputs
    with the reason, each with its client's index.

    Call before vLLM's `update_from_output`, which drops the results of requests that have ended meanwhile.
    """
    ended = []
    for request_id, corruption in findings.items():
        request = scheduler.requests.get(request_id)
        if request is None:
            continue
        # The request's KV blocks may be corrupt: no other request may find them in the prefix cache.
        groups = scheduler.kv_cache_manager.get_block_ids(request_id)
        scheduler.kv_cache_manager.evict_blocks({block for group in groups for block in group})
        scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=encode_corruption(corruption)
        )
        ended.append((request.client_index, output))
    return ended
