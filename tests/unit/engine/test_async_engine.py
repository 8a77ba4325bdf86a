"""How a request with a grammar comes to the engine."""

import threading
from types import SimpleNamespace
from typing import Any, cast

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from omni_server.engine.async_engine import StageAsyncLLM


class Processor:
    """Stands for vLLM's `InputProcessor`."""

    def __init__(self) -> None:
        self.thread: int | None = None

    def process_inputs(
        self, request_id: str, prompt: Any, params: SamplingParams, supported_tasks: tuple[str, ...]
    ) -> SimpleNamespace:
        self.thread = threading.get_ident()
        return SimpleNamespace(request_id=request_id, prompt=prompt, params=params, tasks=supported_tasks)


class Engine(StageAsyncLLM):
    """Without an engine's process."""

    def __init__(self, processor: Processor) -> None:
        self.input_processor = cast(InputProcessor, processor)
        self.added: list[Any] = []

    def __del__(self) -> None:
        """Nothing to shut down."""

    async def get_supported_tasks(self) -> Any:
        return ("generate",)

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        self.added.append(prompt)


async def test_grammar_is_checked_in_a_thread_and_the_engine_gets_what_came_of_it() -> None:
    processor = Processor()
    engine = Engine(processor)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    await engine.add_structured_request("a", tokens_input([1, 2]), params)
    assert processor.thread not in (None, threading.get_ident())
    (prepared,) = engine.added
    assert (prepared.request_id, prepared.params, prepared.tasks) == ("a", params, ("generate",))
    assert prepared.prompt["prompt_token_ids"] == [1, 2]
