"""`/v1/realtime`: who is let in."""

import logging
import time
from collections.abc import Callable

from fastapi import APIRouter, WebSocket

from omni_server.api.config import ApiConfig
from omni_server.api.errors import error_response
from omni_server.api.media_loader import MediaLoader
from omni_server.api.parse import check_model
from omni_server.api.realtime.connection import Connection
from omni_server.api.realtime.input_buffer import InputBuffer
from omni_server.api.realtime.item_loader import ItemLoader
from omni_server.api.realtime.live_session import LiveSession
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.vad import SileroModel, SpeechModel
from omni_server.api.state import ServerState
from omni_server.errors import OmniError, OverloadedError
from omni_server.types import ModelInfo

logger = logging.getLogger(__name__)

_SUBPROTOCOL = "realtime"
"""Browsers offer it beside `openai-insecure-api-key.<key>`, as they cannot set headers."""


class RealtimeService:
    def __init__(self, state: ServerState, config: ApiConfig, new_model: Callable[[], SpeechModel]) -> None:
        self._state = state
        self._config = config
        self._new_model = new_model
        self._media = MediaLoader.from_config(config)
        self.num_sessions = 0

    async def serve(self, websocket: WebSocket) -> None:
        """Refuses the upgrade with the status and body that a request would get, or serves until the end."""
        try:
            model = self._state.require_generator().model_info
            check_model(websocket.query_params.get("model", model.name), model)
            if self.num_sessions >= self._config.realtime_max_sessions:
                raise OverloadedError("The server has as many realtime sessions as it serves.")
        except OmniError as error:
            await websocket.send_denial_response(error_response(error))
            return
        self.num_sessions += 1
        try:
            offered: list[str] = websocket.scope["subprotocols"]
            await websocket.accept(subprotocol=_SUBPROTOCOL if _SUBPROTOCOL in offered else None)
            await self._run(websocket, model)
        finally:
            self.num_sessions -= 1

    async def _run(self, websocket: WebSocket, model: ModelInfo) -> None:
        config = self._config
        outbox = Outbox(websocket.send_text, config.realtime_send_timeout_s)
        session = LiveSession(
            model,
            self._state,
            outbox,
            InputBuffer(self._new_model, config.media_limits.max_audio_seconds),
            ItemLoader(self._media, config.media_limits, model),
            duration_s=config.realtime_session_timeout_s,
        )
        began = time.monotonic()
        end = await Connection(websocket, session, outbox, self._state).run(config)
        logger.info("realtime session %s ended after %.1f s: %s", session.id, time.monotonic() - began, end.reason)


def realtime_router(
    state: ServerState, config: ApiConfig, new_model: Callable[[], SpeechModel] = SileroModel
) -> APIRouter:
    """`new_model` makes the detector of speech for one stream of sound."""
    router = APIRouter()
    service = RealtimeService(state, config, new_model)

    @router.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        await service.serve(websocket)

    return router
