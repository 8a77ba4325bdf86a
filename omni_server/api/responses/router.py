"""`/v1/responses`: OpenAI's Responses API, on the path of chats."""

import asyncio
import base64
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter

from omni_server.api.answer_store import AnswerStore
from omni_server.api.chat import ChatService, OpenedAnswer, encoded, last_encoded
from omni_server.api.config import ApiConfig
from omni_server.api.openapi import (
    EXAMPLE_MODEL,
    GENERATION_ERRORS,
    error_responses,
    event_stream,
    request_body,
)
from omni_server.api.request_record import hold_memory
from omni_server.api.responses.chat_request import chat_messages, chat_request, with_own_names
from omni_server.api.responses.schemas import (
    DeletedResponse,
    InputItem,
    InputMessage,
    ItemReference,
    ResponsesRequest,
)
from omni_server.api.responses.writer import (
    ResponseObject,
    ResponseWriter,
    SpokenAudio,
    StreamEvent,
    new_response,
)
from omni_server.api.schemas import Message
from omni_server.api.state import ServerState
from omni_server.api.streaming import KEEP_ALIVE, EventStreamResponse, named_frame, until_disconnect
from omni_server.api.validation import read_json, validate
from omni_server.audio.encode import StreamEncoder, encode
from omni_server.audio.formats import AudioFormat
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.types import AudioDelta, Finished

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ResponsesService:
    def __init__(self, state: ServerState, config: ApiConfig, chats: ChatService, store: AnswerStore) -> None:
        self._state = state
        self._config = config
        self._chats = chats
        self._store = store

    async def create_response(self, request: Request) -> Response:
        self._state.require_generator()  # before reading megabytes of body
        body = validate(ResponsesRequest, await read_json(request))
        return await until_disconnect(self._answer(body), request.receive)

    async def get_response(self, response_id: str) -> Response:
        return Response(self._find(response_id), media_type="application/json")

    async def delete_response(self, response_id: str) -> DeletedResponse:
        response = ResponseObject.model_validate_json(self._find(response_id))
        for id in (response_id, _conversation_of(response_id), *(item.id for item in response.output)):
            self._store.remove(id or "")
        return DeletedResponse(id=response_id)

    async def _answer(self, request: ResponsesRequest) -> Response:
        conversation, fields = await self._conversation(request)
        messages, sources = chat_messages(conversation)
        names = [fields[index] for index in sources]
        if request.instructions is not None:
            messages.insert(0, Message(role="system", content=request.instructions))
            names.insert(0, "instructions")
        response_id = f"resp_{uuid.uuid4().hex}"
        async with AsyncExitStack() as held:
            try:
                chat = chat_request(request, messages)
                opened = await self._chats.open(
                    chat, response_id, held, truncates=request.truncation == "auto"
                )
            except InvalidRequestError as error:
                raise with_own_names(error, names) from None
            if request.store:  # in the bounded store already while the answer is made
                kept = await asyncio.to_thread(_ITEMS.dump_json, conversation, exclude_unset=True)
                self._store.add(f"input_{response_id}", kept[1:-1])
                held.callback(self._store.remove, f"input_{response_id}")
            response = new_response(response_id, opened.model.name, request)
            writer = ResponseWriter(response, with_logprobs=chat.logprobs is True)
            if request.stream:
                frames = self._frames(opened, writer, request.store)
                return _ResponseStream(writer, frames, held.pop_all())
            samples: list[npt.NDArray[np.float32]] = []
            async with aclosing(opened.stream.events()) as events:
                async for item in events:
                    if item is not None and isinstance(item[1], AudioDelta):
                        samples.append(item[1].samples)
                    elif item is not None:
                        list(writer.take(item[1]))
            self._keep(request.store, response)
            if opened.audio_format is None or not samples:
                return _body(response)
            return await asyncio.to_thread(_spoken_body, response, samples, opened.audio_format)

    async def _conversation(self, request: ResponsesRequest) -> tuple[list[InputItem], list[str]]:
        """Returns the items of previous responses and of the request, and the request field of each."""
        items: list[InputItem] = []
        if request.previous_response_id is not None:
            kept = self._find(request.previous_response_id, is_previous=True)
            await hold_memory(len(kept))
            items = await asyncio.to_thread(_parsed, kept)
        fields = ["previous_response_id"] * len(items)
        if isinstance(request.input, str):
            return [*items, InputMessage(role="user", content=request.input)], [*fields, "input"]
        found: dict[str, InputItem] = {}  # a body has room for very many references
        for index, item in enumerate(request.input):
            if isinstance(item, ItemReference):
                if item.id not in found:
                    found[item.id] = self._referenced(item, index)
                item = found[item.id]
            items.append(item)
            fields.append(f"input[{index}]")
        return items, fields

    def _referenced(self, reference: ItemReference, index: int) -> InputItem:
        kept = self._store.find(reference.id, "msg_", "fc_")
        if kept is None:
            raise InvalidRequestError(
                f"Item '{reference.id[:64]}' was not found: this server keeps no item for long, and none of "
                "a response with 'store' false. Send the item itself.",
                param=f"input[{index}].id",
                code="item_not_found",
            )
        return _parsed(kept)[0]

    def _find(self, response_id: str, *, is_previous: bool = False) -> bytes:
        """Returns the response, or its conversation if it is the previous one of a request."""
        if is_previous:
            kept = self._store.find(_conversation_of(response_id), "conversation_resp_")
        else:
            kept = self._store.find(response_id, "resp_")
        if kept is None:
            error = InvalidRequestError(
                f"Response '{response_id[:64]}' was not found. This server keeps responses with 'store' true, "
                "for a limited time.",
                param="previous_response_id" if is_previous else "response_id",
                code="previous_response_not_found" if is_previous else "response_not_found",
            )
            error.status = 400 if is_previous else 404
            raise error
        return kept

    def _keep(self, store: bool | None, response: ResponseObject) -> None:
        if store is False:
            return
        output = [(item.id, item.model_dump_json(exclude_unset=True).encode()) for item in response.output]
        for id, data in output:
            self._store.add(id or "", data)
        given = self._store.find(f"input_{response.id}", "input_")
        if given is not None:
            self._store.remove(f"input_{response.id}")  # both would take the place of others' entries
            self._store.add(_conversation_of(response.id), b",".join([given, *(data for _, data in output)]))
            self._store.add(response.id, _json(response))

    async def _frames(
        self, opened: OpenedAnswer, writer: ResponseWriter, store: bool | None
    ) -> AsyncGenerator[bytes, None]:
        encoder = StreamEncoder(opened.audio_format) if opened.audio_format is not None else None
        is_spoken = False
        for event in writer.opening():
            yield named_frame(event.type, event)
        heartbeat_s, pace = self._config.sse_keep_alive_s, self._state.audio_pace()
        async with aclosing(opened.stream.events(heartbeat_s, pace)) as events:
            async for item in events:
                if item is None:
                    yield KEEP_ALIVE
                    continue
                if encoder is not None and isinstance(item[1], AudioDelta):
                    is_spoken = True
                    for event in writer.audio(await encoded(encoder, item[1].samples)):
                        yield named_frame(event.type, event)
                if encoder is not None and is_spoken and isinstance(item[1], Finished):
                    for event in writer.audio(await last_encoded(encoder), is_last=True):
                        yield named_frame(event.type, event)
                frames = [named_frame(event.type, event) for event in writer.take(item[1])]
                if isinstance(item[1], Finished):  # before the client can refer to it
                    self._keep(store, writer.response)
                for frame in frames:
                    yield frame


class _ResponseStream(EventStreamResponse):
    def __init__(
        self, writer: ResponseWriter, frames: AsyncGenerator[bytes, None], held: AsyncExitStack
    ) -> None:
        super().__init__(writer.response.id, frames, held=held)
        self._writer = writer

    def ending(self, error: OmniError) -> bytes:
        return b"".join(named_frame(event.type, event) for event in self._writer.failed(error))


def _conversation_of(response_id: str) -> str:
    """Where its input and output are kept, with those of previous responses: items, comma-separated."""
    return f"conversation_{response_id}"


def _parsed(items: bytes) -> list[InputItem]:
    return _ITEMS.validate_json(b"[%b]" % items)


def _json(response: ResponseObject) -> bytes:
    return response.model_dump_json(by_alias=True, exclude_unset=True).encode()


def _body(response: ResponseObject) -> Response:
    return Response(_json(response), media_type="application/json")


def _spoken_body(
    response: ResponseObject, samples: Sequence[npt.NDArray[np.float32]], audio_format: AudioFormat
) -> Response:
    data = base64.b64encode(encode(np.concatenate(samples), audio_format)).decode("ascii")
    audio = SpokenAudio(data=data, format=audio_format)
    return _body(response.model_copy(update={"audio": audio}))


_QUESTION = {"model": EXAMPLE_MODEL, "input": "What is the capital of France?"}
_EXAMPLES: dict[str, dict[str, object]] = {
    "text": {**_QUESTION, "max_output_tokens": 64},
    "speech": {
        **_QUESTION,
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav"},
    },
}


def responses_router(responses: ResponsesService) -> APIRouter:
    router = APIRouter(prefix="/v1/responses", tags=["responses"])
    router.post(
        "",
        summary="Answer a conversation, as OpenAI's Responses API",
        responses={
            200: {
                "model": ResponseObject,
                "description": "The response; with `stream: true` as OpenAI's server-sent events, the last of "
                "which is `response.completed`, `response.incomplete` or `response.failed`.",
                "content": {"text/event-stream": event_stream(StreamEvent)},
            },
            **GENERATION_ERRORS,
        },
        openapi_extra=request_body(ResponsesRequest, _EXAMPLES),
    )(responses.create_response)
    router.get(
        "/{response_id}",
        summary="Get a stored response",
        responses={200: {"model": ResponseObject}, **error_responses(404)},
    )(responses.get_response)
    router.delete("/{response_id}", summary="Forget a stored response", responses=error_responses(404))(
        responses.delete_response
    )
    return router
