"""Transcripts of what the user said: a short text-only request, outside of the conversation."""

import asyncio
import logging
from contextlib import aclosing

from omni_server.api.answer_stream import TaskRun
from omni_server.api.errors import unexpected_error
from omni_server.api.realtime import server_events as events
from omni_server.api.realtime.conversation import audio_part
from omni_server.api.realtime.items import HeardAudio, UserItem
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.session_config import Transcription
from omni_server.api.sampling import text_sampling
from omni_server.api.state import ServerState
from omni_server.errors import OmniError, OverloadedError
from omni_server.types import Finished, OmniRequest, SamplingConfig, TextDelta, Transcribe

logger = logging.getLogger(__name__)


class Transcriber:
    def __init__(self, outbox: Outbox, state: ServerState) -> None:
        self._outbox = outbox
        self._state = state
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def refuse(self, item: UserItem) -> None:
        """If too many are running: the transcription fails instead of waiting."""
        self._fail(
            item, OverloadedError("Too many transcriptions and responses are running in this session.")
        )

    def start(self, item: UserItem, audio: HeardAudio, config: Transcription) -> None:
        """Runs in the background; sets `audio.transcript` at the end."""
        task = asyncio.create_task(
            self._run(item, audio, config), name=f"realtime transcription of {item.id}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def release(self) -> "list[asyncio.Task[None]]":
        """Stops them without an event; returns the tasks, which end soon."""
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    async def _run(self, item: UserItem, audio: HeardAudio, config: Transcription) -> None:
        with self._state.request_in_flight():
            try:
                await self._transcribe(item, audio, config)
            except OmniError as error:
                self._fail(item, error)
            except Exception:
                logger.exception("transcription of %s failed", item.id)
                self._fail(item, unexpected_error())

    async def _transcribe(self, item: UserItem, audio: HeardAudio, config: Transcription) -> None:
        generator = self._state.require_generator()
        task = Transcribe(audio_part(audio), language=config.language, hint=config.prompt)
        request = OmniRequest(
            request_id=events.new_id("transcribe"),
            messages=generator.task_messages(task),
            sampling=text_sampling(SamplingConfig(temperature=0.0), generator.model_info),
        )
        text: list[str] = []
        run = TaskRun(generator, self._state, [request], input_param="audio")
        async with aclosing(run.events()) as stream:
            async for event in stream:
                match event:
                    case TextDelta(text=delta) if delta:
                        text.append(delta)
                        self._outbox.put(events.TranscriptionDelta(item_id=item.id, delta=delta))
                    case Finished(usage=usage):
                        audio.transcript = "".join(text)
                        self._outbox.put(
                            events.TranscriptionCompleted(
                                item_id=item.id,
                                transcript=audio.transcript,
                                usage=events.TranscriptionUsage.of(usage),
                            )
                        )

    def _fail(self, item: UserItem, error: OmniError) -> None:
        self._outbox.put(events.TranscriptionFailed(item_id=item.id, error=events.FailureDetails.of(error)))
