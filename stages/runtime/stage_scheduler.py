"""vLLM's scheduler for stages whose requests send or receive rows, with token blocks and grammar limits.

It copies no vLLM code. To *hold back* a request for one step, it sets `next_decode_eligible_step`, the field
that vLLM's own diffusion scheduler uses for this, or, for a waiting request, overrides
`_handle_blocked_waiting_request`.
"""

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from omni_server.platform.native_stderr import redirect_native_stderr
from omni_server.protocol.corruption import Corruption
from omni_server.protocol.parent_watch import end_with_parent
from omni_server.protocol.rows import (
    FEEDS_KEY,
    REQUEST_KEY,
    RowsInput,
    RowsOutput,
    SharedBlock,
    decode_feeds,
    decode_payload,
    decode_request,
)
from omni_server.protocol.vllm_fields import TOKENS_PER_OUTPUT_KEY
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.batching_delay import BatchingDelay, BatchingScheduler
from stages.runtime.embeddings_in import FeedTracker
from stages.runtime.embeddings_out import last_sent
from stages.runtime.grammar_watch import GrammarWatch, WatchedGrammar
from stages.runtime.stage_outputs import (
    LoadReport,
    TokenBlock,
    end_corrupt_requests,
    hold_incomplete_blocks,
    step_findings,
)
from stages.runtime.stage_step import StageStep, TakenSlot, attach_step, open_queue, open_queues, stage_config

PROMPT_DELAY_S, MAX_PROMPT_DELAY_S = 0.002, 0.008
"""For the prompts of a stage that is not fed. They arrive from the server, which prepares them one by one."""

MAX_HOLD_S = 0.2
"""How long a request whose text does not go on keeps its seat and its KV blocks if others need them. It is
then preempted, and recomputed once there is more text."""

COMPILE_NICENESS = 10
"""Gives a tenth of the engine's share of a contended core. With much less, a thread that holds the
interpreter lock would keep the engine waiting."""


class StageScheduler(BatchingScheduler):
    """For engines without async scheduling (vLLM on CPU)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The worker calls both as well, but may run in another process.
        end_with_parent()
        redirect_native_stderr()
        config = stage_config(self.vllm_config)
        self._output_queue: SlabQueue | None = open_queue(config.output_queue)
        self._has_codes = config.num_predicted > 0
        self._feeds = FeedTracker(open_queues(config.input_queues))
        self._senders: dict[str, float] = {}  # position behind the last row that is sent
        self._held_since: dict[str, float] = {}
        """When a running request was first found without the row of its next step."""
        # Another stage sends its rows sooner than they could be computed again.
        self._reads_text = config.row_table and not config.input_queues
        self._token_blocks: dict[str, TokenBlock] = {}
        self._findings: dict[str, Corruption] = {}  # requests to end with the next output
        self._is_output_full = False
        self._load_report = LoadReport()
        self._grammar_watch = GrammarWatch()
        self._grammars: dict[str, WatchedGrammar] = {}
        # For grammars that the server has checked. xgrammar's threads get the priority of those that start
        # them.
        self.structured_output_manager.executor = ThreadPoolExecutor(
            max(1, (os.cpu_count() or 1) // 2), "grammar compiler", os.nice, (COMPILE_NICENESS,)
        )
        self.batching_delay = None if config.is_fed else BatchingDelay(PROMPT_DELAY_S, MAX_PROMPT_DELAY_S)

    # -- lifecycle of requests and feeds (both arrive as vLLM's ADD)

    def add_request(self, request: Request) -> None:
        extra = {} if request.sampling_params is None else request.sampling_params.extra_args or {}
        if FEEDS_KEY in extra:
            for request_id, feed in decode_feeds(extra[FEEDS_KEY]):
                problem = self._feeds.take(request_id, feed)
                if problem is not None:
                    self._findings[request_id] = Corruption("row_sequence", problem)
            return
        if TOKENS_PER_OUTPUT_KEY in extra:
            self._token_blocks[request.request_id] = TokenBlock(
                extra[TOKENS_PER_OUTPUT_KEY], has_codes=self._has_codes
            )
        match decode_request(extra[REQUEST_KEY]) if REQUEST_KEY in extra else None:
            case RowsInput():
                self._feeds.announce(request.request_id)
            case RowsOutput() as output:
                self._senders[request.request_id] = last_sent(output)
                # A token found in the prefix cache is not computed and would have no row.
                request.skip_reading_prefix_cache = True
        super().add_request(request)

    def _may_come_with_others(self, request: Request) -> bool:
        return request.request_id in self._senders  # batching does not help text-only answers

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        ended: list[Request] = super().finish_requests(request_ids, finished_status)
        self._forget_ended()
        return ended

    def _forget_ended(self) -> None:
        """Called wherever requests end. vLLM collects their ids in `finished_req_ids` until the next step."""
        for request_id in self.finished_req_ids:
            self._findings.pop(request_id, None)
            self._senders.pop(request_id, None)
            self._token_blocks.pop(request_id, None)
            self._grammars.pop(request_id, None)
            self._feeds.forget(request_id)

    # -- holding back

    def _may_run(self, request: Request) -> bool:
        if request.request_id in self._findings:
            return False
        if self._is_output_full and self._sends_rows(request):
            return False
        next_position = request.num_tokens + request.num_output_placeholders - 1
        return self._feeds.has_row(request.request_id, next_position)

    def _sends_rows(self, request: Request) -> bool:
        """Whether the request's next step may compute rows that are sent."""
        return request.num_computed_tokens < self._senders.get(request.request_id, 0)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        is_ready: bool = super()._handle_blocked_waiting_request(request)
        if is_ready:
            self._watch_grammar(request)
        return is_ready and self._may_run(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._is_output_full = bool(
            self._senders and self._output_queue is not None and self._output_queue.num_free() == 0
        )
        for request in self._held():
            # super().schedule() first adds 1 to current_step and then skips requests whose eligible step
            # is in the future: + 2 skips exactly this call.
            eligible = self.current_step + 2
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)
        self._preempt_held()
        # vLLM advances `num_computed_tokens` when it schedules a request.
        requests = self.requests if self._senders else {}
        sending = {name for name, request in requests.items() if self._sends_rows(request)}
        output: SchedulerOutput = super().schedule(throttle_prefills)
        slot = None
        if self._output_queue is not None and not sending.isdisjoint(output.num_scheduled_tokens):
            taken = self._output_queue.take()
            assert taken is not None, "requests that send rows were scheduled without a free slot"
            slot = TakenSlot(*taken)
        if slot is not None or self._feeds.has_pending:
            attach_step(output, StageStep(slot, self._feeds.take_pending()))
        return output

    def _held(self) -> list[Request]:
        """The running requests that wait."""
        held = [request for request in self.running if not self._may_run(request)]
        if self._reads_text:
            now = time.monotonic()
            self._held_since = {r.request_id: self._held_since.get(r.request_id, now) for r in held}
        return held

    def _preempt_held(self) -> None:
        """Preempts requests whose text has not gone on for `MAX_HOLD_S`, if others need their places."""
        now = time.monotonic()
        ready: list[Request] | None = None
        for request in [
            r for r in self.running if now - self._held_since.get(r.request_id, now) >= MAX_HOLD_S
        ]:
            if ready is None:
                ready = list(filter(self._may_run, self.waiting))
            if self._has_room_for(ready):
                return
            self.running.remove(request)
            self._preempt_request(request, now)

    def _has_room_for(self, ready: list[Request]) -> bool:
        """Whether these requests can run beside the running ones, each of which may need another block."""
        num_blocks = len(self.running) - len(self._held_since)
        num_blocks += sum(-(-request.num_tokens // self.block_size) for request in ready)
        has_blocks = num_blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks()
        return has_blocks and len(self.running) + len(ready) <= self.max_num_running_reqs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._held_since.pop(request.request_id, None)
        super()._preempt_request(request, *args, **kwargs)

    def has_requests(self) -> bool:
        """Returns False while every request waits for rows: the engine then blocks until a feed arrives.

        With a full output queue the engine polls instead (vLLM sleeps 1 ms between steps without work). The
        consumer's worker frees a slot with a store to shared memory, which wakes no process. A message would
        have to pass through the consumer's engine and the server, and would cost time in the process that all
        requests share to save this idle one part of a millisecond. The queue fills only when the consumer is
        `capacity` steps behind, and any message that arrives meanwhile also ends the wait.
        """
        if not super().has_requests():
            return False
        if self._feeds.has_pending or self._findings or not len(self._feeds) or self.has_finished_requests():
            return True
        queues = (self.running, self.waiting, self.kv_holding_waiting)
        return any(self._may_run(request) for queue in queues for request in queue)

    # -- grammars

    def _watch_grammar(self, request: Request) -> None:
        """Watch a compiled grammar before any token is requested from it."""
        structured = request.structured_output_request
        grammar = None if structured is None else structured.grammar
        if isinstance(grammar, StructuredOutputGrammar) and not isinstance(grammar, WatchedGrammar):
            watched = self._grammar_watch.watched(grammar, request.request_id)
            structured.grammar = self._grammars[request.request_id] = watched

    # -- outputs

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Holds back tokens until a block of them is complete (`TOKENS_PER_OUTPUT_KEY`).

        vLLM omits outputs of requests that ended during the step; their row portions are released here.
        """
        # Must precede super(), which skips the results of requests that have ended.
        findings, self._findings = step_findings(model_runner_output) | self._findings, {}
        ended = end_corrupt_requests(self, findings) if findings else []
        # Copy these first: a request that ends in this step loses its entries.
        blocks, grammars = dict(self._token_blocks), dict(self._grammars)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        self._forget_ended()
        if self._reads_text:
            self._held()  # the engine may make no other step before another request needs their places
        if grammars:
            _explain_refusals(outputs, grammars)
        for client, output in ended:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        if self._output_queue is not None and model_runner_output.pooler_output and not self._has_codes:
            self._end_undelivered(self._output_queue, outputs, model_runner_output)
        if blocks:
            hold_incomplete_blocks(outputs, blocks)
        self._load_report.attach(self, outputs)
        return outputs

    @staticmethod
    def _end_undelivered(
        queue: SlabQueue, outputs: dict[int, EngineCoreOutputs], model_runner_output: ModelRunnerOutput
    ) -> None:
        """Release the portions of rows that no output carries."""
        delivered = {
            output.request_id
            for group in outputs.values()
            for output in group.outputs
            if output.pooling_output is not None
        }
        for request_id, rows in zip(
            model_runner_output.req_ids, model_runner_output.pooler_output, strict=True
        ):
            if rows is not None and request_id not in delivered:
                block = decode_payload(memoryview(rows.numpy())).block
                assert isinstance(block, SharedBlock)
                queue.finish_all(block)


def _explain_refusals(outputs: dict[int, EngineCoreOutputs], grammars: dict[str, WatchedGrammar]) -> None:
    """Set `stop_reason`: vLLM ends a request whose grammar fails with an error but no reason."""
    for group in outputs.values():
        for output in group.outputs:
            if output.finish_reason == FinishReason.ERROR and output.request_id in grammars:
                output.stop_reason = grammars[output.request_id].refusal


class AsyncStageScheduler(StageScheduler, AsyncScheduler):
    """For engines with async scheduling (vLLM's default on CUDA)."""
