"""`GET /v1/audio/voices` and `GET /v1/audio/models`: what clients such as Open WebUI show in their menus."""

from fastapi import APIRouter
from pydantic import BaseModel

from omni_server.api.openapi import error_responses
from omni_server.api.state import ServerState
from omni_server.api.voices import voice_aliases


class Voice(BaseModel):
    id: str
    name: str
    alias_of: str | None = None
    """The voice of the model that is heard under this name; absent for the model's own voices."""


class VoiceList(BaseModel):
    voices: list[Voice]


class AudioModel(BaseModel):
    id: str


class AudioModelList(BaseModel):
    models: list[AudioModel]


def audio_lists_router(state: ServerState) -> APIRouter:
    router = APIRouter(prefix="/v1/audio", tags=["audio"])
    responses = error_responses(503)

    @router.get(
        "/voices",
        summary="List the voices, and the names of OpenAI's voices that stand for them",
        responses=responses,
        response_model_exclude_unset=True,
    )
    async def list_voices() -> VoiceList:
        info = state.require_generator().model_info
        own = [Voice(id=voice, name=voice) for voice in info.voices]
        aliases = [Voice(id=name, name=name, alias_of=voice) for name, voice in voice_aliases(info).items()]
        return VoiceList(voices=own + aliases)

    @router.get("/models", summary="List the served names of the model", responses=responses)
    async def list_audio_models() -> AudioModelList:
        info = state.require_generator().model_info
        return AudioModelList(models=[AudioModel(id=name) for name in (info.name, *info.aliases)])

    return router
