"""The server's end of a non-autoregressive stage: one request in, one tensor out."""

import numpy as np
import numpy.typing as npt
from vllm import PoolingParams
from vllm.inputs.engine import tokens_input
from vllm.outputs import PoolingRequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from omni_server.engine.ar_client import stage_errors
from omni_server.errors import StageError
from omni_server.protocol.diffusion import INPUT_KEY
from omni_server.transport.result import decode_result


class DiffusionStageClient:
    """Wraps the stage's `AsyncLLM`."""

    def __init__(self, name: str, engine: AsyncLLM) -> None:
        self.name = name
        self.engine = engine

    @property
    def is_dead(self) -> bool:
        return self.engine.errored

    async def run(self, request_id: str, token_ids: tuple[int, ...], payload: bytes) -> npt.NDArray[np.float32]:
        """The stage's result for `token_ids` and its encoded input, `[num_samples]` float32.

        Cancelling the call aborts the request. Raises `StageError` or `StageDeadError`.
        """
        params = PoolingParams(task="plugin", extra_kwargs={INPUT_KEY: payload})
        with stage_errors(self.name):
            queue = await self.engine.add_request(request_id, tokens_input(list(token_ids)), params)
            finished = False
            try:
                output = await queue.get()
                finished = True
            finally:
                if not finished and not self.engine.errored:
                    await self._abort(queue.request_id)
        assert isinstance(output, PoolingRequestOutput)
        result = decode_result(output.outputs.data, self.name)
        if result.ndim != 1:
            raise StageError(self.name, f"sent a result of {result.ndim} dimensions instead of a waveform")
        return result.float().numpy()

    async def _abort(self, internal_id: str) -> None:
        try:
            await self.engine.abort(internal_id, internal=True)
        except EngineDeadError:
            pass  # a dead engine holds nothing any more

    def shutdown(self) -> None:
        self.engine.shutdown()
