"""`GET /v1/models`."""

from fastapi import APIRouter

from omni_server.api.openapi import error_responses
from omni_server.api.parse import check_model
from omni_server.api.responses import About, Model, ModelList
from omni_server.api.state import ServerState
from omni_server.types import ModelInfo


def models_router(state: ServerState) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("", summary="List the served names of the model", responses=error_responses(503))
    async def list_models() -> ModelList:
        info = state.require_generator().model_info
        return ModelList(data=[_card(name, info) for name in (info.name, *info.aliases)])

    # Hub ids hold a slash, which clients send as %2F and the server hands on decoded.
    @router.get("/{model_id:path}", summary="Describe the model", responses=error_responses(404, 503))
    async def retrieve_model(model_id: str) -> Model:
        info = state.require_generator().model_info
        check_model(model_id, info)
        return _card(model_id, info)

    return router


def _card(name: str, info: ModelInfo) -> Model:
    return Model(
        id=name,
        created=info.created,
        root=info.name,
        max_model_len=info.max_model_len,
        modalities={
            "input": ["text", *info.input_modalities],
            "output": [output for output in ("text", "audio", "image") if output in info.outputs],
        },
        voices=list(info.voices),
        about=None
        if info.about is None
        else About(notice=info.about.notice, example_prompts=list(info.about.example_prompts)),
    )
