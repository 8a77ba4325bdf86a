"""What a trace learns of a request. `omni_server.api.otel` implements it where traces are asked for."""

from typing import Protocol

from starlette.types import Scope

from omni_server.api.answer_record import AnswerRecord


class RequestSpan(Protocol):
    """One request, or one WebSocket session."""

    def answer_ended(self, answer: AnswerRecord, model: str) -> None:
        """A generation that was started for it is over; `model` is the model's first served name."""
        ...

    def ended(self, *, method: str, route: str | None, status: int, error_code: str | None, caller: str) -> None:
        """Nothing follows. `route` is a template, None where no route took the request; `error_code` is that of the
        error that was answered, None where none was."""
        ...


class RequestTracer(Protocol):
    def began(self, scope: Scope, request_id: str) -> RequestSpan:
        """The request continues the trace that its headers name, if they do."""
        ...

    async def close(self) -> None:
        """Sends what has not been sent, for a bounded time."""
        ...
