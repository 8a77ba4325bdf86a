"""Logs one line per HTTP request when it ends, and one per answer of a WebSocket session.

The path of an unknown URL is the only client data in it: no prompts, no media, no keys.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_server.api.access import METRICS, PROBES
from omni_server.api.request_record import AnswerRecord, RequestRecord
from omni_server.platform.log_format import Field, StructuredMessage

logger = logging.getLogger(__name__)

QUIET_ROUTES = PROBES | METRICS
"""Machines poll these every few seconds: their lines have level DEBUG unless the status is 500."""

_MAX_PATH = 100


@dataclass(frozen=True)
class RequestLine(StructuredMessage):
    """The end of an HTTP request, a session, or one answer in a session."""

    what: str
    """Method and route."""
    record: RequestRecord
    answers: Sequence[AnswerRecord]
    seconds: float
    status: int | None = None
    """None for an answer inside a session."""
    client: str | None = None

    def summary(self) -> str:
        return self.what if self.status is None else f"{self.what} {self.status}"

    def fields(self) -> Mapping[str, Field]:
        record = self.record
        fields: dict[str, Field] = {"request_id": record.request_id, "caller": record.caller}
        if self.client is not None:
            fields["client"] = self.client
        if self.status is not None:
            fields["status"] = self.status
            if record.error_code is not None:
                fields["error"] = record.error_code
        if record.num_retries:
            fields["retry"] = record.num_retries
        fields["seconds"] = self.seconds
        if self.answers:
            fields |= _answer_fields(self.answers)
        return fields


def log_request(what: str, route: str, record: RequestRecord, *, status: int, client: str | None) -> None:
    """Logs the end of an HTTP request or session; `what` is the method and path."""
    level = logging.DEBUG if route in QUIET_ROUTES and status != 500 else logging.INFO
    if record.is_logged and logger.isEnabledFor(level):
        seconds = time.perf_counter() - record.began
        logger.log(level, RequestLine(what, record, record.answers, seconds, status, client))


def log_session_answer(record: RequestRecord, answer: AnswerRecord) -> None:
    """Logs the end of one answer in a WebSocket session."""
    if record.is_logged:
        logger.info(RequestLine("answer", record, [answer], answer.duration_s))


def shown_path(path: str) -> str:
    """Truncates a path for the log and escapes line breaks, with which a client could forge
    lines."""
    shown = path if len(path) <= _MAX_PATH else path[:_MAX_PATH] + "..."
    return shown if shown.isascii() and shown.isprintable() else ascii(shown)[1:-1]


def _answer_fields(answers: Sequence[AnswerRecord]) -> dict[str, Field]:
    """For several answers to one request, sums token counts and audio; times are those of
    the first."""
    first = answers[0]
    fields: dict[str, Field] = {"answer_id": first.answer_id}
    if len(answers) > 1:
        fields["answers"] = len(answers)
    worst = next((answer for answer in answers if answer.outcome != "ok"), first)
    fields["outcome"] = worst.outcome
    if worst.reason:
        fields["reason"] = worst.reason
    prompt = next((answer.prompt for answer in answers if answer.prompt is not None), None)
    if prompt is not None:
        fields["prompt_tokens"] = prompt.total
        for kind, number in (("audio", prompt.audio), ("image", prompt.image), ("video", prompt.video)):
            if number:
                fields[f"prompt_{kind}"] = number
    usages = [answer.finished.usage for answer in answers if answer.finished is not None]
    if usages and first.kind != "image":
        fields["text_tokens"] = sum(usage.text_tokens for usage in usages)
    if first.kind == "image":
        steps = sum(answer.num_steps for answer in answers)
        if steps:
            fields["steps"] = steps
    if first.kind == "speech":
        if usages:
            fields["codec_tokens"] = sum(usage.codec_tokens for usage in usages)
        fields["audio_s"] = sum(answer.audio_s for answer in answers)
    if any(answer.audio_input_s for answer in answers):
        fields["audio_input_s"] = sum(answer.audio_input_s for answer in answers)
    if first.first_text_s is not None:
        fields["first_text_s"] = first.first_text_s
    if first.first_audio_s is not None:
        fields["first_audio_s"] = first.first_audio_s
        fields["underrun_s"] = first.underrun_s
    if first.finished is not None:
        # First and last output of each stage, in seconds since the stages received the request.
        for stage, times in first.finished.times.items():
            if times.first_output_s is not None and times.last_output_s is not None:
                name = f"{stage}_s"
                # A stage may be named `audio`.
                name = f"stage_{name}" if name in fields else name
                fields[name] = (times.first_output_s, times.last_output_s)
                if times.replica is not None:
                    fields[f"{stage}_replica"] = times.replica
    return fields
