"""Scheduling of requests that send or receive rows. A mixin over vLLM's schedulers.

Nothing of vLLM is copied: a request is *held back* for one step with `next_decode_eligible_step`, the field
that vLLM's own diffusion scheduler uses for it, or, while it waits, through `_handle_blocked_waiting_request`.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from omni_server.native_stderr import redirect_native_stderr
from omni_server.protocol.corruption import Corruption
from omni_server.protocol.feeds import FEEDS_KEY, AddressedFeed, decode_feeds
from omni_server.protocol.parent_watch import end_with_parent
from omni_server.protocol.rows import (
    REQUEST_KEY,
    RowsFeed,
    RowsInput,
    RowsOutput,
    SharedBlock,
    decode_payload,
    decode_request,
)
from omni_server.protocol.runtime_config import StageRuntimeConfig
from omni_server.protocol.vllm_fields import TOKENS_PER_OUTPUT_KEY
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.batch import StageStep, TakenSlot, attach_step
from stages.runtime.corrupt_requests import end_corrupt_requests, step_findings
from stages.runtime.grammar_compilers import GrammarCompilers, GrammarRefusedError
from stages.runtime.grammar_watch import GrammarWatch, WatchedGrammar
from stages.runtime.joint_batches import Arrivals, without_tokens
from stages.runtime.load_report import LoadReport
from stages.runtime.queue_end import open_queue
from stages.runtime.token_blocks import TokenBlock, keep_back

PROMPT_PAUSE_S, LONGEST_PROMPT_PAUSE_S = 0.002, 0.008
"""A stage that is not fed gets prompts from the server, which prepares one after the other."""


@dataclass
class _Fed:
    """How far the rows of one request have come."""

    num_rows: int = 0
    num_speakable: int | None = None
    is_final: bool = False

    is_broken: bool = False
    """Its rows cannot be right; it is to be ended."""

    def takes(self, feed: RowsFeed) -> str | None:
        """What is wrong with the feed, if its rows are not the next ones; else None, and they have been counted."""
        end = self.num_rows
        if feed.payload is not None:
            if not feed.payload.segments:
                return "a message without rows"
            for segment in feed.payload.segments:
                if segment.first_position != end:
                    return f"rows from position {segment.first_position}, but {end} rows have come"
                end += segment.num_rows
        if feed.final_length is not None and feed.final_length > end:
            return f"{end} rows have come of {feed.final_length}"
        self.num_rows = end
        self.num_speakable = feed.num_speakable
        self.is_final |= feed.final_length is not None
        return None

    def has_row(self, position: int) -> bool:
        if self.is_final:
            return True
        limit = self.num_rows if self.num_speakable is None else min(self.num_rows, self.num_speakable)
        return position < limit


class StageSchedulerMixin:
    """Over vLLM's `Scheduler` or `AsyncScheduler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The worker does the same two, but may live in another process.
        end_with_parent()
        redirect_native_stderr()
        config = self.vllm_config.additional_config  # type: ignore[attr-defined]
        if not isinstance(config, StageRuntimeConfig):
            raise TypeError("an omni stage needs additional_config=StageRuntimeConfig(...)")
        self._input_queue: SlabQueue | None = open_queue(config.input_queue)
        self._output_queue: SlabQueue | None = open_queue(config.output_queue)
        self._fed: dict[str, _Fed] = {}
        self._sending: set[str] = set()
        self._token_blocks: dict[str, TokenBlock] = {}
        self._feeds: list[AddressedFeed] = []  # for the workers, with the next step
        self._findings: dict[str, Corruption] = {}  # requests to be ended with the next output
        self._is_output_full = False
        self._load_report = LoadReport()
        self._grammar_watch = GrammarWatch()
        self._uncompiled: dict[str, str] = {}  # requests that ended in this step for their grammar, and why
        self.structured_output_manager.executor = GrammarCompilers()  # type: ignore[attr-defined]
        self.arrivals: Arrivals | None = None
        if config.input_queue is None:
            self.arrivals = Arrivals(PROMPT_PAUSE_S, LONGEST_PROMPT_PAUSE_S)

    # -- requests and feeds come in (both as vLLM's ADD)

    def add_request(self, request: Request) -> None:
        extra = {} if request.sampling_params is None else request.sampling_params.extra_args or {}
        if FEEDS_KEY in extra:
            for request_id, feed in decode_feeds(extra[FEEDS_KEY]):
                self._take_feed(request_id, feed)
            return
        if TOKENS_PER_OUTPUT_KEY in extra:
            self._token_blocks[request.request_id] = TokenBlock(extra[TOKENS_PER_OUTPUT_KEY])
        match decode_request(extra[REQUEST_KEY]) if REQUEST_KEY in extra else None:
            case RowsInput():
                self._fed[request.request_id] = _Fed()
            case RowsOutput():
                self._sending.add(request.request_id)
                # A token found in the prefix cache is not computed, so it would have no row.
                request.skip_reading_prefix_cache = True
                if self.arrivals is not None:  # what is not spoken gains nothing by staying together
                    self.arrivals.arrived(is_idle=not self.has_unfinished_requests())  # type: ignore[attr-defined]
        super().add_request(request)  # type: ignore[misc]

    def _take_feed(self, request_id: str, feed: RowsFeed) -> None:
        fed = self._fed.get(request_id)
        if fed is None or fed.is_broken:  # late: the request has ended. vLLM would start a new one from it
            self._drop(feed)
            return
        problem = fed.takes(feed)
        if problem is not None:
            fed.is_broken = True
            self._findings[request_id] = Corruption("row_sequence", problem)
            self._drop(feed)
            return
        self._feeds.append((request_id, feed))

    def _drop(self, feed: RowsFeed) -> None:
        if feed.payload is not None and isinstance(feed.payload.block, SharedBlock):
            assert self._input_queue is not None
            if self._input_queue.is_open(feed.payload.block):  # else it may have been used again
                self._input_queue.finish_all(feed.payload.block)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """The one place every end of a request passes: finished, aborted, failed."""
        request_id = request.request_id
        if request.status == RequestStatus.FINISHED_ERROR:
            self._explain(request)
        self._findings.pop(request_id, None)
        self._sending.discard(request_id)
        self._token_blocks.pop(request_id, None)
        if self._fed.pop(request_id, None) is not None:
            for owner, feed in self._feeds:
                if owner == request_id:
                    self._drop(feed)
            self._feeds = [(owner, feed) for owner, feed in self._feeds if owner != request_id]
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    # -- holding back

    def _may_run(self, request: Request) -> bool:
        if request.request_id in self._findings:
            return False
        if self._is_output_full and request.request_id in self._sending:
            return False
        fed = self._fed.get(request.request_id)
        return fed is None or fed.has_row(request.num_tokens + request.num_output_placeholders - 1)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):  # type: ignore[misc]
            return False
        self._watch_grammar(request)
        return self._may_run(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.arrivals is not None and self.arrivals.is_pausing:
            with without_tokens(self):  # type: ignore[arg-type]
                return super().schedule(throttle_prefills)  # type: ignore[misc,no-any-return]
        self._is_output_full = bool(
            self._sending and self._output_queue is not None and self._output_queue.num_free() == 0
        )
        for request in self.running:  # type: ignore[attr-defined]
            if not self._may_run(request):
                # super().schedule() first adds 1 to current_step and then skips requests whose eligible step
                # lies ahead: + 2 skips exactly this call.
                eligible = self.current_step + 2  # type: ignore[attr-defined]
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)
        output: SchedulerOutput = super().schedule(throttle_prefills)  # type: ignore[misc]
        slot = None
        if self._output_queue is not None and not self._sending.isdisjoint(output.num_scheduled_tokens):
            taken = self._output_queue.take()
            assert taken is not None, "requests that send rows were scheduled without a free slot"
            slot = TakenSlot(*taken)
        if slot is not None or self._feeds:
            attach_step(output, StageStep(slot, tuple(self._feeds)))
            self._feeds = []
        return output

    def has_requests(self) -> bool:
        """False while every request waits for rows: the engine then blocks on its input and a feed wakes it.

        A full output queue is different: the engine keeps asking (vLLM sleeps 1 ms between steps without work). A
        slot is freed by a store into shared memory in the consumer's worker, which wakes nobody. A message about it
        would have to go through the consumer's engine and the server, where it is work for the process that all
        requests share, to save this one, which has nothing else to do, part of a millisecond. It comes to that only
        when the consumer is `capacity` steps behind; anything that arrives meanwhile ends the wait as well.
        """
        if not super().has_requests():  # type: ignore[misc]
            return False
        if self._feeds or self._findings or not self._fed or self.has_finished_requests():  # type: ignore[attr-defined]
            return True
        queues = (self.running, self.waiting, self.kv_holding_waiting)  # type: ignore[attr-defined]
        return any(self._may_run(request) for queue in queues for request in queue)

    # -- grammars

    def _watch_grammar(self, request: Request) -> None:
        """Called when the grammar has been compiled and no token of it has been asked for."""
        structured = request.structured_output_request
        if structured is None:
            return
        grammar = structured.grammar
        if isinstance(grammar, StructuredOutputGrammar) and not isinstance(grammar, WatchedGrammar):
            structured.grammar = self._grammar_watch.watched(grammar, request.request_id)

    def _explain(self, request: Request) -> None:
        """vLLM sends `stop_reason` with the last output of the request, unless its grammar was not compiled."""
        structured = request.structured_output_request
        match structured.grammar if structured is not None else None:
            case WatchedGrammar(refusal=refusal):
                request.stop_reason = refusal
            case GrammarRefusedError(reason=reason):
                self._uncompiled[request.request_id] = reason

    # -- outputs

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Tokens are kept back until a block of them is complete (`TOKENS_PER_OUTPUT_KEY`).

        vLLM leaves out outputs of requests that ended during the step; the portions of their rows end here.
        """
        # Before the step's results are looked at: super() passes over those of requests that have ended.
        findings, self._findings = step_findings(model_runner_output) | self._findings, {}
        ended = end_corrupt_requests(self, findings) if findings else []  # type: ignore[arg-type]
        # Taken before: a request that finishes is forgotten by super().
        blocks = dict(self._token_blocks)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if self._uncompiled:
            uncompiled, self._uncompiled = self._uncompiled, {}
            for group in outputs.values():
                for output in group.outputs:
                    output.stop_reason = uncompiled.get(output.request_id, output.stop_reason)
        for client, output in ended:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        if self._output_queue is not None and model_runner_output.pooler_output:
            delivered = {
                output.request_id
                for group in outputs.values()
                for output in group.outputs
                if output.pooling_output is not None
            }
            for request_id, rows in zip(model_runner_output.req_ids, model_runner_output.pooler_output, strict=True):
                if rows is not None and request_id not in delivered:
                    block = decode_payload(memoryview(rows.numpy())).block
                    assert isinstance(block, SharedBlock)
                    self._output_queue.finish_all(block)
        if blocks:
            keep_back(outputs, blocks)
        if self.arrivals is not None and scheduler_output.total_num_scheduled_tokens:
            self.arrivals.step_ended()
        self._load_report.attach(self, outputs)  # type: ignore[arg-type]
        return outputs


class StageScheduler(StageSchedulerMixin, Scheduler):
    """For engines without async scheduling (vLLM on CPU)."""


class AsyncStageScheduler(StageSchedulerMixin, AsyncScheduler):
    """For engines with async scheduling (vLLM's default on CUDA)."""
