"""Transcribes user audio with a short text-only request outside of the conversation."""

import logging
from contextlib import aclosing

from openai.types import realtime as wire

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.errors import unexpected_error
from omni_server.api.parse import check_transcribes
from omni_server.api.realtime.conversation import audio_part
from omni_server.api.realtime.items import HeardAudio
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.server_events import failure, new_id, transcription_usage
from omni_server.api.realtime.session_config import Transcription
from omni_server.api.sampling import text_sampling
from omni_server.api.state import ServerState
from omni_server.errors import OmniError
from omni_server.types import Finished, OmniRequest, SamplingConfig, TextDelta, Transcribe

logger = logging.getLogger(__name__)


async def transcribe(
    item_id: str, audio: HeardAudio, config: Transcription, outbox: Outbox, state: ServerState
) -> None:
    """Transcribes `audio` of the item, writes the events and sets `audio.transcript`."""
    with state.request_in_flight():
        try:
            await _transcribe(item_id, audio, config, outbox, state)
        except OmniError as error:
            report_failure(item_id, error, outbox)
        except Exception:
            logger.exception("transcription of %s failed", item_id)
            report_failure(item_id, unexpected_error(), outbox)


def report_failure(item_id: str, error: OmniError, outbox: Outbox) -> None:
    kind = wire.ConversationItemInputAudioTranscriptionFailedEvent
    outbox.put(kind, item_id=item_id, content_index=0, error=failure(error))


async def _transcribe(
    item_id: str, audio: HeardAudio, config: Transcription, outbox: Outbox, state: ServerState
) -> None:
    generator = state.require_generator()
    check_transcribes(generator.model_info)
    task = Transcribe(audio_part(audio), language=config.language, hint=config.prompt)
    request = OmniRequest(
        request_id=new_id("transcribe"),
        messages=generator.task_messages(task),
        sampling=text_sampling(SamplingConfig(temperature=0.0), generator.model_info),
    )
    transcript = ""
    answer = AnswerStream(generator, state, request.request_id, one_by_one=[request], input_param="audio")
    async with aclosing(answer), aclosing(answer.events()) as events:
        async for item in events:
            match item:
                case (_, TextDelta(text=text)) if text:
                    transcript += text
                    kind = wire.ConversationItemInputAudioTranscriptionDeltaEvent
                    outbox.put(kind, item_id=item_id, content_index=0, delta=text)
                case (_, Finished(usage=usage)):
                    audio.transcript = transcript
                    outbox.put(
                        wire.ConversationItemInputAudioTranscriptionCompletedEvent,
                        item_id=item_id,
                        content_index=0,
                        transcript=transcript,
                        usage=transcription_usage(usage),
                    )
