"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from omni_server.api.media_loader import MediaLoader
from omni_server.api.messages import load_messages
from omni_server.api.openapi import EXAMPLE_MODEL, GENERATION_ERRORS, request_body
from omni_server.api.parse import check_model, parse_chat_request
from omni_server.api.schemas import ChatCompletionRequest, TokenIds, TolerantModel
from omni_server.api.state import ServerState
from omni_server.api.streaming import until_disconnect
from omni_server.api.validation import read_json, unsupported, validate
from omni_server.errors import InvalidRequestError
from omni_server.types import ModelInfo, OmniRequest, RawPrompt, TokenizedPrompt


class TokenizeRequest(TolerantModel):
    """Instead of `prompt`, it may have `messages` and all other fields of a chat."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(TolerantModel):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizationService:
    def __init__(self, state: ServerState, media: MediaLoader) -> None:
        self._state = state
        self._media = media

    async def tokenize(self, request: Request) -> Response:
        answer = await until_disconnect(self._tokenize(await read_json(request)), request.receive)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        answer = await until_disconnect(self._detokenize(await read_json(request)), request.receive)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _tokenize(self, body: object) -> TokenizeResponse:
        fields = body if isinstance(body, dict) else {}
        is_chat = fields.get("messages") is not None
        given = validate(TokenizeRequest, fields | {"prompt": ""} if is_chat else body)
        model = self._checked(given.model)
        request = OmniRequest("", (), raw_prompt=RawPrompt(given.prompt, given.add_special_tokens))
        if is_chat:
            chat = validate(ChatCompletionRequest, fields | {"model": model.name})
            load = partial(load_messages, chat.messages, model, self._media, None)
            (request, *_), _ = await parse_chat_request(
                chat, "", model, lambda hears_videos: load(hears_videos=hears_videos)
            )
        prompt = await self._prompt(request, "messages" if is_chat else "prompt")
        return TokenizeResponse(
            count=len(prompt.token_ids),
            max_model_len=model.max_model_len,
            tokens=list(prompt.token_ids),
            token_strs=list(prompt.strings) if given.return_token_strs else None,
        )

    async def _detokenize(self, body: object) -> DetokenizeResponse:
        given = validate(DetokenizeRequest, body)
        self._checked(given.model)
        request = OmniRequest("", (), raw_prompt=RawPrompt(tuple(given.tokens)))
        return DetokenizeResponse(prompt=(await self._prompt(request, "tokens")).text)

    def _checked(self, name: str | None) -> ModelInfo:
        model = self._state.require_generator().model_info
        check_model(model.name if name is None else name, model)
        if model.text_stage is None:
            raise unsupported(f"The model '{model.name}' writes no text.", "model")
        return model

    async def _prompt(self, request: OmniRequest, param: str) -> TokenizedPrompt:
        try:
            return await self._state.require_generator().tokenize(request)
        except InvalidRequestError as error:
            error.param = param if error.param == "messages" else error.param
            raise


def tokenization_router(state: ServerState, media: MediaLoader) -> APIRouter:
    router, service = APIRouter(tags=["models"]), TokenizationService(state, media)
    text: dict[str, object] = {"model": EXAMPLE_MODEL, "prompt": "Hello"}
    tokens: dict[str, object] = {"model": EXAMPLE_MODEL, "tokens": [9707]}
    router.post(
        "/tokenize",
        summary="Show the tokens of a text or a chat",
        responses={200: {"model": TokenizeResponse}, **GENERATION_ERRORS},
        openapi_extra=request_body(TokenizeRequest, {"text": text}),
    )(service.tokenize)
    router.post(
        "/detokenize",
        summary="Show the text of tokens",
        responses={200: {"model": DetokenizeResponse}, **GENERATION_ERRORS},
        openapi_extra=request_body(DetokenizeRequest, {"tokens": tokens}),
    )(service.detokenize)
    return router
