"""The seam between the API and the orchestrator: what the API needs of the thing that generates."""

from collections.abc import AsyncIterator
from typing import Protocol

from omni_server.errors import StageDownError
from omni_server.types import ChatMessage, ModelInfo, OmniEvent, OmniRequest, PromptTokens, Task


class Generation(Protocol):
    """One admitted request. Iterating gives events; ending the iteration in any way, `aclose()` included,
    releases the request in every stage."""

    request_id: str
    prompt: PromptTokens

    def __aiter__(self) -> AsyncIterator[OmniEvent]:
        """Events in order. Raises `OmniError` where the request fails."""
        ...

    async def aclose(self) -> None:
        """Stop and release; harmless when already ended."""
        ...


class Generator(Protocol):
    """Answers requests; implemented by `omni_server.omni.AsyncOmni` and by the tests' fakes."""

    model_info: ModelInfo

    async def submit(self, request: OmniRequest) -> Generation:
        """Validate against the model, tokenise and admit.

        Raises `InvalidRequestError` (unknown voice, prompt too long, ...), `OverloadedError`,
        `StageDownError` if a stage that the request needs is being restarted, or `StageDeadError` if one died
        meanwhile; after it returns, only generation itself can fail.
        """
        ...

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        """The chat by which the served model is given the task."""
        ...

    def is_ready(self) -> bool:
        """True once a real request has passed all stages, and as long as `is_alive`."""
        ...

    def is_alive(self) -> bool:
        """False once a stage has died and will not be started again."""
        ...

    def stage_down(self) -> StageDownError | None:
        """Which stage is being restarted, as an error for requests that need it; None if all are up."""
        ...

    def metrics_text(self) -> bytes:
        """What it measures itself, in Prometheus' text format: none of the families of
        `omni_server.api.server_metrics`."""
        ...
