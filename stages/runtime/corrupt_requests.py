"""Requests whose data cannot be right are ended by their scheduler: each alone, and before its step's token is used."""

from collections.abc import Mapping

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from omni_server.protocol.corruption import Corruption, encode_corruption
from stages.runtime.batch import attached_findings


def step_findings(output: ModelRunnerOutput) -> dict[str, Corruption]:
    """What the workers found in a step, by request. vLLM counts the logits of each request that are not numbers
    (`VLLM_COMPUTE_NANS_IN_LOGITS`); where its rows are wrong as well, those are the cause."""
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
    """As aborts would; returns, each with its client's index, the outputs that say why. Requests that have ended are
    passed over.

    To be called before `update_from_output` of vLLM, which drops the results of requests that have ended meanwhile.
    """
    ended = []
    for request_id, corruption in findings.items():
        request = scheduler.requests.get(request_id)
        if request is None:
            continue
        # What was computed for it may be where the fault is: nobody else may find it in the prefix cache.
        groups = scheduler.kv_cache_manager.get_block_ids(request_id)
        scheduler.kv_cache_manager.evict_blocks({block for group in groups for block in group})
        scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=encode_corruption(corruption)
        )
        ended.append((request.client_index, output))
    return ended
