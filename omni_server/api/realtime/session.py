"""One session: its reactions to client events and to the user's turns."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from openai.types import realtime as wire
from openai.types.realtime.realtime_server_event import ConversationItemRetrieved
from pydantic import BaseModel, JsonValue

from omni_server.api.realtime import client_events as client
from omni_server.api.realtime.audio_format import Samples, decode_audio
from omni_server.api.realtime.connection import release
from omni_server.api.realtime.conversation import Conversation, messages_of, text_to_read
from omni_server.api.realtime.input_buffer import InputBuffer, Started, Stopped
from omni_server.api.realtime.item_loader import ItemLoader
from omni_server.api.realtime.items import HeardAudio, Item, UserItem
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.response import ResponsePlan, ResponseRun
from omni_server.api.realtime.server_events import new_id, shown, wire_error
from omni_server.api.realtime.session_config import SessionConfig, first_config, updated
from omni_server.api.realtime.transcriber import report_failure, transcribe
from omni_server.api.schemas import StageSampling
from omni_server.api.speech import SpeechRequest, in_voice, parse_speech
from omni_server.api.state import ServerState
from omni_server.api.validation import missing_parameter
from omni_server.api.voices import speech_output
from omni_server.errors import InvalidRequestError, OmniError, OverloadedError
from omni_server.types import ModelInfo, OmniRequest

logger = logging.getLogger(__name__)

# A session counts as one of the server's requests, however many generations it runs.
_MAX_OUT_OF_BAND = 4
"""Concurrent out-of-band responses and transcriptions, counted together."""
_MAX_IN_CONVERSATION = 3
"""Responses in the conversation: one, plus cancelled ones that the stages have not released yet."""
_INLINE_S = 0.5
"""Speech detection in this much audio takes 3 ms; longer pieces go to a thread."""


class Session:
    """Belongs to one connection; calls of `handle` do not overlap."""

    def __init__(
        self,
        model: ModelInfo,
        state: ServerState,
        outbox: Outbox,
        buffer: InputBuffer,
        loader: ItemLoader,
        *,
        duration_s: float,
        max_speech_characters: int,
    ) -> None:
        self.id = new_id("sess")
        self._model = model
        self._state = state
        self._outbox = outbox
        self._buffer = buffer
        self._loader = loader
        self._max_speech_characters = max_speech_characters
        self._expires_at = int(time.time() + duration_s)
        self._config = first_config(model)
        self._conversation = Conversation()
        self._runs: set[ResponseRun] = set()
        self._transcriptions: set[asyncio.Task[None]] = set()
        self._spoken_item_id: str | None = None
        """Id of the item that the current turn will become."""
        self._answer_is_due = False
        """The user finished a turn during a response that was not to be interrupted."""
        self._apply_config(wire.SessionCreatedEvent)

    @property
    def answers(self) -> list[asyncio.Task[None]]:
        """The responses in progress."""
        return [run.task for run in self._runs]

    async def close(self) -> None:
        """Releases everything without sending events."""
        self._answer_is_due = False
        await release([*self.answers, *self._transcriptions], self.id)

    async def handle(self, text: str | None) -> None:
        """Handles one frame; None if it is binary. Answers an invalid one with an error event and
        continues."""
        event_id: JsonValue = None
        try:
            if text is None:
                raise InvalidRequestError("Binary frames are not supported; send text.", code="invalid_event")
            frame = await client.read_frame(text)
            event_id = frame.get("event_id")
            await self._react(client.parse_event(frame))
        except OmniError as error:
            self.send_error(error, event_id)

    def send_error(self, error: OmniError, event_id: JsonValue = None) -> None:
        self._outbox.put(wire.RealtimeErrorEvent, error=wire_error(error, event_id))

    async def _react(self, event: BaseModel) -> None:
        match event:
            case client.AudioAppend():
                await self._append(event)
            case client.SessionUpdate():
                self._update(event)
            case client.AudioCommit():
                self._commit(self._buffer.commit())
            case client.AudioClear():
                self._buffer.clear()
                self._spoken_item_id = None
                self._outbox.put(wire.InputAudioBufferClearedEvent)
            case client.ItemCreate():
                [item] = await self._load({"item": event.item}, "item")
                self._add(item, event.previous_item_id)
            case client.ItemRetrieve(item_id=item_id):
                self._outbox.put(ConversationItemRetrieved, item=shown(self._conversation.retrieve(item_id)))
            case client.ItemDelete(item_id=item_id):
                self._conversation.delete(item_id)
                self._outbox.put(wire.ConversationItemDeletedEvent, item_id=item_id)
            case client.ItemTruncate(item_id=item_id, content_index=index, audio_end_ms=end_ms):
                self._conversation.truncate(item_id, index, end_ms)
                self._outbox.put(
                    wire.ConversationItemTruncatedEvent,
                    item_id=item_id,
                    content_index=index,
                    audio_end_ms=end_ms,
                )
            case client.ResponseCreate():
                await self._create_response(event.response or client.ResponseParams())
            case client.ResponseCancel():
                self._cancel_response(event)

    # -- the session and its conversation

    def _update(self, event: client.SessionUpdate) -> None:
        if event.session.get("type") is None:
            raise missing_parameter("session.type")
        self._config = updated(self._config, event.session, self._model, self._state.voices)
        self._apply_config(wire.SessionUpdatedEvent)

    def _apply_config(self, kind: type[wire.SessionCreatedEvent | wire.SessionUpdatedEvent]) -> None:
        config = self._config.audio.input
        self._buffer.configure(config.format, config.turn_detection)
        extensions = {"object": "realtime.session", "id": self.id, "expires_at": self._expires_at}
        self._outbox.put(kind, session=self._config.model_dump() | extensions)

    async def _load(
        self, given: Mapping[str, client.GivenItem | client.ItemReference], param: str
    ) -> list[Item]:
        return await self._loader.load(given, self._config.audio.input.format, param, self._conversation)

    def _add(self, item: Item, previous_item_id: str | None = None) -> None:
        before = self._conversation.add(item, previous_item_id)
        for kind in (wire.ConversationItemAdded, wire.ConversationItemDone):
            self._outbox.put(kind, previous_item_id=before, item=shown(item))

    # -- the user's voice

    async def _append(self, event: client.AudioAppend) -> None:
        if "audio" not in self._model.input_modalities:
            raise InvalidRequestError(
                "This model does not take audio input.", param="audio", code="unsupported_value"
            )
        format = self._config.audio.input.format

        def search() -> list[Started | Stopped]:
            return list(self._buffer.append(decode_audio(event.audio, format, "audio")))

        num_samples = len(event.audio) * 3 / 4 / format.bytes_per_sample
        is_short = num_samples <= _INLINE_S * format.rate_hz
        for turn in search() if is_short else await asyncio.to_thread(search):
            self._take_turn(turn)

    def _take_turn(self, turn: Started | Stopped) -> None:
        detection = self._config.audio.input.turn_detection
        assert detection is not None
        match turn:
            case Started(audio_start_ms=start_ms):
                self._spoken_item_id = new_id("item")
                self._outbox.put(
                    wire.InputAudioBufferSpeechStartedEvent,
                    audio_start_ms=start_ms,
                    item_id=self._spoken_item_id,
                )
                if detection.interrupt_response and (answering := self._answering) is not None:
                    answering.cancel("turn_detected")
            case Stopped(audio_end_ms=end_ms, samples=samples):
                item_id = self._spoken_item_id = self._spoken_item_id or new_id("item")
                self._outbox.put(
                    wire.InputAudioBufferSpeechStoppedEvent, audio_end_ms=end_ms, item_id=item_id
                )
                self._commit(samples)
                if detection.create_response:
                    self._answer_turn()

    def _commit(self, samples: Samples) -> None:
        item_id, self._spoken_item_id = self._spoken_item_id or new_id("item"), None
        config = self._config.audio.input
        audio = HeardAudio(samples, config.format.rate_hz)
        self._outbox.put(
            wire.InputAudioBufferCommittedEvent,
            previous_item_id=self._conversation.last_id,
            item_id=item_id,
        )
        self._add(UserItem(item_id, [audio]))
        if config.transcription is None:
            return
        if not self._has_room(is_out_of_band=True):
            error = OverloadedError("Too many transcriptions and responses are running in this session.")
            report_failure(item_id, error, self._outbox)
            return
        task = asyncio.create_task(
            transcribe(item_id, audio, config.transcription, self._outbox, self._state),
            name=f"realtime transcription of {item_id}",
        )
        self._transcriptions.add(task)
        task.add_done_callback(self._transcriptions.discard)

    def _answer_turn(self) -> None:
        self._answer_is_due = self._answering is not None or not self._has_room(is_out_of_band=False)
        if self._answer_is_due:
            return
        try:
            self._start(client.ResponseParams(), self._conversation.items)
        except OmniError as error:
            self.send_error(error)

    # -- responses

    @property
    def _answering(self) -> ResponseRun | None:
        """The conversation's response that has not written its last event yet."""
        return next((run for run in self._runs if not run.is_out_of_band and not run.is_over), None)

    async def _create_response(self, params: client.ResponseParams) -> None:
        is_out_of_band = params.conversation == "none"
        self._check_room(is_out_of_band)
        items: Sequence[Item] = self._conversation.items
        if params.input is not None:
            given = {f"response.input[{index}]": item for index, item in enumerate(params.input)}
            items = await self._load(given, "response.input")
            self._check_room(is_out_of_band)  # a pending turn may be answered by now
        self._start(params, items)

    def _check_room(self, is_out_of_band: bool) -> None:
        if not is_out_of_band and (answering := self._answering) is not None:
            raise InvalidRequestError(
                f"Conversation already has an active response in progress: {answering.id}. "
                "Wait until the response is finished before creating a new one.",
                code="conversation_already_has_active_response",
            )
        if not self._has_room(is_out_of_band):
            raise InvalidRequestError("Too many responses are in progress.", code="too_many_responses")

    def _has_room(self, is_out_of_band: bool) -> bool:
        num_running = sum(run.is_out_of_band == is_out_of_band for run in self._runs)
        if is_out_of_band:
            return num_running + len(self._transcriptions) < _MAX_OUT_OF_BAND
        return num_running < _MAX_IN_CONVERSATION

    def _start(self, params: client.ResponseParams, items: Sequence[Item]) -> None:
        config = self._config
        if params.overrides:
            config = updated(config, params.overrides, self._model, self._state.voices, param="response")
        name = new_id("resp")
        speech = None
        if config.with_speech:
            voices, param = self._state.voices, "response.audio.output.voice"
            speech = speech_output(config.audio.output.voice, self._model, voices, param)
        text, passages = self._to_read(name, items, config)
        plan = ResponsePlan(
            id=name,
            config=config,
            speech=speech,
            messages=messages_of(items, config.instructions, self._model),
            text=text,
            passages=in_voice(passages, None if speech is None else speech.clone),
            last_read_id=items[-1].id if text is not None and params.input is None else None,
            conversation=self._conversation if params.conversation != "none" else None,
            metadata=params.metadata,
        )
        run = ResponseRun(plan, self._outbox, self._state, self._ended)
        self._runs.add(run)
        if not run.is_out_of_band:
            self._answer_is_due = False

    def _to_read(
        self, name: str, items: Sequence[Item], config: SessionConfig
    ) -> tuple[str | None, Sequence[OmniRequest]]:
        """The text that a model that only reads aloud is to speak, and its requests, as `/v1/audio/speech`
        would make them. Raises `InvalidRequestError`."""
        generator = self._state.require_generator()
        if self._model.speech_stage is None or self._model.text_stage is not None:
            return None, ()
        text, limit = text_to_read(items), config.max_output_tokens
        body = SpeechRequest(
            model=self._model.name,
            input=text,
            voice=config.audio.output.voice,
            instructions=config.instructions,
            stage_sampling={
                self._model.speech_stage: StageSampling(max_tokens=None if limit == "inf" else limit)
            },
        )
        try:
            requests, _ = parse_speech(body, name, generator, self._max_speech_characters)
        except InvalidRequestError as error:
            if error.param in ("input", "instructions"):
                error.param = f"response.{error.param}"
            raise
        return text, requests

    def _ended(self, run: ResponseRun) -> None:
        self._runs.discard(run)
        if self._answer_is_due and self._answering is None:
            self._answer_turn()

    def _cancel_response(self, event: client.ResponseCancel) -> None:
        run = self._answering
        if event.response_id is not None:
            run = next((run for run in self._runs if run.id == event.response_id), None)
        if run is None or run.is_over:
            # Clients recognise this harmless race by its code or by how the message begins.
            raise InvalidRequestError(
                "Cancellation failed: no active response found", code="response_cancel_not_active"
            )
        run.cancel("client_cancelled")
