"""The server's end of a diffusion engine: one request in, one tensor out."""

import numpy as np
import numpy.typing as npt
from vllm import PoolingParams
from vllm.inputs.engine import tokens_input
from vllm.outputs import PoolingRequestOutput

from omni_server.engine.async_engine import EventSink, abort, stage_errors
from omni_server.engine.engine_handle import EngineHandle
from omni_server.protocol.diffusion import INPUT_KEY, STREAMS_KEY
from omni_server.transport.result import decode_result


class DiffusionHandle(EngineHandle):
    """Handle of an engine that returns one tensor per request."""

    async def run(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        payload: bytes,
        *,
        priority: int = 0,
        num_streams: int | None = None,
        on_event: EventSink | None = None,
    ) -> npt.NDArray[np.float32]:
        """Returns the stage's result for `token_ids` and its encoded input: float32, in the shape that the
        model gives it.

        Requests with the lowest `priority` are computed first, and the earliest of equal ones. The engine
        compares priorities only with each other, never with a clock. `num_streams` is the number of active
        streams, including this one, if known: a single stream does not wait for others. `on_event` gets what
        the stage reports before its result.

        Cancelling the call aborts the request. Raises `StageError` (`CorruptDataError` if the data is
        corrupt) or `StageDeadError`.
        """
        extra: dict[str, bytes | int] = {INPUT_KEY: payload}
        if num_streams is not None:
            extra[STREAMS_KEY] = num_streams
        params = PoolingParams(task="plugin", extra_kwargs=extra)
        engine = self.engine
        if on_event is not None:
            engine.output_processor.event_sinks[request_id] = on_event
        try:
            with stage_errors(self.name):
                queue = await engine.add_request(
                    request_id, tokens_input(list(token_ids)), params, priority=priority
                )
                output = await queue.get()
        except BaseException:
            # If this was cancelled while sending, the engine may already have the request.
            await abort(engine, request_id, internal=False)
            raise
        finally:
            engine.output_processor.event_sinks.pop(request_id, None)
        assert isinstance(output, PoolingRequestOutput)
        result: npt.NDArray[np.float32] = decode_result(output.outputs.data, self.name).float().numpy()
        return result
