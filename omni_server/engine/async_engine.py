"""vLLM's `AsyncLLM` for our stages: rows that come beside tokens are taken off before vLLM sees the output."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.inputs import EngineInput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestOutputCollector
from vllm.v1.metrics.stats import SchedulerStats

from omni_server.metrics.stage_metrics import ArStageMetrics
from omni_server.protocol.feeds import FEEDS_KEY, FEEDS_REQUEST_ID, AddressedFeed, encode_feeds
from omni_server.protocol.rows import RowsPayload, SharedBlock, decode_payload
from omni_server.transport.block_ledger import BlockLedger
from omni_server.transport.slab_queue import SlabQueue

RowSink = Callable[[RowsPayload], None]


class RowOutputProcessor(OutputProcessor):
    """Splits the payloads of rows off the outputs of generating requests.

    vLLM takes an output with a pooling result for a pooling request's and does not detokenise it.
    """

    row_sinks: dict[str, RowSink]
    row_queue: SlabQueue | None
    row_ledger: BlockLedger | None
    stage_metrics: ArStageMetrics

    def update_scheduler_stats(self, scheduler_stats: SchedulerStats | None) -> None:
        """What the stage's scheduler reports from time to time (`stages.runtime.stage_outputs`)."""
        if scheduler_stats is not None:
            self.stage_metrics.reported(
                num_running=scheduler_stats.num_running_reqs,
                num_waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                kv_cache_usage=scheduler_stats.kv_cache_usage,
            )
        super().update_scheduler_stats(scheduler_stats)

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        kept = []
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            is_pooling = state is not None and state.detokenizer is None
            if output.pooling_output is None or is_pooling:
                kept.append(output)
                continue
            payload = decode_payload(memoryview(output.pooling_output.numpy()))
            output.pooling_output = None
            self._deliver(None if state is None else state.external_req_id, payload)
            if output.new_token_ids or output.finish_reason is not None:
                kept.append(output)
            elif state is not None and output.prefill_stats is not None:
                # A chunk of the prompt: rows, no token yet. vLLM keeps the statistics with the first output.
                state.num_cached_tokens = output.prefill_stats.num_cached_tokens
        return super().process_outputs(kept, *args, **kwargs)

    def _deliver(self, request_id: str | None, payload: RowsPayload) -> None:
        if self.row_ledger is not None and isinstance(payload.block, SharedBlock):
            self.row_ledger.received(payload.block)
        sink = None if request_id is None else self.row_sinks.get(request_id)
        if sink is not None:
            sink(payload)
        elif isinstance(payload.block, SharedBlock):  # the request has ended meanwhile
            assert self.row_queue is not None
            self.row_queue.finish_all(payload.block)


class StageAsyncLLM(AsyncLLM):
    """`row_sinks` maps the id given to `add_request` to whoever takes the rows; set it before that call."""

    row_queue: SlabQueue | None = None
    row_ledger: BlockLedger | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stage_metrics = ArStageMetrics()
        """Filled from what the engine reports."""
        super().__init__(*args, **kwargs)

    def _run_output_handler(self) -> None:
        # AsyncLLM makes its output processor itself and has no hook for its class; this method runs before
        # the first output and is the last moment to change it.
        processor = self.output_processor
        if not isinstance(processor, RowOutputProcessor):
            processor.__class__ = RowOutputProcessor
            processor.row_sinks = {}
            processor.row_queue = self.row_queue
            processor.row_ledger = self.row_ledger
            processor.stage_metrics = self.stage_metrics
        super()._run_output_handler()

    @property
    def row_sinks(self) -> dict[str, RowSink]:
        self._run_output_handler()
        assert isinstance(self.output_processor, RowOutputProcessor)
        return self.output_processor.row_sinks

    async def add_structured_request(
        self, request_id: str, engine_input: EngineInput, params: SamplingParams
    ) -> RequestOutputCollector:
        """`add_request` for `params` with a grammar. vLLM compiles it for a check, which can take seconds, and of a
        rendered prompt does so on the event loop; here it happens in a thread."""
        tasks = await self.get_supported_tasks()
        request = await asyncio.to_thread(
            self.input_processor.process_inputs, request_id, engine_input, params, supported_tasks=tasks
        )
        return await self.add_request(request_id, request, params)

    async def send_feeds(self, feeds: Sequence[AddressedFeed]) -> None:
        """Send rows to running requests.

        They travel as one of vLLM's ADD messages, so that they cannot overtake a request that was added before; our
        scheduler takes them out. The message is with the socket before this first waits for anything.
        """
        await self.engine_core.add_request_async(
            EngineCoreRequest(
                request_id=FEEDS_REQUEST_ID,
                prompt_token_ids=[0],
                mm_features=None,
                sampling_params=SamplingParams(max_tokens=1, extra_args={FEEDS_KEY: encode_feeds(feeds)}),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
