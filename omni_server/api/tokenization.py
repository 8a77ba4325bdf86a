"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from omni_server.api.media_loader import MediaLoader
from omni_server.api.messages import load_messages
from omni_server.api.openapi import EXAMPLE_MODEL, GENERATION_ERRORS, request_body
from omni_server.api.parse import check_text_model, parse_chat_request
from omni_server.api.schemas import ChatCompletionRequest, TokenIds, TolerantModel
from omni_server.api.state import ServerState
from omni_server.api.streaming import until_disconnect
from omni_server.api.validation import read_json, validate
from omni_server.errors import InvalidRequestError
from omni_server.types import OmniRequest, Prompt, TokenizedPrompt


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


async def _tokenize(state: ServerState, media: MediaLoader, body: object) -> TokenizeResponse:
    fields = body if isinstance(body, dict) else {}
    is_chat = fields.get("messages") is not None
    given = validate(TokenizeRequest, fields | {"prompt": ""} if is_chat else body)
    model = state.require_generator().model_info
    check_text_model(given.model, model)
    prompt = Prompt(given.prompt, add_special_tokens=given.add_special_tokens)
    request = OmniRequest("", (), prompt=prompt)
    if is_chat:
        chat = validate(ChatCompletionRequest, fields | {"model": model.name})
        (request, *_), _ = await parse_chat_request(
            chat,
            "",
            model,
            state.voices,
            lambda hears: load_messages(chat.messages, model, media, None, hears_videos=hears),
        )
    tokenized = await _tokenized(state, request, "messages" if is_chat else "prompt")
    return TokenizeResponse(
        count=len(tokenized.token_ids),
        max_model_len=model.max_model_len,
        tokens=list(tokenized.token_ids),
        token_strs=list(tokenized.strings) if given.return_token_strs else None,
    )


async def _tokenized(state: ServerState, request: OmniRequest, param: str) -> TokenizedPrompt:
    try:
        return await state.require_generator().tokenize(request)
    except InvalidRequestError as error:
        error.param = param if error.param == "messages" else error.param
        raise


def tokenization_router(state: ServerState, media: MediaLoader) -> APIRouter:
    router = APIRouter(tags=["models"], responses=GENERATION_ERRORS)
    text: dict[str, object] = {"model": EXAMPLE_MODEL, "prompt": "Hello"}
    tokens: dict[str, object] = {"model": EXAMPLE_MODEL, "tokens": [9707]}

    @router.post(
        "/tokenize",
        summary="Show the tokens of a text or a chat",
        openapi_extra=request_body(TokenizeRequest, {"text": text}),
    )
    async def tokenize(request: Request) -> TokenizeResponse:
        return await until_disconnect(_tokenize(state, media, await read_json(request)), request.receive)

    @router.post(
        "/detokenize",
        summary="Show the text of tokens",
        openapi_extra=request_body(DetokenizeRequest, {"tokens": tokens}),
    )
    async def detokenize(request: Request) -> DetokenizeResponse:
        given = validate(DetokenizeRequest, await read_json(request))
        check_text_model(given.model, state.require_generator().model_info)
        prompt = Prompt(token_ids=tuple(given.tokens))
        tokenized = await _tokenized(state, OmniRequest("", (), prompt=prompt), "tokens")
        return DetokenizeResponse(prompt=tokenized.text)

    return router
