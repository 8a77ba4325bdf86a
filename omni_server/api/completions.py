"""`POST /v1/completions`: text that continues a prompt as it is, without the chat template."""

import codecs
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel, Discriminator, Field, Tag

from omni_server.api.answer_stream import AnswerStream, ChoiceEvent
from omni_server.api.config import ApiConfig
from omni_server.api.constraints import structured_output
from omni_server.api.limits import Admission
from omni_server.api.openapi import EXAMPLE_MODEL, GENERATION_ERRORS, event_stream, request_body
from omni_server.api.parse import check_text_fields, check_text_model, choices_of
from omni_server.api.render import CollectedChoice, choice_logprobs
from omni_server.api.sampling import sampling_of_text, text_sampling
from omni_server.api.schemas import Count, NonEmpty, TextFields, TokenIds
from omni_server.api.state import ServerState
from omni_server.api.streaming import DONE, KEEP_ALIVE, EventStreamResponse, frame, until_disconnect
from omni_server.api.usage import CompletionUsage, completion_usage, total_usage
from omni_server.api.validation import Integer, read_json, validate
from omni_server.types import (
    Finished,
    FinishReason,
    ModelInfo,
    OmniRequest,
    Prompt,
    SampledToken,
    TextDelta,
    Usage,
)


def _prompt_kind(prompt: object) -> str:
    if not isinstance(prompt, list):
        return "string"
    first = prompt[0] if prompt else None
    if isinstance(first, list):
        return "lists of tokens"
    return "tokens" if isinstance(first, int | float) else "strings"


class CompletionRequest(TextFields):
    """Fields that are not listed are accepted and ignored, as many clients send them."""

    prompt: Annotated[
        Annotated[NonEmpty, Tag("string")]
        | Annotated[list[NonEmpty], Field(min_length=1, max_length=1024, fail_fast=True), Tag("strings")]
        | Annotated[TokenIds, Tag("tokens")]
        | Annotated[list[TokenIds], Field(max_length=1024, fail_fast=True), Tag("lists of tokens")],
        Discriminator(_prompt_kind),
    ]
    """One or several prompts, as text or token ids. Text may spell special tokens."""
    max_tokens: Count | None = 16
    """null: as many as fit."""
    n: Annotated[Integer, Field(ge=1, le=128)] | None = None
    """Choices for each prompt."""
    logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool = True
    """vLLM's extension: add those that the tokenizer puts around text."""


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    """null in all pieces of a stream but each choice's last."""


class TextCompletion(BaseModel):
    """A whole answer, or one frame of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: CompletionUsage | None = None


class _Choice:
    """Renders one choice, whole or in pieces."""

    def __init__(self, index: int, body: CompletionRequest) -> None:
        self._index = index
        self._body = body
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(
        self, text: str, tokens: Sequence[SampledToken], finish_reason: FinishReason | None = None
    ) -> TextChoice:
        logprobs = None if self._body.logprobs is None else self._logprobs(tokens)
        return TextChoice(index=self._index, text=text, logprobs=logprobs, finish_reason=finish_reason)

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Logprobs:
        entries = choice_logprobs(tokens).content or []
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offset)  # of a token inside a character: the character's
            shown = bytes(entry.bytes or ())
            if not shown and self._body.skip_special_tokens is False:
                shown = entry.token.encode()
            self._offset += len(self._decoder.decode(shown))
        return Logprobs(
            text_offset=offsets,
            token_logprobs=[entry.logprob for entry in entries],
            tokens=[entry.token for entry in entries],
            top_logprobs=[
                {top.token: top.logprob for top in entry.top_logprobs} | {entry.token: entry.logprob}
                for entry in entries
            ],
        )


async def _answer(state: ServerState, config: ApiConfig, admission: Admission, given: object) -> Response:
    generator = state.require_generator()
    body, model = validate(CompletionRequest, given), generator.model_info
    request, prompts, num_choices = _request(body, model), _prompts(body), body.n or 1
    total = len(prompts) * num_choices
    admission.enter_choices(total, "n" if num_choices > 1 else "prompt")
    choices = [_Choice(index, body) for index in range(total)]
    completion = TextCompletion(
        id=f"cmpl-{uuid.uuid4().hex}",
        object="text_completion",
        created=int(time.time()),
        model=model.name,
        system_fingerprint=model.fingerprint,
        choices=[],
    )
    if body.stream_options is not None and body.stream_options.include_usage:
        completion.usage = None  # set: each chunk has the field
    async with AsyncExitStack() as held:
        stream = AnswerStream(generator, state, completion.id, input_param="prompt")
        held.push_async_callback(stream.aclose)
        for index, prompt in enumerate(prompts):
            own = replace(request, request_id=f"{completion.id}-{index}", prompt=prompt)
            for choice in choices_of(own, num_choices, model.text_stage):
                await stream.submit(choice)
        if body.stream:
            events = stream.events(config.sse_keep_alive_s)
            frames = _frames(events, completion, choices, num_choices)
            return EventStreamResponse(completion.id, frames, held=held.pop_all())
        collected = [CollectedChoice(with_logprobs=True) for _ in choices]
        async with aclosing(stream.events()) as events:
            async for item in events:
                if item is not None:
                    collected[item[0]].take(item[1])
    completion.choices = [
        choice.piece(whole.text, whole.logprobs or (), whole.finished.finish_reason)
        for choice, whole in zip(choices, collected, strict=True)
    ]
    usages = [whole.finished.usage for whole in collected]
    completion.usage = completion_usage(total_usage(usages, num_choices))
    return Response(completion.model_dump_json(), media_type="application/json")


async def _frames(
    events: AsyncGenerator[ChoiceEvent | None, None],
    completion: TextCompletion,
    choices: list[_Choice],
    num_choices: int,
) -> AsyncGenerator[bytes, None]:
    """After a failure, finish reason and `[DONE]` are missing."""
    usages: dict[int, Usage] = {}
    async with aclosing(events):
        async for item in events:
            match item:
                case None:
                    yield KEEP_ALIVE
                case index, TextDelta(text=text, logprobs=tokens):
                    piece = choices[index].piece(text, tokens)
                    yield frame(completion.model_copy(update={"choices": [piece]}))
                case index, Finished(finish_reason=reason, usage=usage):
                    usages[index] = usage
                    piece = choices[index].piece("", (), reason)
                    yield frame(completion.model_copy(update={"choices": [piece]}))
    if "usage" in completion.model_fields_set:
        total = total_usage([usages[index] for index in range(len(choices))], num_choices)
        yield frame(completion.model_copy(update={"usage": completion_usage(total)}))
    yield DONE


def _prompts(body: CompletionRequest) -> list[Prompt]:
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    ids = [item for item in given if isinstance(item, int)]
    contents = [item for item in given if not isinstance(item, int)] or [ids]
    return [
        Prompt(item, add_special_tokens=body.add_special_tokens)
        if isinstance(item, str)
        else Prompt(token_ids=tuple(item))
        for item in contents
    ]


def _request(body: CompletionRequest, model: ModelInfo) -> OmniRequest:
    """Without its prompt. Raises `InvalidRequestError`."""
    check_text_model(body.model, model)
    check_text_fields(body)
    structure = structured_output(body, with_speech=False, with_tools=False)
    sampling = text_sampling(sampling_of_text(body, body.max_tokens, body.logprobs), model)
    return OmniRequest("", (), sampling=sampling, structured_output=structure, max_tokens_param="max_tokens")


def completions_router(state: ServerState, config: ApiConfig, admission: Admission) -> APIRouter:
    router = APIRouter(tags=["chat"])
    example: dict[str, object] = {"model": EXAMPLE_MODEL, "prompt": "The capital of France is"}

    @router.post(
        "/v1/completions",
        summary="Continue a prompt as it is",
        responses={
            200: {
                "model": TextCompletion,
                "content": {"text/event-stream": event_stream(TextCompletion, last="[DONE]")},
            },
            **GENERATION_ERRORS,
        },
        openapi_extra=request_body(CompletionRequest, {"text": example}),
    )
    async def create_completion(request: Request) -> Response:
        state.require_generator()  # before reading megabytes of body
        body = await read_json(request)
        return await until_disconnect(_answer(state, config, admission, body), request.receive)

    return router
