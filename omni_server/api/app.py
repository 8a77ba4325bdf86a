"""The ASGI application."""

from functools import partial

from fastapi import FastAPI
from starlette.types import Lifespan

from omni_server import __version__
from omni_server.api.access import AccessMiddleware, ApiKeys, CorsHeaders, needs_key
from omni_server.api.answer_store import AnswerStore
from omni_server.api.chat import ChatService, chat_router
from omni_server.api.completions import completions_router
from omni_server.api.config import ApiConfig
from omni_server.api.errors import install_error_handlers
from omni_server.api.images.router import images_router
from omni_server.api.limits import (
    Admission,
    AdmissionMiddleware,
    BodyLimitMiddleware,
    HeadLimitMiddleware,
    LingerMiddleware,
)
from omni_server.api.media_loader import MediaLoader
from omni_server.api.middleware import RequestIdMiddleware, UnexpectedErrorMiddleware
from omni_server.api.models import models_router
from omni_server.api.openapi import install_openapi
from omni_server.api.operations import health_router, metrics_router
from omni_server.api.realtime.router import realtime_router
from omni_server.api.responses.router import ResponsesService, responses_router
from omni_server.api.speech import speech_router
from omni_server.api.speech_socket import speech_socket_router
from omni_server.api.state import ServerState
from omni_server.api.tokenization import tokenization_router
from omni_server.api.transcriptions import transcriptions_router
from omni_server.api.unsent import UnsentBudget
from omni_server.api.voice_store import VoiceStore
from omni_server.api.voices_router import voices_router
from omni_server.api.web.page import docs_router, page_router


def create_app(state: ServerState, config: ApiConfig, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """Serves `state.generator`; responds with 503 until it is set. `lifespan` is for web servers that run it.

    Raises `ConfigError` for a malformed entry in `config.allowed_media_domains`, an invalid media folder or
    folder of voices, or a malformed API key.
    """
    keys = ApiKeys(config.api_keys)
    state.unsent = UnsentBudget(
        config.max_unsent_bytes, config.max_total_unsent_bytes, state.metrics.answers_dropped.inc
    )
    state.max_audio_ahead_s = config.max_audio_ahead_s
    state.voices = VoiceStore(config.voices_folder)
    admission = Admission(
        state.metrics, max_queue=config.max_queue, max_per_caller=config.max_concurrency_per_key
    )
    media = MediaLoader(config)
    app = FastAPI(
        title="omni-server",
        description="OpenAPI has no WebSockets: `/v1/realtime`, OpenAI's realtime API, and "
        "`/v1/audio/speech/stream` are served as well.",
        version=__version__,
        openapi_url="/openapi.json" if config.docs else None,
        docs_url=None,  # `docs_router` serves it without a CDN
        redoc_url=None,
        redirect_slashes=False,
        root_path=config.root_path,
        lifespan=lifespan,
    )
    install_error_handlers(app)
    store = AnswerStore(config)
    chats = ChatService(state, config, admission, media, store)
    app.include_router(chat_router(chats))
    app.include_router(responses_router(ResponsesService(state, config, chats, store)))
    app.include_router(completions_router(state, config, admission))
    app.include_router(tokenization_router(state, media))
    app.include_router(speech_router(state, config, media))
    app.include_router(voices_router(state, config, media))
    app.include_router(transcriptions_router(state, config, media))
    app.include_router(images_router(state, config, admission, media))
    app.include_router(models_router(state, config))
    app.include_router(health_router(state, admission))
    app.include_router(metrics_router(state, admission))
    app.include_router(page_router())
    if config.docs:
        app.include_router(docs_router())
    app.include_router(realtime_router(state, config, media))
    app.include_router(speech_socket_router(state, config, media))
    # The last one added is outermost.
    app.add_middleware(BodyLimitMiddleware, config=config, metrics=state.metrics)
    app.add_middleware(AdmissionMiddleware, admission=admission, state=state)
    app.add_middleware(AccessMiddleware, config=config, keys=keys)
    app.add_middleware(UnexpectedErrorMiddleware)
    if config.cors.allowed_origins:
        app.add_middleware(CorsHeaders, rules=config.cors)
    app.add_middleware(HeadLimitMiddleware, config=config)
    app.add_middleware(
        RequestIdMiddleware, metrics=state.metrics, is_logged=config.access_log, tracer=state.tracer
    )
    app.add_middleware(LingerMiddleware)
    install_openapi(app, needs_key=partial(needs_key, config) if keys else None)
    return app
