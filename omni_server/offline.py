"""Runs the pipeline in scripts and notebooks, without server or event loop.

from omni_server import Omni

with Omni("model-folder") as omni:
    answer = omni.generate("Hello")
    print(answer.text, len(answer.audio) / 24_000, "seconds")
"""

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from omni_server.check.default_config import resolve_deployment
from omni_server.config.stage_config import StageConfig
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.omni import AsyncOmni
from omni_server.types import (
    AudioDelta,
    ChatMessage,
    CodecDelta,
    Finished,
    FinishReason,
    OmniEvent,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    TextDelta,
    TextPart,
    Usage,
)

T = TypeVar("T")


@dataclass(frozen=True)
class OmniOutput:
    text: str
    token_ids: tuple[int, ...]
    codes: tuple[int, ...]
    """Codec tokens; empty without speech."""
    audio: npt.NDArray[np.float32]  # [num_samples], 24 kHz mono, in [-1, 1]
    finish_reason: FinishReason
    usage: Usage


class Omni:
    """The constructor starts the engines; `close`, or the end of a `with` block, stops them.

    Engines are separate processes, so a script that uses this class needs the usual
    `if __name__ == "__main__":` guard.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        stage_config: str | Path | StageConfig | None = None,
        load_format: str = "auto",
    ) -> None:
        """`model` is a folder or a hub id; `stage_config` is a file, the name of a shipped config, a config,
        or None, which makes one for the model and this machine's GPUs.

        Raises `ConfigError`.
        """
        model_dir, config = resolve_deployment(str(model), stage_config, load_format=load_format)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni", daemon=True)
        self._thread.start()
        self._omni: AsyncOmni | None = None
        try:
            self._omni = self._wait(AsyncOmni.start(model_dir, config, load_format=load_format))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        messages: str | Sequence[ChatMessage],
        *,
        voice: str | None = None,
        speech: bool = True,
        sampling: Mapping[str, SamplingConfig] | None = None,
        seed: int | None = None,
        timeout_s: float | None = None,
    ) -> OmniOutput:
        """Answer a chat; a string is one user turn.

        `sampling` is keyed by stage name; `seed` seeds the waveform's noise. Raises `OmniError`, and
        `InvalidRequestError` if an argument is invalid.
        """
        omni = self._running()
        answer = self._started(collect(omni, _request(messages, voice, speech, sampling, seed, timeout_s)))
        try:
            return answer.result()
        except BaseException:  # such as KeyboardInterrupt
            answer.cancel()
            raise

    async def stream(
        self,
        messages: str | Sequence[ChatMessage],
        *,
        voice: str | None = None,
        speech: bool = True,
        sampling: Mapping[str, SamplingConfig] | None = None,
        seed: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[OmniEvent, None]:
        """Like `generate`, but yields events in the caller's event loop. Closing it early (`aclose`) aborts
        the request.

        The answer is generated at full speed: what the caller has not taken is kept in memory, until the end
        of the request (`timeout_s` at the latest), and then until this is closed.
        """
        omni = self._running()
        events = omni.events(_request(messages, voice, speech, sampling, seed, timeout_s))

        async def next_event() -> OmniEvent:
            return await anext(events)

        event: OmniEvent | None = None
        try:
            while not isinstance(event, Finished):
                event = await asyncio.wrap_future(self._started(next_event()))
                yield event
        finally:
            if self._loop.is_running():
                self._started(events.aclose())

    def close(self) -> None:
        """Stop the engines; further calls do nothing."""
        if self._omni is not None:
            omni, self._omni = self._omni, None
            self._wait(omni.stop())
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> "Omni":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _running(self) -> AsyncOmni:
        if self._omni is None:
            raise OmniError("this Omni has been closed")
        return self._omni

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._started(work).result()

    def _started(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `work` in the engines' event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def collect(omni: AsyncOmni, request: OmniRequest) -> OmniOutput:
    """Returns the complete answer. Raises `OmniError`."""
    text: list[str] = []
    token_ids: list[int] = []
    codes: list[int] = []
    audio: list[npt.NDArray[np.float32]] = []
    finished: Finished | None = None
    async for event in omni.events(request):
        match event:
            case TextDelta():
                text.append(event.text)
                token_ids.extend(event.token_ids)
            case CodecDelta():
                codes.extend(event.codes)
            case AudioDelta():
                audio.append(event.samples)
            case Finished():
                finished = event
    assert finished is not None  # a generation ends with Finished or raises
    return OmniOutput(
        text="".join(text),
        token_ids=tuple(token_ids),
        codes=tuple(codes),
        audio=np.concatenate(audio) if audio else np.zeros(0, np.float32),
        finish_reason=finished.finish_reason,
        usage=finished.usage,
    )


def _request(
    messages: str | Sequence[ChatMessage],
    voice: str | None,
    speech: bool,
    sampling: Mapping[str, SamplingConfig] | None,
    seed: int | None,
    timeout_s: float | None,
) -> OmniRequest:
    chat = (ChatMessage("user", (TextPart(messages),)),) if isinstance(messages, str) else tuple(messages)
    if not chat:
        raise InvalidRequestError("there are no messages to answer", param="messages")
    return OmniRequest(
        request_id=f"omni-{uuid.uuid4().hex}",
        messages=chat,
        speech=SpeechOutput(voice, seed) if speech else None,
        sampling=dict(sampling or {}),
        deadline_s=timeout_s,
    )
