"""The interface between the API and the orchestrator: what the API needs to generate answers."""

from collections.abc import Callable
from typing import Protocol

from omni_server.errors import StageDownError
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ClonedVoice,
    ModelInfo,
    OmniEvent,
    OmniRequest,
    PromptTokens,
    Task,
    TokenizedPrompt,
)

Deliver = Callable[[OmniEvent | Exception], None]
"""Receives a request's events in order. The last one is `Finished` or an `OmniError`. Generation does not
wait for it: it must return at once."""


class Generation(Protocol):
    """One admitted request. It is released in every stage before its last event is delivered."""

    request_id: str
    prompt: PromptTokens
    began: float
    """Clock time (`time.perf_counter`) when the stages received the request; the origin of
    `Finished.times`."""

    def cancel(self) -> None:
        """Stops it, without waiting for its release. Does nothing after the end."""
        ...

    async def aclose(self) -> None:
        """Stops it; returns when it has been released in every stage."""
        ...


class Generator(Protocol):
    """Answers requests; implemented by `omni_server.omni.AsyncOmni` and by the tests' fakes."""

    model_info: ModelInfo

    async def submit(self, request: OmniRequest, deliver: Deliver) -> Generation:
        """Validate against the model, tokenise and admit.

        Raises `InvalidRequestError` (unknown voice, prompt too long, ...), `OverloadedError`,
        `StageDownError` if a stage that the request needs is being restarted, or `StageDeadError` if one dies
        meanwhile. After it returns, only generation can fail.
        """
        ...

    async def tokenize(self, request: OmniRequest) -> TokenizedPrompt:
        """Returns the request's prompt; without media, it may be longer than the context. Raises
        `InvalidRequestError`, `StageDeadError`, or `DeadlineExceededError`."""
        ...

    async def clone_voice(self, recording: AudioPart, text: str = "") -> ClonedVoice:
        """Makes a voice of a recording with 24 kHz. `text` is what is said in it: with it, speech continues
        the recording, without, it has the recording's voice.

        Raises `InvalidRequestError`, `StageDeadError`, or `DeadlineExceededError`.
        """
        ...

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        """Returns the chat that gives the model the task."""
        ...

    def is_ready(self) -> bool:
        """True once a real request has passed all stages, while `is_alive` is true."""
        ...

    def is_alive(self) -> bool:
        """False once all replicas of a stage have failed."""
        ...

    def stage_down(self) -> StageDownError | None:
        """Returns the error for requests that need a restarting stage; None if all stages are up."""
        ...

    def failed_replicas(self) -> tuple[str, ...]:
        """Returns the names of replicas that died too often and are not restarted for now, while others of
        their stages serve."""
        ...

    def metrics_text(self) -> bytes:
        """Returns its own metrics in Prometheus text format, without those of
        `omni_server.api.server_metrics`."""
        ...
