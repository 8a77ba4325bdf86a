"""`/v1/realtime`: voice conversations with the events of OpenAI's Realtime API."""

from collections.abc import Callable

from fastapi import APIRouter, WebSocket

from omni_server.api.config import ApiConfig
from omni_server.api.media_loader import MediaLoader
from omni_server.api.realtime.connection import serve_session
from omni_server.api.realtime.input_buffer import InputBuffer
from omni_server.api.realtime.item_loader import ItemLoader
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.session import Session
from omni_server.api.realtime.vad import SileroModel, SpeechModel
from omni_server.api.state import ServerState
from omni_server.errors import InvalidRequestError
from omni_server.types import ModelInfo


def realtime_router(
    state: ServerState,
    config: ApiConfig,
    media: MediaLoader,
    new_model: Callable[[], SpeechModel] = SileroModel,
) -> APIRouter:
    """`new_model` creates the speech detector of one audio stream."""
    router = APIRouter()

    def open_session(model: ModelInfo, outbox: Outbox) -> Session:
        if model.text_stage is None and not model.voices:
            raise InvalidRequestError(
                f"The model '{model.name}' holds no conversations.", param="model", code="unsupported_value"
            )
        return Session(
            model,
            state,
            outbox,
            InputBuffer(new_model, config.media_limits.max_audio_seconds),
            ItemLoader(media, config.media_limits, model),
            duration_s=config.realtime_session_timeout_s,
            max_speech_characters=config.max_speech_characters,
        )

    @router.websocket("/v1/realtime", name="realtime")
    async def serve(websocket: WebSocket) -> None:
        await serve_session(websocket, state, config, open_session)

    return router
