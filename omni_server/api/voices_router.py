"""`/v1/audio/voices`: lists the voices; adds and deletes those that are made of recordings."""

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.config import ApiConfig
from omni_server.api.forms import Form, FormLimits, form_body, parse_form, read_form
from omni_server.api.media_loader import MediaLoader
from omni_server.api.openapi import GENERATION_ERRORS, error_responses
from omni_server.api.request_record import ANONYMOUS, current_request
from omni_server.api.state import ServerState
from omni_server.api.streaming import until_disconnect
from omni_server.api.validation import unsupported
from omni_server.api.voice_store import StoredVoice
from omni_server.api.voices import voice_aliases
from omni_server.errors import InvalidRequestError, VoiceNotFoundError

_FILE = "audio_sample"


class Voice(BaseModel):
    id: str
    name: str
    alias_of: str | None = None
    """The model's voice that this name maps to; absent for the model's own voices."""
    uploaded: bool = False
    """Made of a recording; absent for others."""


class VoiceList(BaseModel):
    voices: list[Voice]


class VoiceForm(BaseModel):
    """The fields of the form except the recording; those that are not listed are ignored."""

    model_config = ConfigDict(extra="ignore", str_strip_whitespace=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^\w[\w .-]{0,63}$")]
    """What requests call it: letters, digits, spaces and `_.-`. Case makes no difference."""
    consent: Annotated[str, Field(min_length=1, max_length=1024)]
    """Who agreed, and when, that this voice is used; the server keeps it with the voice."""
    ref_text: Annotated[str, Field(max_length=4096)] | None = None
    """Extension: what is said in the recording. With it, speech continues the recording and resembles it
    more; without, it has its voice."""


class CreatedVoice(BaseModel):
    object: Literal["audio.voice"] = "audio.voice"
    id: str
    name: str
    created_at: int


class DeletedVoice(BaseModel):
    object: Literal["audio.voice.deleted"] = "audio.voice.deleted"
    id: str
    deleted: Literal[True] = True


def voices_router(state: ServerState, config: ApiConfig, media: MediaLoader) -> APIRouter:
    router, voices = APIRouter(tags=["audio"]), state.voices
    limits = FormLimits(config.max_upload_bytes, file_param=_FILE)

    async def create(form: Form) -> CreatedVoice:
        generator = state.require_generator()
        fields, files = parse_form(form, VoiceForm, _FILE)
        if not fields.name.isprintable():  # such as joiners, which make names that look alike
            raise InvalidRequestError("A name has no invisible characters.", param="name")
        if fields.name.casefold() in (voice.casefold() for voice in generator.model_info.voices):
            raise InvalidRequestError(f"The model has a voice '{fields.name}' of its own.", param="name")
        voices.check_new(fields.name)  # before the work
        try:
            recording = await media.load_voice(files[-1])
            clone = await generator.clone_voice(recording, (fields.ref_text or "").strip())
        except InvalidRequestError as error:
            error.param = _FILE
            raise
        created_at = int(time.time())
        voices.add(StoredVoice(fields.name, created_at, fields.consent, clone))
        return CreatedVoice(id=fields.name, name=fields.name, created_at=created_at)

    @router.get(
        "/v1/audio/voices",
        summary="List the voices, and the names of OpenAI's voices that stand for them",
        responses=error_responses(503),
        response_model_exclude_unset=True,
    )
    async def list_voices() -> VoiceList:
        info = state.require_generator().model_info
        if info.clones_voices:
            record = current_request()
            is_stranger = bool(config.api_keys) and (record is None or record.caller == ANONYMOUS)
            names = [] if is_stranger else voices.names()  # of people
            return VoiceList(voices=[Voice(id=name, name=name, uploaded=True) for name in names])
        own = [Voice(id=voice, name=voice) for voice in info.voices]
        aliases = [Voice(id=name, name=name, alias_of=voice) for name, voice in voice_aliases(info).items()]
        return VoiceList(voices=own + aliases)

    @router.post(
        "/v1/audio/voices",
        summary="Make a voice of a recording",
        responses=GENERATION_ERRORS,
        openapi_extra=form_body(VoiceForm, {_FILE: {"type": "string", "format": "binary"}}, _FILE),
    )
    async def create_voice(request: Request) -> CreatedVoice:
        if not state.require_generator().model_info.clones_voices:  # before reading megabytes of body
            raise unsupported("This model clones no voices.", "model")
        return await until_disconnect(create(await read_form(request, limits)), request.receive)

    @router.delete("/v1/audio/voices/{name}", summary="Delete a voice", responses=error_responses(404))
    async def delete_voice(name: str) -> DeletedVoice:
        voice = voices.find(name)
        if voice is None:
            raise VoiceNotFoundError(f"No voice '{name[:64]}' was sent.", param="name")
        voices.remove(voice)
        return DeletedVoice(id=voice.name)

    return router
