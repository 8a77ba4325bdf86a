"""What a stage's scheduler changes in a step's messages to the server: blocks of tokens, its load, corrupt
requests."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from omni_server.protocol.corruption import Corruption, encode_corruption
from stages.runtime.stage_step import attached_findings

LOAD_REPORT_INTERVAL_S = 0.25
"""Between two reports while the stage is busy. When it falls idle it reports at once."""

# -- blocks of tokens


@dataclass
class TokenBlock:
    """Tokens of one request that have not been sent to the server yet: they leave in blocks of `size` tokens
    (`TOKENS_PER_OUTPUT_KEY`)."""

    size: int
    num_sampled: int = 0
    unsent: list[int] = field(default_factory=list)
    prefill_stats: PrefillStats | None = None

    def add(self, output: EngineCoreOutput) -> bool:
        """One step's output. True if it is to be sent: it then carries everything that was kept back
        before."""
        self.unsent += output.new_token_ids
        self.num_sampled += len(output.new_token_ids)
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats
        num_sent = self.num_sampled - len(self.unsent)
        is_complete = num_sent // self.size < self.num_sampled // self.size
        if not is_complete and output.finish_reason is None and output.pooling_output is None:
            return False
        output.new_token_ids, self.unsent = self.unsent, []
        output.prefill_stats, self.prefill_stats = self.prefill_stats, None
        return True


def hold_incomplete_blocks(outputs: dict[int, EngineCoreOutputs], blocks: Mapping[str, TokenBlock]) -> None:
    """Take out of `outputs` (by client) what need not be sent yet; a message left without content is
    dropped."""
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
    """How full a stage is, told to the server with messages that are sent anyway. One per scheduler.

    vLLM's own statistics (`log_stats`) would add a message to every step without output, which blocks of
    tokens are there to save, and a record per token in the server process, which all requests share.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock()
        self._was_idle = True

    def attach(self, scheduler: Scheduler, outputs: dict[int, EngineCoreOutputs]) -> None:
        """To be called after each step, with its messages to the server, by client. Statistics that one of
        them holds already stay."""
        if any(group.scheduler_stats is not None for group in outputs.values()):
            return
        num_running, num_waiting = scheduler.get_request_counts()
        is_idle = num_running == num_waiting == 0
        now = self._clock()
        # After falling idle, the stage sends no message for a while that could carry the report later.
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
    """What the workers found corrupt in a step, by request id. vLLM counts the logits that are not numbers
    (`VLLM_COMPUTE_NANS_IN_LOGITS`); where a request's rows are wrong as well, they are the cause."""
    counts = output.num_nans_in_logits or {}
    findings = {
        request_id: Corruption("logits", f"{count} of the next token's scores are not finite numbers")
        for request_id, count in counts.items()
        if count
    }
    return findings | dict(attached_findings(output))


def end_corrupt_requests(
    scheduler: Scheduler, findings: Mapping[str, Corruption]
) -> list[tuple[int, EngineCoreOutput]]:
    """End each of these requests as an abort would; those that have ended already are skipped. Returns the
    outputs that say why, each with its client's index.

    To be called before `update_from_output` of vLLM, which drops the results of requests that have ended
    meanwhile.
    """
    ended = []
    for request_id, corruption in findings.items():
        request = scheduler.requests.get(request_id)
        if request is None:
            continue
        # The blocks computed for it may hold the fault: no other request may find them in the prefix cache.
        groups = scheduler.kv_cache_manager.get_block_ids(request_id)
        scheduler.kv_cache_manager.evict_blocks({block for group in groups for block in group})
        scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=encode_corruption(corruption)
        )
        ended.append((request.client_index, output))
    return ended
