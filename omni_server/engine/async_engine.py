"""vLLM's client of an engine, as our stages use it. Rows, predicted codes and events are removed before vLLM
sees an output, engine errors become ours, and the resources of a dead engine in this process are released."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.metrics.stats import SchedulerStats

from omni_server.engine.cancellation import in_daemon_thread
from omni_server.errors import StageDeadError, StageError
from omni_server.metrics.stage_metrics import ArStageMetrics
from omni_server.protocol.images import StageEvent, decode_event
from omni_server.protocol.rows import (
    FEEDS_KEY,
    FEEDS_REQUEST_ID,
    AddressedFeed,
    RowsPayload,
    SharedBlock,
    decode_payload,
    encode_feeds,
)
from omni_server.protocol.runtime_config import StageRuntimeConfig
from omni_server.transport.block_ledger import BlockLedger

RowSink = Callable[[RowsPayload], None]
EventSink = Callable[[StageEvent], None]

CLOSE_TIMEOUT_S = 30.0


class StageOutputProcessor(OutputProcessor):
    """Takes the place of the output processor that `AsyncLLM` creates, for which it has no parameter. Removes
    rows and predicted codes, or events, from the outputs before vLLM sees them.

    vLLM treats an output with a pooling result as that of a pooling request and does not detokenise it. An
    event has the form of a result, but does not finish its request (`stages.runtime.step_scheduler`)."""

    def __init__(self, made: OutputProcessor, runtime: StageRuntimeConfig | None) -> None:
        """Copies the configuration of `made`, which vLLM has just created for an engine without requests.
        `runtime` is that of an autoregressive stage. If it has `num_predicted`, results that come with tokens
        are not rows but codes, int16 `[n, num_predicted]`."""
        super().__init__(
            made.tokenizer,
            log_stats=made.log_stats,
            stream_interval=made.stream_interval,
            tracing_enabled=made.tracing_enabled,
            admission_stats=made.admission_stats,
        )
        self.row_sinks: dict[str, RowSink] = {}
        """By the id given to `add_request`, before that call."""
        self.event_sinks: dict[str, EventSink] = {}
        """As `row_sinks`."""
        self._has_events = runtime is None
        self._num_predicted = 0 if runtime is None else runtime.num_predicted
        self._codes: dict[str, npt.NDArray[np.int16]] = {}  # of tokens that nobody has taken yet; same ids
        self.row_ledger: BlockLedger | None = None
        """Ledger of the queue that the stage writes its rows to; None if it has none."""
        self.stage_metrics = ArStageMetrics()
        """Updated from the engine's reports."""

    def update_scheduler_stats(self, scheduler_stats: SchedulerStats | None) -> None:
        """Records the periodic reports of the stage's scheduler (`stages.runtime.stage_outputs`)."""
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
            if output.pooling_output is None or (self._has_events and output.finish_reason is not None):
                kept.append(output)
                continue
            state = self.request_states.get(output.request_id)
            request_id = None if state is None else state.external_req_id
            result, output.pooling_output = output.pooling_output.numpy(), None
            if self._has_events:
                if request_id is not None and (sink := self.event_sinks.get(request_id)) is not None:
                    sink(decode_event(result.tobytes()))
                continue
            if self._num_predicted:
                if request_id is not None:
                    waiting = self._codes.get(request_id)
                    self._codes[request_id] = result if waiting is None else np.concatenate((waiting, result))
            else:
                self._deliver(request_id, decode_payload(memoryview(result)))
            if output.new_token_ids or output.finish_reason is not None:
                kept.append(output)
            elif state is not None and output.prefill_stats is not None:
                # A prefill chunk has rows but no token yet. vLLM keeps the statistics with the first output.
                state.num_cached_tokens = output.prefill_stats.num_cached_tokens
        return super().process_outputs(kept, *args, **kwargs)

    def take_codes(self, request_id: str, num_tokens: int) -> npt.NDArray[np.int16] | None:
        """The codes predicted for the next tokens of the request that have come, `[<= num_tokens,
        num_predicted]`; None if the stage predicts none."""
        if not self._num_predicted:
            return None
        codes = self._codes.pop(request_id, np.empty((0, self._num_predicted), np.int16))
        if len(codes) > num_tokens:
            self._codes[request_id] = codes[num_tokens:]
        return codes[:num_tokens]

    def drop_codes(self, request_id: str) -> None:
        """Forgets the codes of a request whose tokens nobody takes any more."""
        self._codes.pop(request_id, None)

    def _deliver(self, request_id: str | None, payload: RowsPayload) -> None:
        if self.row_ledger is not None and isinstance(payload.block, SharedBlock):
            self.row_ledger.received(payload.block)
        sink = None if request_id is None else self.row_sinks.get(request_id)
        if sink is not None:
            sink(payload)
        elif isinstance(payload.block, SharedBlock):  # the request has ended
            assert self.row_ledger is not None
            self.row_ledger.drop(payload.block)


class StageAsyncLLM(AsyncLLM):
    """vLLM's client of an engine."""

    output_processor: StageOutputProcessor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `AsyncLLM`. Must not be called in a running event loop, because vLLM would begin to read
        outputs."""
        super().__init__(*args, **kwargs)
        # The processor has no request yet, and only this object refers to it.
        assert self.output_handler is None
        runtime = self.vllm_config.additional_config
        self.output_processor = StageOutputProcessor(
            self.output_processor, runtime if isinstance(runtime, StageRuntimeConfig) else None
        )
        # Grammars are checked before (`GrammarCheck`); here, vLLM would do it on the event loop.
        self.input_processor.structured_outputs_config = None

    def fail(self, engine_id: str, error: StageError) -> None:
        """Ends the outputs of a request with `error`, unless it has ended."""
        state = self.output_processor.request_states.get(engine_id)
        if state is not None and state.queue is not None:
            state.queue.put(error)

    async def send_feeds(self, feeds: Sequence[AddressedFeed]) -> None:
        """Sends rows to running requests.

        They travel in one of vLLM's ADD messages, so that they cannot overtake a request that was added
        before. Our scheduler unpacks them. The message is with the socket before this method first waits for
        anything.
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


def silence_death_reports() -> None:
    """Silences the traceback with which vLLM's client reports a dead engine. Our one line says as much."""
    logging.getLogger(AsyncLLM.__module__).addFilter(_is_no_death_report)


def _is_no_death_report(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], EngineDeadError)


@contextmanager
def stage_errors(stage: str) -> Iterator[None]:
    """Converts vLLM's engine errors to `StageDeadError` or `StageError`."""
    try:
        yield
    except EngineDeadError as exc:
        raise StageDeadError(stage, "its engine process has died") from exc
    except EngineGenerateError as exc:
        raise StageError(stage, f"generation failed: {exc.__cause__ or exc}") from exc


async def abort(engine: AsyncLLM, request_id: str, *, internal: bool = True) -> None:
    """Aborts one request, by the engine's id or (not `internal`) the caller's. Does nothing if the engine is
    dead."""
    if engine.errored:
        return
    try:
        await engine.abort(request_id, internal=internal)
    except EngineDeadError:
        return


async def wake(engine: AsyncLLM, timeout_s: float) -> None:
    """Sends the engine a message without effect, so that it notices a SIGTERM.

    SIGTERM ends an engine by interrupting its main thread, which waits for input. If the kernel delivers the
    signal to another thread (seen with CUDA), the main thread notices it only with the next message.
    """
    with suppress(EngineDeadError, zmq.ZMQError, TimeoutError):  # it has already ended
        await asyncio.wait_for(engine.engine_core.abort_requests_async([""]), timeout_s)


async def close_frontend(engine: AsyncLLM) -> bool:
    """Releases what vLLM holds in this process for an engine that has ended: tasks, threads, sockets. Its
    renderer stays.

    Returns False if that takes longer than `CLOSE_TIMEOUT_S`; the work then continues in the background.
    """
    closing = asyncio.create_task(_close_frontend(engine))
    await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
    if closing.done():
        await closing
    return closing.done()


async def _close_frontend(engine: AsyncLLM) -> None:
    if engine.output_handler is not None:  # once it ends, no message of the engine is read
        engine.output_handler.cancel()
        await asyncio.wait([engine.output_handler])
    await in_daemon_thread(engine.shutdown)
    # The sockets are closed in a callback that is already scheduled. Their context would end only with its
    # last reference, whenever the garbage collector runs.
    await asyncio.sleep(0)
    context: zmq.Context[zmq.Socket[bytes]] = engine.engine_core.resources.ctx  # type: ignore[attr-defined]
    await in_daemon_thread(partial(context.destroy, 0))
