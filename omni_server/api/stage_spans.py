"""When an answer passed which stage, from the times that the pipeline has measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from omni_server.api.request_record import AnswerRecord
from omni_server.types import SamplingConfig, StageTimes, Usage


@dataclass(frozen=True)
class StageSpan:
    """Times are in seconds since the answer was submitted."""

    name: str
    begin_s: float
    """The stage was given the request; for code2wav, there were enough codes for its first window."""
    end_s: float
    """Its last output has come."""
    first_output_s: float | None = None
    error_code: str | None = None
    attributes: Mapping[str, int | float] = field(default_factory=dict)


def stage_spans(answer: AnswerRecord) -> list[StageSpan]:
    """One for each stage that the answer came to; of an answer that failed only the stage that did, as far as
    that is known: its times come with the last event."""
    if answer.admitted_s is None:
        return []
    if answer.finished is not None:
        return _finished(answer, answer.admitted_s, answer.finished.times, answer.finished.usage)
    if answer.failed_stage is not None:
        return [
            StageSpan(answer.failed_stage, answer.admitted_s, answer.duration_s, error_code=answer.reason)
        ]
    return []


def _finished(answer: AnswerRecord, began_s: float, times: StageTimes, usage: Usage) -> list[StageSpan]:
    """`began_s` is when the stages were given the request, from which `times` count."""
    spans: list[StageSpan] = []

    def add(
        name: str,
        begin_s: float | None,
        first_s: float | None,
        last_s: float | None,
        **attributes: int | float,
    ) -> None:
        if begin_s is not None and last_s is not None:
            first = None if first_s is None else began_s + first_s
            spans.append(StageSpan(name, began_s + begin_s, began_s + last_s, first, attributes=attributes))

    thinker = {
        "gen_ai.usage.prompt_tokens": usage.prompt.total,
        "gen_ai.usage.completion_tokens": usage.text_tokens,
        **_sampling(answer.sampling.get("thinker", SamplingConfig())),
    }
    if times.first_text_s is not None:
        thinker["gen_ai.latency.time_to_first_token"] = times.first_text_s
    add("thinker", 0.0, times.first_text_s, times.last_text_s, **thinker)
    codes = {"gen_ai.usage.completion_tokens": usage.codec_tokens}
    add("talker", times.talker_opened_s, times.first_codes_s, times.last_codes_s, **codes)
    sound = {"omni.windows": times.num_windows, "omni.audio_seconds": answer.audio_s}
    add("code2wav", times.first_window_s, times.first_audio_s, times.last_audio_s, **sound)
    return spans


def _sampling(config: SamplingConfig) -> dict[str, int | float]:
    """What the request itself says."""
    given = {
        "gen_ai.request.max_tokens": config.max_tokens,
        "gen_ai.request.temperature": config.temperature,
        "gen_ai.request.top_p": config.top_p,
    }
    return {name: value for name, value in given.items() if value is not None}
