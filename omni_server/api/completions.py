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

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.config import ApiConfig
from omni_server.api.constraints import structured_output
from omni_server.api.limits import Admission
from omni_server.api.openapi import EXAMPLE_MODEL, GENERATION_ERRORS, event_stream, request_body
from omni_server.api.parse import (
    HARMLESS_VALUES,
    check_constrained,
    check_extra_fields,
    check_model,
    check_stream_options,
    choices_of,
)
from omni_server.api.render import LOWEST_LOGPROB
from omni_server.api.sampling import sampling_of_text, text_sampling
from omni_server.api.schemas import Count, NonEmpty, TextFields, TokenIds
from omni_server.api.state import ServerState
from omni_server.api.streaming import DONE, KEEP_ALIVE, EventStreamResponse, frame, until_disconnect
from omni_server.api.usage import CompletionUsage, completion_usage, total_usage
from omni_server.api.validation import Integer, read_json, unsupported, validate
from omni_server.types import (
    Finished,
    FinishReason,
    ModelInfo,
    OmniEvent,
    OmniRequest,
    RawPrompt,
    SampledToken,
    TextDelta,
    TokenLogprob,
)

_HARMLESS_VALUES = HARMLESS_VALUES | {"suffix": (None, ""), "best_of": (None, 1), "prompt_embeds": (None,)}
_HINTS = {
    "echo": "'echo' is not supported: the prompt is not part of the text. Put it before the text yourself.",
    "suffix": "'suffix' is not supported: text can only continue a prompt.",
    "best_of": "'best_of' is not supported; use 'n', and choose by 'logprobs'.",
}


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
    """Collects one choice, or its next piece."""

    def __init__(self, index: int, body: CompletionRequest) -> None:
        self._index = index
        self._has_logprobs = body.logprobs is not None
        self._shows_special = body.skip_special_tokens is False
        self._texts: list[str] = []
        self._tokens: list[SampledToken] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self.finished: Finished | None = None

    def take(self, event: OmniEvent) -> bool:
        """Whether there is something new."""
        match event:
            case TextDelta(text=text, logprobs=tokens):
                self._texts.append(text)
                self._tokens += tokens
                return bool(text or tokens)
            case Finished():
                self.finished = event
        return True

    def taken(self) -> TextChoice:
        text, tokens = "".join(self._texts), tuple(self._tokens)
        self._texts.clear()
        self._tokens.clear()
        return TextChoice(
            index=self._index,
            text=text,
            logprobs=self._logprobs(tokens) if self._has_logprobs else None,
            finish_reason=None if self.finished is None else self.finished.finish_reason,
        )

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Logprobs:
        offsets: list[int] = []
        for token in (token.sampled for token in tokens):
            offsets.append(self._offset)  # of a token inside a character: the character's
            shown = token.utf8 or (token.text.encode() if self._shows_special else b"")
            self._offset += len(self._decoder.decode(shown))
        tops = [{top.text: _value(top) for top in (*token.top, token.sampled)} for token in tokens]
        return Logprobs(
            text_offset=offsets,
            token_logprobs=[_value(token.sampled) for token in tokens],
            tokens=[token.sampled.text for token in tokens],
            top_logprobs=tops,
        )


def _value(token: TokenLogprob) -> float:
    return max(token.logprob, LOWEST_LOGPROB)


class CompletionService:
    def __init__(self, state: ServerState, config: ApiConfig, admission: Admission) -> None:
        self._state = state
        self._config = config
        self._admission = admission

    async def create_completion(self, request: Request) -> Response:
        self._state.require_generator()  # before reading megabytes of body
        return await until_disconnect(self._answer(await read_json(request)), request.receive)

    async def _answer(self, given: object) -> Response:
        generator = self._state.require_generator()
        body, model = validate(CompletionRequest, given), generator.model_info
        check_model(body.model, model)
        prompts, num_choices = _prompts(body), body.n or 1
        self._admission.enter_choices(len(prompts) * num_choices, "n" if num_choices > 1 else "prompt")
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
        requests = _requests(body, prompts, num_choices, completion.id, model)
        choices = [_Choice(index, body) for index in range(len(requests))]
        async with AsyncExitStack() as held:
            stream = AnswerStream(generator, self._state, completion.id, input_param="prompt")
            held.push_async_callback(stream.aclose)
            for request in requests:
                await stream.submit(request)
            if body.stream:
                frames = self._frames(stream, completion, choices, num_choices)
                return EventStreamResponse(completion.id, frames, held=held.pop_all())
            async with aclosing(stream.events()) as events:
                async for item in events:
                    if item is not None:
                        choices[item[0]].take(item[1])
        completion.choices = [choice.taken() for choice in choices]
        completion.usage = _usage(choices, num_choices)
        return Response(completion.model_dump_json(), media_type="application/json")

    async def _frames(
        self, stream: AnswerStream, completion: TextCompletion, choices: list[_Choice], num_choices: int
    ) -> AsyncGenerator[bytes, None]:
        """After a failure, finish reason and `[DONE]` are missing."""
        async with aclosing(stream.events(self._config.sse_keep_alive_s)) as events:
            async for item in events:
                if item is None:
                    yield KEEP_ALIVE
                elif choices[item[0]].take(item[1]):
                    yield frame(completion.model_copy(update={"choices": [choices[item[0]].taken()]}))
        if "usage" in completion.model_fields_set:
            yield frame(completion.model_copy(update={"usage": _usage(choices, num_choices)}))
        yield DONE


def _usage(choices: list[_Choice], num_choices: int) -> CompletionUsage:
    usages = [choice.finished.usage for choice in choices if choice.finished is not None]
    return completion_usage(total_usage(usages, num_choices))


def _prompts(body: CompletionRequest) -> list[RawPrompt]:
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    ids = tuple(item for item in given if isinstance(item, int))
    contents = [item if isinstance(item, str) else tuple(item) for item in given if not isinstance(item, int)]
    return [RawPrompt(content, body.add_special_tokens) for content in contents or [ids]]


def _requests(
    body: CompletionRequest, prompts: list[RawPrompt], num_choices: int, answer_id: str, model: ModelInfo
) -> list[OmniRequest]:
    """One per choice, those of a prompt in a row. Raises `InvalidRequestError`."""
    check_extra_fields(body.model_extra, _HARMLESS_VALUES, _HINTS)
    check_stream_options(body)
    if model.text_stage is None:
        raise unsupported(f"The model '{model.name}' writes no text.", "model")
    structure = structured_output(body, with_speech=False, with_tools=False)
    check_constrained(body, is_constrained=structure is not None)
    sampling = text_sampling(sampling_of_text(body, body.max_tokens, body.logprobs), model)
    first = OmniRequest("", (), sampling=sampling, structured_output=structure, max_tokens_param="max_tokens")
    requests: list[OmniRequest] = []
    for index, prompt in enumerate(prompts):
        request = replace(first, request_id=f"{answer_id}-{index}", raw_prompt=prompt)
        requests += choices_of(request, num_choices, model.text_stage)
    return requests


def completions_router(state: ServerState, config: ApiConfig, admission: Admission) -> APIRouter:
    router = APIRouter(tags=["chat"])
    example: dict[str, object] = {"model": EXAMPLE_MODEL, "prompt": "The capital of France is"}
    router.post(
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
    )(CompletionService(state, config, admission).create_completion)
    return router
