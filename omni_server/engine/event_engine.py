"""vLLM's client of an engine whose requests report events before their result."""

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

from omni_server.engine.async_engine import ReplacedOutputProcessor
from omni_server.protocol.images import StageEvent, decode_event

EventSink = Callable[[StageEvent], None]


class EventOutputProcessor(ReplacedOutputProcessor):
    """Removes events from the outputs of pooling requests before vLLM sees them.

    An event has the form of a result, but does not finish its request (`stages.runtime.step_scheduler`).
    """

    def __init__(self, made: OutputProcessor) -> None:
        super().__init__(made)
        self.event_sinks: dict[str, EventSink] = {}
        """By the id given to `add_request`."""

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        kept = []
        for output in engine_core_outputs:
            if output.pooling_output is None or output.finish_reason is not None:
                kept.append(output)
                continue
            state = self.request_states.get(output.request_id)  # None if the request has ended
            sink = None if state is None else self.event_sinks.get(state.external_req_id)
            if sink is not None:
                sink(decode_event(output.pooling_output.numpy().tobytes()))
        return super().process_outputs(kept, *args, **kwargs)


class EventAsyncLLM(AsyncLLM):
    """vLLM's client of an engine, for diffusion stages."""

    output_processor: EventOutputProcessor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `AsyncLLM`. Must not be called in a running event loop, because vLLM would begin to read
        outputs."""
        super().__init__(*args, **kwargs)
        # The processor has no request yet, and only this object refers to it.
        assert self.output_handler is None
        self.output_processor = EventOutputProcessor(self.output_processor)

    @property
    def event_sinks(self) -> dict[str, EventSink]:
        """Receivers of events, by the id given to `add_request`. Must be set before that call."""
        return self.output_processor.event_sinks
