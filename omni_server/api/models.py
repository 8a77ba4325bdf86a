"""`GET /v1/models`, and the menu of clients such as Open WebUI: `GET /v1/audio/models`."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from omni_server.api.config import ApiConfig
from omni_server.api.images.parse import PARAMETERS
from omni_server.api.images.sizes import offered_sizes
from omni_server.api.openapi import error_responses
from omni_server.api.parse import check_model
from omni_server.api.state import ServerState
from omni_server.types import ModelInfo


class About(BaseModel):
    """`about.json` of the checkpoint."""

    notice: str | None
    example_prompts: list[str]
    understands_speech: bool


class FreeImageSizes(BaseModel):
    multiple: int
    """Width and height are multiples of this many pixels."""
    max_ratio: float
    """Of the longer to the shorter side."""
    max_pixels: int
    """Width x height."""


class Images(BaseModel):
    """What a model that generates images can do."""

    sizes: list[str]
    """That of `auto` first. Like `free_sizes`, within the server's own limit."""
    free_sizes: FreeImageSizes | None
    """Other sizes; null if there are none."""
    parameters: list[str]
    """Extensions that requests may use, besides `seed`, and `partial_images` if streams have previews."""
    max_input_images: int
    """Images that an edit may have; 0 if the model edits none."""
    needs_input_image: bool
    """The model only edits images."""
    loras: list[str]
    """Adapters that requests may choose."""


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "omni-server"
    root: str
    parent: None = None
    max_model_len: int
    modalities: dict[Literal["input", "output"], list[str]]
    voices: list[str]
    clones_voices: bool
    """Recordings of voices can be sent to `/v1/audio/voices`, and are its only voices."""
    max_speech_characters: int | None
    """Of a text to read aloud; None for a model without voices."""
    about: About | None
    images: Images | None
    """None for a model that generates no images."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class AudioModel(BaseModel):
    id: str


class AudioModelList(BaseModel):
    models: list[AudioModel]


def models_router(state: ServerState, config: ApiConfig) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/v1/models",
        summary="List the served names of the model",
        responses=error_responses(503),
        tags=["models"],
    )
    async def list_models() -> ModelList:
        info = state.require_generator().model_info
        return ModelList(data=[_card(name, info, config, state) for name in (info.name, *info.aliases)])

    # Hub ids contain a slash, which clients send as %2F and the server decodes.
    @router.get(
        "/v1/models/{model_id:path}",
        summary="Describe the model",
        responses=error_responses(404, 503),
        tags=["models"],
    )
    async def retrieve_model(model_id: str) -> Model:
        info = state.require_generator().model_info
        check_model(model_id, info)
        return _card(model_id, info, config, state)

    @router.get(
        "/v1/audio/models",
        summary="List the served names of the model",
        responses=error_responses(503),
        tags=["audio"],
    )
    async def list_audio_models() -> AudioModelList:
        info = state.require_generator().model_info
        return AudioModelList(models=[AudioModel(id=name) for name in (info.name, *info.aliases)])

    return router


def _images(info: ModelInfo, max_output_pixels: int) -> Images | None:
    if not info.image_sizes:
        return None
    features = info.image_features
    free = None
    if features.free_sizes is not None:
        free = FreeImageSizes.model_validate(features.free_sizes, from_attributes=True)
        free.max_pixels = min(free.max_pixels, max_output_pixels)
    return Images(
        sizes=[str(size) for size in offered_sizes(info, max_output_pixels)],
        free_sizes=free,
        parameters=sorted(PARAMETERS.get(field, field) for field in features.parameters),
        max_input_images=features.max_input_images,
        needs_input_image=features.needs_input_image,
        loras=list(features.loras),
    )


def _card(name: str, info: ModelInfo, config: ApiConfig, state: ServerState) -> Model:
    edited = ("image",) if info.image_features.max_input_images else ()
    return Model(
        id=name,
        created=info.created,
        root=info.name,
        max_model_len=info.max_model_len,
        modalities={
            "input": list(dict.fromkeys(("text", *info.input_modalities, *edited))),
            "output": [output for output in ("text", "audio", "image") if output in info.outputs],
        },
        voices=state.voices.names() if info.clones_voices else list(info.voices),
        clones_voices=info.clones_voices,
        max_speech_characters=config.max_speech_characters if info.voices else None,
        images=_images(info, config.max_output_pixels),
        about=About.model_validate(info.about, from_attributes=True) if info.about is not None else None,
    )
