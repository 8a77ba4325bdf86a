"""One choice of an answer that is not streamed, while it comes in."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from omni_server.api.render import ChoiceText
from omni_server.api.responses import FunctionCall, MessageToolCall
from omni_server.types import (
    AudioDelta,
    Finished,
    FinishReason,
    OmniEvent,
    SampledToken,
    TextDelta,
    ToolCallDelta,
    Usage,
)

_SILENCE: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)


class CollectedChoice:
    def __init__(self, *, with_logprobs: bool, call_finish_reason: FinishReason) -> None:
        self._text: list[str] = []
        self._audio: list[npt.NDArray[np.float32]] = [_SILENCE]
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self._logprobs: list[SampledToken] | None = [] if with_logprobs else None
        self._call_finish_reason: FinishReason = call_finish_reason
        self._finished: Finished | None = None

    def take(self, event: OmniEvent) -> None:
        match event:
            case TextDelta():
                self._text.append(event.text)
                if self._logprobs is not None:
                    self._logprobs += event.logprobs
            case ToolCallDelta(call_id=call_id, name=name):
                if call_id is not None and name is not None:
                    self._calls.append((call_id, name, []))
                self._calls[event.index][2].append(event.arguments)
            case AudioDelta():
                self._audio.append(event.samples)
            case Finished():
                self._finished = event

    @property
    def usage(self) -> Usage:
        assert self._finished is not None
        return self._finished.usage

    def samples(self) -> npt.NDArray[np.float32]:
        """All sound, [num_samples]."""
        return np.concatenate(self._audio)

    def text(self) -> ChoiceText:
        assert self._finished is not None
        return ChoiceText(
            text="".join(self._text),
            tool_calls=tuple(
                MessageToolCall(id=call_id, function=FunctionCall(name=name, arguments="".join(pieces)))
                for call_id, name, pieces in self._calls
            ),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=api_finish_reason(self._finished.finish_reason, self._call_finish_reason),
        )


def api_finish_reason(reason: FinishReason, call_finish_reason: FinishReason) -> FinishReason:
    return call_finish_reason if reason == "tool_calls" else reason


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Of all choices; the prompt is one."""
    return replace(
        usages[0],
        text_tokens=sum(usage.text_tokens for usage in usages),
        codec_tokens=sum(usage.codec_tokens for usage in usages),
    )
