"""The ASGI application."""

from fastapi import FastAPI

from omni_server import __version__
from omni_server.api.audio_lists import audio_lists_router
from omni_server.api.chat import chat_router
from omni_server.api.config import ApiConfig
from omni_server.api.errors import install_error_handlers
from omni_server.api.health import health_router
from omni_server.api.middleware import InFlightMiddleware, RequestIdMiddleware
from omni_server.api.models import models_router
from omni_server.api.openapi import install_openapi
from omni_server.api.speech import speech_router
from omni_server.api.state import ServerState
from omni_server.api.transcriptions import transcriptions_router


def create_app(state: ServerState, config: ApiConfig) -> FastAPI:
    """Serves `state.generator`, also before it is there: with 503.

    Raises `ConfigError` for a malformed entry in `config.allowed_media_domains`.
    """
    app = FastAPI(
        title="omni-server",
        version=__version__,
        openapi_url="/openapi.json" if config.docs else None,
        redirect_slashes=False,
    )
    install_error_handlers(app)
    app.include_router(chat_router(state, config))
    app.include_router(speech_router(state, config))
    app.include_router(transcriptions_router(state, config))
    app.include_router(audio_lists_router(state))
    app.include_router(models_router(state))
    app.include_router(health_router(state))
    # The one added last is outermost.
    app.add_middleware(InFlightMiddleware, state=state)
    app.add_middleware(RequestIdMiddleware)
    install_openapi(app)
    return app
