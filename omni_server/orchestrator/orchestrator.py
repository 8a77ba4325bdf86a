"""Routes requests through the stages. Knows no model and touches no tensor."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.stages import ArStage
from omni_server.edge import CodecEdgeFactory
from omni_server.engine.ar_client import ArStageClient
from omni_server.engine.diffusion_client import DiffusionStageClient
from omni_server.engine.prompt_rendering import RenderedPrompt, context_length_exceeded
from omni_server.engine.sampling import StageSampling, add_rows, merged, sampling_params
from omni_server.errors import (
    CorruptDataError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    StageDownError,
)
from omni_server.family import CodecLayout, FamilyModel
from omni_server.orchestrator.feed_outbox import FeedOutbox
from omni_server.orchestrator.request_run import RequestRun
from omni_server.orchestrator.speech_scheduler import SpeechScheduler
from omni_server.orchestrator.spoken_text import SpokenText
from omni_server.orchestrator.talk import SpeechPlan
from omni_server.orchestrator.tool_grammar import turn_grammar
from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.protocol.rows import RowsInput, RowsOutput, SharedBlock
from omni_server.types import (
    ChatMessage,
    OmniRequest,
    PromptTokens,
    SamplingConfig,
    SpeechOutput,
    Task,
    TextPart,
)

_READ_ONLY = SamplingConfig(temperature=0.0, max_tokens=1)
"""For a reply that is given: one pass over it makes its rows. vLLM must sample a token then, which nobody sees."""


@dataclass(frozen=True)
class ThinkerStage:
    client: ArStageClient
    config: ArStage


@dataclass(frozen=True)
class SpeechStages:
    """The stages behind the thinker and what connects them."""

    talker: ArStageClient
    talker_config: ArStage
    code2wav: DiffusionStageClient
    chunks: ChunkPlan
    codec_edge: CodecEdgeFactory
    drop_block: Callable[[SharedBlock], None]


class _SharedSpeech:
    """What the speech of all requests shares."""

    def __init__(self, stages: SpeechStages, layout: CodecLayout) -> None:
        self.outbox = FeedOutbox(stages.talker.send_feeds, stages.drop_block)
        self.scheduler = SpeechScheduler(stages.chunks, layout)


class Orchestrator:
    """Implements the generating half of `omni_server.generation.Generator`."""

    def __init__(
        self, family: FamilyModel, thinker: ThinkerStage, speech: SpeechStages | None, *, request_timeout_s: float
    ) -> None:
        self._family = family
        self._thinker = thinker
        self._speech = speech
        self._shared_speech = None if speech is None else _SharedSpeech(speech, family.codec)
        self._request_timeout_s = request_timeout_s
        self._running: dict[str, RequestRun] = {}
        self._is_closed = False
        self.num_corrupt: Counter[tuple[str, str]] = Counter()
        """Requests that ended with a `CorruptDataError`, by stage and kind."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _count_corrupt(self, error: CorruptDataError) -> None:
        self.num_corrupt[error.stage, error.kind] += 1

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of the thinker's `token_ids`, without special tokens."""
        return self._thinker.client.detokenize(token_ids)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        """The family's chat for the task."""
        return self._family.task_messages(task)

    def stage_down(self, *, speech: bool = True) -> StageDownError | None:
        """Which stage is down, of all or, not `speech`, of those that answer in text; None if they are up."""
        clients: list[ArStageClient | DiffusionStageClient] = [self._thinker.client]
        if speech and self._speech is not None:
            clients += [self._speech.talker, self._speech.code2wav]
        return next((StageDownError(client.name) for client in clients if client.is_dead), None)

    async def submit(self, request: OmniRequest) -> RequestRun:
        """Validate, tokenise, start. Raises as `Generator.submit` says."""
        self._check_open(request)
        self._check_stages(request.sampling)
        thinker = self._thinker
        sampling = merged(thinker.config.default_sampling, request.sampling.get(thinker.client.name))
        voice = None if request.speech is None else self._voice(request.speech)
        reply = None if request.speech is None else request.speech.text
        if reply is not None:
            sampling = _READ_ONLY
        tools = () if request.tools is None else request.tools.tools
        # Rendering holds up the event loop: for half a second with 32 MB of text, of which nothing would be read.
        thinker.client.check_text(sum(map(_num_chars, request.messages)))
        rendered = self._family.thinker_prompt(request.messages, speech=request.speech is not None, tools=tools)
        structured = request.structured_output
        if request.tools is not None:
            structured = turn_grammar(request.tools, structured)
        params = sampling_params(
            thinker.client.name,
            sampling,
            end_ids=self._family.thinker_stop_ids,
            is_text=True,
            rows=None,
            structured_output=structured,
        )
        deadline_s = self._request_timeout_s if request.deadline_s is None else request.deadline_s
        began = time.monotonic() if request.began_at is None else request.began_at
        try:
            async with asyncio.timeout(began + deadline_s - time.monotonic()), thinker.client.life.needed():
                await thinker.client.check(params, None if structured is None else structured.param)
                prompt = await thinker.client.render(rendered, reply)
        except TimeoutError:
            raise DeadlineExceededError(f"reading the prompt took longer than {deadline_s:g} s") from None
        is_default_asked = reply is not None or request.can_be_shortened
        asked = sampling if is_default_asked else request.sampling.get(thinker.client.name)
        limit = _token_limit(
            thinker.client, len(prompt.token_ids), asked, sampling, params=("max_completion_tokens", "min_tokens")
        )
        params.max_tokens, params.min_tokens = limit, min(params.min_tokens, limit)
        run = self._admitted(request, prompt, sampling, params, voice, deadline_s - (time.monotonic() - began))
        self._running[request.request_id] = run
        run.start()
        return run

    def _admitted(
        self,
        request: OmniRequest,
        prompt: RenderedPrompt,
        sampling: SamplingConfig,
        params: StageSampling,
        voice: str | None,
        remaining_s: float,
    ) -> RequestRun:
        """`sampling` and `params` are the thinker's."""
        thinker = self._thinker
        self._check_open(request)  # again: rendering takes time
        if voice is not None:
            add_rows(params, RowsOutput(voice=voice, num_reply=prompt.num_reply))
        speech = None
        if request.speech is not None and voice is not None:
            speech = self._speech_plan(request, request.speech, voice, prompt.length)
        spoken_text = None
        if speech is not None and (sampling.stop or request.tools is not None):
            spoken_text = SpokenText(thinker.client.detokenize)
        return RequestRun(
            request.request_id,
            thinker=thinker.client,
            prompt=prompt,
            prompt_tokens=self._count(prompt),
            thinker_params=params,
            spoken_text=spoken_text,
            tool_parser=None if request.tools is None else ToolParser(is_parallel=request.tools.is_parallel),
            speech=speech,
            deadline_s=remaining_s,
            is_logged=request.is_logged,
            on_corrupt=self._count_corrupt,
            on_end=lambda request_id: self._running.pop(request_id, None),
        )

    async def close(self) -> None:
        """Refuse new requests and release those that run."""
        self._is_closed = True
        for run in list(self._running.values()):
            await run.aclose()

    def _check_open(self, request: OmniRequest) -> None:
        if self._is_closed:
            raise OverloadedError("the server is shutting down", code="server_shutting_down")
        down = self.stage_down(speech=request.speech is not None)
        if down is not None:
            raise down
        if request.request_id in self._running:
            raise InvalidRequestError(f"a request with id '{request.request_id}' is running already")

    def _check_stages(self, sampling: Mapping[str, SamplingConfig]) -> None:
        known = [self._thinker.client.name]
        if self._speech is not None:
            known.append(self._speech.talker.name)
        for name in sampling:
            if name not in known:
                raise InvalidRequestError(
                    f"there is no stage '{name}' to sample in; stages are {', '.join(known)}",
                    param=f"stage_sampling.{name}",
                )

    def _voice(self, speech: SpeechOutput) -> str:
        if self._speech is None or not self._family.voices:
            raise InvalidRequestError("this model is served without speech", param="modalities")
        voice = speech.voice if speech.voice is not None else self._family.default_voice
        if voice not in self._family.voices:
            raise InvalidRequestError(
                f"voice '{voice}' is unknown; voices are {', '.join(self._family.voices)}", param="audio.voice"
            )
        return voice

    def _speech_plan(self, request: OmniRequest, speech: SpeechOutput, voice: str, prompt_length: int) -> SpeechPlan:
        stages, shared = self._speech, self._shared_speech
        assert stages is not None
        assert shared is not None
        family = self._family
        talker_prompt = family.talker_prompt(prompt_length)
        asked = request.sampling.get(stages.talker.name)
        sampling = merged(stages.talker_config.default_sampling, asked)
        param = f"stage_sampling.{stages.talker.name}"
        limit = _token_limit(
            stages.talker,
            len(talker_prompt.token_ids),
            asked,
            sampling,
            params=(f"{param}.max_tokens", f"{param}.min_tokens"),
        )
        params = sampling_params(
            stages.talker.name,
            replace(sampling, max_tokens=limit) if sampling.max_tokens is None else sampling,
            end_ids=family.talker_stop_ids,
            is_text=False,
            rows=RowsInput(num_replaced=talker_prompt.num_replaced),
        )
        params.max_tokens, params.min_tokens = limit, min(params.min_tokens, limit)
        seed = speech.seed if speech.seed is not None else random.getrandbits(63)
        return SpeechPlan(
            talker=stages.talker,
            code2wav=stages.code2wav,
            talker_prompt=talker_prompt,
            talker_params=params,
            talker_stop_ids=family.talker_stop_ids,
            codes_per_output=family.codec.codes_per_block,
            codec_edge=stages.codec_edge(stages.chunks, family.codec, voice=voice, noise_seed=seed % 2**64),
            scheduler=shared.scheduler,
            num_boundary_rows=len(talker_prompt.token_ids) - talker_prompt.num_replaced - 1,
            outbox=shared.outbox,
            drop_block=stages.drop_block,
        )

    def _count(self, prompt: RenderedPrompt) -> PromptTokens:
        ids, placeholders = prompt.token_ids[: prompt.length], self._family.placeholder_ids
        audio, image, video = (ids.count(p) for p in (placeholders.audio, placeholders.image, placeholders.video))
        return PromptTokens(len(ids), len(ids) - audio - image - video, audio, image, video)


def _num_chars(message: ChatMessage) -> int:
    texts = sum(len(part.text) for part in message.content if isinstance(part, TextPart))
    return texts + sum(len(call.arguments) for call in message.tool_calls)


def _token_limit(
    client: ArStageClient,
    prompt_length: int,
    asked: SamplingConfig | None,
    sampling: SamplingConfig,
    *,
    params: tuple[str, str],
) -> int:
    """How many tokens the stage may sample behind a prompt of `prompt_length` tokens.

    `asked` is what the request says of the stage: its `max_tokens` and `min_tokens` must fit the context.
    `sampling` has the stage config's defaults as well: its `max_tokens` applies as far as the context goes.
    `params` are the request's fields of those two names. Raises `InvalidRequestError`.
    """
    max_tokens, min_tokens = (None, None) if asked is None else (asked.max_tokens, asked.min_tokens)
    needed = prompt_length + (max_tokens or min_tokens or 1)
    room = client.max_model_len - prompt_length
    if needed > client.max_model_len:
        max_param, min_param = params
        param = "messages" if room < 1 else max_param if max_tokens else min_param
        raise context_length_exceeded(client.max_model_len, needed, param)
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)
