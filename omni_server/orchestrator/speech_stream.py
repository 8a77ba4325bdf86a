"""The path of one stream from codec tokens to audio.

Frames of codec tokens become windows. Windows go to the decoder with their playout deadline as the priority,
so that the most urgent window of all streams is computed first. Results are returned in order.
`SpeechScheduler` decides when windows are due and when the first audio may leave.

If the decoder carries state from window to window, a window is sent only after the previous one has been
returned (`SpeechScheduler.max_outstanding_windows` is 1): windows are computed in order, and no step contains
two of one stream.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_server.audio.waveform_check import waveform_fault
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.errors import CorruptDataError
from omni_server.family.codec import CodecEdge, CodecLayout, DecoderWindow, Frame
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.orchestrator.speech_scheduler import PlayoutClock, SpeechScheduler
from omni_server.types import AudioDelta

Samples = npt.NDArray[np.float32]

PAUSE_S = 0.1
"""After so long without another frame, a stream whose text has not come is decoded as far as it goes. A text
that comes as fast as it is spoken makes no such pauses, and its windows become longer."""


@dataclass(eq=False)
class SpeechStream:
    """`run` returns when everything between the first `push` and `finish` has been emitted."""

    request_id: str
    decoder: DiffusionHandle
    edge: CodecEdge
    scheduler: SpeechScheduler
    layout: CodecLayout
    timeline: RequestTimeline
    emit: Callable[[AudioDelta], None]
    """Receives the pieces of the waveform in order, without gaps."""
    caller: str
    """Whose request it is: callers take turns."""
    may_pause: bool = False
    """See `PlayoutClock`."""
    is_held: Callable[[], bool] = lambda: False
    """Whether no frame can come before more text does."""

    def __post_init__(self) -> None:
        self._unsent: asyncio.Queue[DecoderWindow | None] = asyncio.Queue()
        self._sent: asyncio.Queue[tuple[DecoderWindow, asyncio.Task[Samples]] | None] = asyncio.Queue()
        self._outstanding = asyncio.Semaphore(self.scheduler.max_outstanding_windows)
        self._num_frames = 0
        self._is_complete = False
        self._num_windows = 0
        self._num_samples = 0  # of all windows up to now
        self._has_frames = asyncio.Event()
        self._held: list[AudioDelta] | None = []  # until playback may begin; None after that
        self._playout = PlayoutClock(self.scheduler, self._release, self.caller, may_pause=self.may_pause)

    def push(self, frames: Sequence[Frame]) -> None:
        """Adds frames of codec tokens. Like `finish`, raises `CorruptDataError` if the edge does not cut them
        into consecutive windows."""
        self._num_frames += len(frames)
        self._playout.push(len(frames))
        if not self._num_windows:
            self._playout.ramp = ramp = self.scheduler.ramp()
            if ramp is not None:
                self.edge.use_ramp(ramp.new_blocks)
        self._take(self.edge.push(frames))
        self._has_frames.set()

    def finish(self) -> None:
        """Marks the end of the frames; there may have been none."""
        self._playout.finish()
        self._take(self.edge.finish())
        num_samples = self.layout.first_sample(self._num_frames)
        if self._num_samples != num_samples:
            detail = f"the windows end at sample {self._num_samples}, the frames at sample {num_samples}"
            raise CorruptDataError(self.decoder.name, "window_sequence", detail)
        self._unsent.put_nowait(None)
        self._is_complete = True
        self._has_frames.set()

    def _take(self, windows: Sequence[DecoderWindow]) -> None:
        for window in windows:
            self.timeline.mark_window_ready(self.decoder.stage)
            if window.first_sample != self._num_samples:
                detail = (
                    f"a window from sample {window.first_sample} on, where {self._num_samples} is the next "
                    "one"
                )
                raise CorruptDataError(self.decoder.name, "window_sequence", detail)
            self._num_windows += 1
            self._num_samples += window.num_samples
            self._unsent.put_nowait(window)

    async def run(self) -> None:
        """Raises a group of `StageError` (`CorruptDataError` for audio that cannot be right) or
        `StageDeadError` if the decoder fails. Cancellation or a failure aborts the windows that are in the
        decoder."""
        with self.scheduler.stream(self._playout):
            async with self.decoder.life.needed(), asyncio.TaskGroup() as group:
                group.create_task(self._send(group))
                group.create_task(self._collect())
                if self.may_pause:
                    group.create_task(self._play_to_pauses())

    async def _play_to_pauses(self) -> None:
        while not self._is_complete:
            try:
                async with asyncio.timeout(PAUSE_S):
                    await self._has_frames.wait()
                self._has_frames.clear()
            except TimeoutError:
                if self.is_held():
                    self._take(self.edge.flush())
                    self._playout.begin()
                    await self._has_frames.wait()

    async def _send(self, group: asyncio.TaskGroup) -> None:
        number = 0
        while (window := await self._unsent.get()) is not None:
            await self._outstanding.acquire()
            start_s = window.first_sample / self.layout.sample_rate_hz
            priority = self.scheduler.priority(self._playout.window_sent(start_s))
            self.timeline.mark_window_sent(self.decoder.stage)
            task = group.create_task(self._compute(f"{self.request_id}-{number}", window, priority))
            # Not in the task's own `finally`: a task cancelled before its first step never reaches it.
            task.add_done_callback(lambda _: self._outstanding.release())
            self._sent.put_nowait((window, task))
            number += 1
        self._sent.put_nowait(None)

    async def _compute(self, window_id: str, window: DecoderWindow, priority: int) -> Samples:
        samples = await self.decoder.run(
            window_id,
            window.token_ids,
            window.payload,
            priority=priority,
            num_streams=self.scheduler.num_streams,
        )
        fault = waveform_fault(samples, num_samples=window.num_samples, is_varied=window.is_varied)
        if fault is not None:
            raise CorruptDataError(self.decoder.name, fault.kind, fault.detail)
        return samples

    async def _collect(self) -> None:
        """Emits results in order. If a window fails, the group cancels this before it sees it."""
        while (item := await self._sent.get()) is not None:
            window, task = item
            samples = await task
            self._playout.window_completed(window.num_computed)
            self.timeline.mark_window_computed(self.decoder.stage)
            delta = AudioDelta(window.first_sample, samples)
            if self._held is None:
                self.emit(delta)
            else:
                self._held.append(delta)
        self._release()  # all audio is here: no need to wait any longer

    def _release(self) -> None:
        held, self._held = self._held, None
        for delta in held or ():
            self.emit(delta)
