"""Routes requests through the stages. Contains no model code and touches no tensors."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from omni_server.config.pipeline import Embeddings, Text, TokenFrames, imported
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import EngineHandle, Stage
from omni_server.engine.prompt_rendering import RenderedPrompt, context_length_exceeded
from omni_server.engine.sampling import StageSampling, add_rows, merged, sampling_params
from omni_server.errors import (
    CorruptDataError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    StageDownError,
)
from omni_server.family import FamilyModel, Frame, Prompt, SpokenTextFilterFactory
from omni_server.generation import Deliver
from omni_server.orchestrator.fair_share import FairShareQueue
from omni_server.orchestrator.image_requests import ImageRequests, ImageTask
from omni_server.orchestrator.request_run import RequestRun
from omni_server.orchestrator.row_feeder import RowFeeder, TextRowFeeder
from omni_server.orchestrator.speech_decoding import SpeechDecoding, speech_decoding
from omni_server.orchestrator.speech_reader import SpeechReader
from omni_server.orchestrator.speech_tasks import ArTask, AudioTask, TextOutput
from omni_server.orchestrator.spoken_text import SpokenText
from omni_server.orchestrator.text_source import TextSource, WrittenText, in_one_piece
from omni_server.orchestrator.tool_grammar import turn_grammar
from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.orchestrator.voice_encoder import VoiceEncoder
from omni_server.protocol.images import num_image_tokens
from omni_server.protocol.rows import RowsInput, RowsOutput
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ClonedVoice,
    OmniRequest,
    Output,
    PromptTokens,
    SamplingConfig,
    SpeechOutput,
    Task,
    TextPart,
    TokenizedPrompt,
    VideoPart,
)
from omni_server.types.images import ImageOutput

PREFILL_ONLY = SamplingConfig(temperature=0.0, max_tokens=1)
"""For a given reply: one pass over the reply computes its rows. vLLM must still sample a token, which is
discarded."""


class Orchestrator:
    """Implements the generating half of `omni_server.generation.Generator`."""

    def __init__(
        self,
        family: FamilyModel,
        config: StageConfig,
        *,
        ar: Mapping[str, Stage[ArHandle]],
        diffusion: Mapping[str, Stage[DiffusionHandle]],
        request_timeout_s: float,
    ) -> None:
        """`ar` and `diffusion` are the running stages, by name.

        Raises `ConfigError` if the windows do not fit the model, or if a model that is to speak has no voices
        or no codec.
        """
        self._family = family
        self._config = config
        self._ar = ar
        self._diffusion = diffusion
        self._request_timeout_s = request_timeout_s
        self._entry = config.entry
        self._decoding: dict[str, SpeechDecoding] = {}  # by the stage whose frames are decoded
        self._spoken_text_filter: SpokenTextFilterFactory | None = None
        for edge in self._config.edges:
            payload = self._config.spec_of(edge).payload
            if isinstance(payload, TokenFrames):
                decoder = self._diffusion[edge.target]
                self._decoding[edge.source] = speech_decoding(family, config, edge, payload, decoder)
            elif isinstance(payload, Text):
                function = imported(self._config.spec_of(edge).function)
                self._spoken_text_filter = cast(SpokenTextFilterFactory, function)
        self._voices: VoiceEncoder | None = None
        for name in config.stages_for({"voice"}):
            self._voices = VoiceEncoder(family, diffusion[name], config.stages[name], request_timeout_s)
        self._running: dict[str, RequestRun] = {}
        self._closing: set[asyncio.Task[None]] = set()
        """Close the texts of requests that have ended."""
        self._fair_share = FairShareQueue()
        self._is_closed = False
        self.images = ImageRequests(family, config.stages[self._entry])
        self.num_corrupt: Counter[tuple[str, str]] = Counter()
        """Requests that ended with a `CorruptDataError`, by stage and kind."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    def reset_timings(self) -> None:
        """Discards the timings of windows and frames recorded so far, which are those of a warm-up."""
        for decoding in self._decoding.values():
            for scheduler in decoding.schedulers.values():
                scheduler.reset()

    def _count_corrupt(self, error: CorruptDataError) -> None:
        self.num_corrupt[error.stage, error.kind] += 1

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the text stage's `token_ids`, without special tokens."""
        return self._ar[self._entry].any_engine.detokenize(token_ids)

    async def tokenize(self, request: OmniRequest) -> TokenizedPrompt:
        """See `Generator.tokenize`."""
        handle = self._ar[self._entry].any_engine
        async with _reading(handle, time.monotonic(), self._request_timeout_s):
            return await handle.tokenize(self._prompt(handle, request, self._outputs(request)))

    async def clone_voice(self, recording: AudioPart, text: str) -> ClonedVoice:
        """See `Generator.clone_voice`."""
        if self._voices is None:
            raise InvalidRequestError("this model clones no voices", param="voice")
        self._check_up(self._config.stages_for({"voice"}))
        return await self._voices.clone(recording, text)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        """Returns the family's chat messages for the task."""
        return self._family.task_messages(task)

    def stage_down(self, names: Collection[str] | None = None) -> StageDownError | None:
        """Reports the first stage that is down, of all or of these, or None."""
        if names is None:
            names = self._config.stages
        stages: dict[str, Stage[ArHandle] | Stage[DiffusionHandle]] = {**self._ar, **self._diffusion}
        return next((StageDownError(name) for name in names if stages[name].is_down), None)

    async def submit(
        self, request: OmniRequest, deliver: Deliver, pinned_engine: EngineHandle | None = None
    ) -> RequestRun:
        """Validates, tokenises and starts the request. `pinned_engine`: the engine to choose in its stage, for a
        warm-up. Raises the errors of `Generator.submit`."""
        outputs = self._outputs(request)
        self._check_request(request)
        stages = self._stages_of(request, outputs)
        self._check_open(request, stages)
        self._check_stages(request.sampling)
        deadline_s = self._request_timeout_s if request.deadline_s is None else request.deadline_s
        began = time.monotonic() if request.began_at is None else request.began_at
        voice = None if request.speech is None else self._voice(request.speech)
        run = RequestRun(request.request_id, self._fair_share.take(request.caller), deliver, pinned_engine)
        try:
            if request.image is not None:
                tokens = await self._add_image(run, request, request.image)
            elif self._reads(request):
                tokens = await self._add_reading(run, request, voice, deadline_s, began)
            else:
                tokens = await self._add_ar(run, request, outputs, voice, deadline_s, began)
            self._check_open(request, stages)  # again: rendering takes time
        except BaseException:
            run.close()
            raise
        self._running[request.request_id] = run
        run.start(
            tokens,
            deadline_s=deadline_s - (time.monotonic() - began),
            is_logged=request.is_logged,
            on_corrupt=self._count_corrupt,
            on_end=lambda request_id: self._running.pop(request_id, None),
        )
        return run

    def _outputs(self, request: OmniRequest) -> frozenset[Output]:
        """Returns the outputs to generate. Raises `InvalidRequestError` if the model lacks one."""
        available = self._config.outputs
        wanted: set[Output] = {"image"} if request.image is not None else {"text"}
        if request.speech is not None:
            wanted.add("audio")
        if "audio" in wanted and "audio" not in available:
            raise InvalidRequestError("this model is served without speech", param="modalities")
        if "audio" in wanted:
            wanted &= available  # a speech-only model writes no text
        if not wanted <= available:
            (missing,) = wanted - available
            raise InvalidRequestError(f"this model does not answer with {missing}", param="modalities")
        if "text" not in wanted and request.tools is not None:
            raise InvalidRequestError("this model writes no text, and calls no tools", param="tools")
        if "text" not in wanted and request.structured_output is not None:
            raise InvalidRequestError(
                "this model writes no text that could have a format", param=request.structured_output.param
            )
        return frozenset(wanted)

    def _check_request(self, request: OmniRequest) -> None:
        """Raises `InvalidRequestError` for what the model does not hear or read."""
        speech = request.speech
        if speech is not None and self._config.reader is None and (speech.pieces or speech.clone):
            raise InvalidRequestError("this model answers chats, with its own voices", param="voice")
        parts = [part for message in request.messages for part in message.content]
        kinds = {part.kind for part in parts if not isinstance(part, TextPart)}
        if request.image is None and (refused := kinds.difference(self._family.input_modalities)):
            raise InvalidRequestError(f"this model does not take {min(refused)} input", param="messages")
        has_track = any(isinstance(part, VideoPart) and part.audio is not None for part in parts)
        if has_track and not self._family.hears_videos:
            raise InvalidRequestError("this model does not hear the audio track of a video", param="messages")

    async def _add_image(self, run: RequestRun, request: OmniRequest, image: ImageOutput) -> PromptTokens:
        prompt, size = await asyncio.to_thread(self.images.render, request.messages, image)
        run.num_image_tokens = num_image_tokens(size.width, size.height)
        run.add(ImageTask(run, self._diffusion[self._entry], prompt, size))
        num_given = len(prompt.token_ids) - run.num_image_tokens
        return PromptTokens(num_given, text=0, audio=0, image=num_given, video=0)

    async def _add_ar(
        self,
        run: RequestRun,
        request: OmniRequest,
        outputs: frozenset[Output],
        voice: str | None,
        deadline_s: float,
        began: float,
    ) -> PromptTokens:
        entry, config = self._ar[self._entry], self._config.stages[self._entry]
        handle = run.choose(entry)  # an engine caches the media that its prompts refer to
        assert isinstance(config, ArStage)
        is_text = "text" in outputs
        asked = request.sampling.get(self._entry)
        sampling = merged(config.default_sampling, asked)
        reply = None if request.speech is None or not is_text else request.speech.text
        if reply is not None:
            sampling = PREFILL_ONLY
        rendered = self._prompt(handle, request, outputs)
        structured = request.structured_output
        if request.tools is not None:
            structured = turn_grammar(request.tools, structured)
        params = sampling_params(
            self._entry,
            sampling,
            end_ids=self._family.stop_ids[config.model_stage],
            is_text=is_text,
            structured_output=structured,
        )
        async with _reading(handle, began, deadline_s):
            await handle.check(params, None if structured is None else structured.param)
            prompt = await handle.render(rendered, reply)
        if request.prompt is not None and (counted := self._count(prompt)).text < counted.total:
            raise InvalidRequestError("Only chats can have tokens that stand for media.", param="messages")
        is_default_asked = reply is not None or request.can_be_shortened
        names = (request.max_tokens_param, "min_tokens") if is_text else self._param_names(self._entry)
        _limit_tokens(
            params,
            handle.max_model_len,
            len(prompt.token_ids),
            asked=sampling if is_default_asked else asked,
            fields=names,
        )
        speaker, text, written = None, None, None
        if voice is not None and (edge := self._config.edge_from(self._entry, Text)) is not None:
            written = self._add_written(run, request, edge.target, voice, rendered)
        edge = self._config.edge_from(self._entry, Embeddings)
        is_limited = bool(sampling.stop) or request.tools is not None
        if voice is not None and edge is not None:
            fed = self._family.embeddings_prompt(
                self._config.stages[edge.target].model_stage, prompt.token_ids[: prompt.length], voice=voice
            )
            # Without rows to send, the entry may use its prefix cache.
            if fed.text is None or fed.text.has_media:
                spans = None if fed.text is None else fed.text.spans
                add_rows(params, RowsOutput(voice=voice, num_reply=prompt.num_reply, spans=spans))
            num_first_rows = len(fed.token_ids) - 1  # the row of the first generated token follows
            drop = self._ar[edge.target].any_engine.outbox.drop  # all replicas read the same queues
            if fed.text is None:
                feeder = RowFeeder(drop, num_first_rows=num_first_rows, is_limited=is_limited)
            else:
                assert len(fed.text.row_ids) == num_first_rows
                feeder = TextRowFeeder(drop, fed.text, is_limited=is_limited)
            speaker = self._add_speaker(
                run, request, edge.target, voice, fed.token_ids, fed.num_replaced, feeder
            )
        if is_text:
            text = TextOutput(
                run,
                self._entry,
                prompt,
                spoken_text=SpokenText(handle.detokenize) if speaker is not None and is_limited else None,
                tool_parser=ToolParser(is_parallel=request.tools.is_parallel) if request.tools else None,
                speaker=speaker,
                written=written,
            )
        output = self._add_audio(run, request, self._entry, voice) or text
        assert output is not None
        run.add(ArTask(run, entry, prompt, params, output, speaker=speaker, handle=handle))
        return self._count(prompt)

    def _stages_of(self, request: OmniRequest, outputs: frozenset[Output]) -> tuple[str, ...]:
        """The stages that the request needs."""
        names = self._config.stages_for(outputs)
        reader = self._config.reader
        return names[names.index(reader) :] if reader is not None and self._reads(request) else names

    def _reads(self, request: OmniRequest) -> bool:
        """Whether the text is given, so that no stage writes it."""
        speech, reader = request.speech, self._config.reader
        is_given = speech is not None and (speech.text is not None or speech.pieces is not None)
        return reader is not None and (is_given or reader == self._entry)

    async def _add_reading(
        self, run: RequestRun, request: OmniRequest, voice: str | None, deadline_s: float, began: float
    ) -> PromptTokens:
        """Adds the stage that reads the text of the request."""
        speech, name = request.speech, self._config.reader
        if speech is None or voice is None or name is None:
            raise InvalidRequestError("this model only reads text aloud", param="messages")
        source = TextSource(
            self._family.speech_text(speech, voice),
            speech.pieces or in_one_piece(speech.text or ""),
            is_whole=speech.pieces is None,
            on_later_text=run.add_prompt_text,
        )
        if speech.pieces is not None:
            run.on_close.append(lambda: self._close_text(source))
        reader = self._add_reader(run, request, name, voice, source)
        async with _before_deadline(began, deadline_s):
            num_tokens = await reader.prepare()
        if not num_tokens:
            raise InvalidRequestError("there is no text to read", param="messages")
        return PromptTokens(num_tokens, num_tokens, 0, 0, 0)

    def _add_written(
        self, run: RequestRun, request: OmniRequest, name: str, voice: str, prompt: Prompt
    ) -> WrittenText:
        """Adds the stage that reads what the entry writes."""
        assert request.speech is not None
        assert self._spoken_text_filter is not None
        self._speaker_params(request, name, 1)  # before the answer is written
        written = WrittenText(self._spoken_text_filter(prompt.text))
        source = TextSource(
            self._family.speech_text(replace(request.speech, text_first=False), voice),
            written.pieces(),
            is_whole=False,
            on_later_text=lambda num_tokens: None,
        )
        self._add_reader(run, request, name, voice, source)
        return written

    def _add_reader(
        self, run: RequestRun, request: OmniRequest, name: str, voice: str, source: TextSource
    ) -> SpeechReader:
        audio = self._add_audio(run, request, name, voice)
        assert audio is not None
        asked = request.sampling.get(name)
        # In place of what follows from the text's length, the request may limit the speech.
        limit = audio.limit if asked is None or asked.max_tokens is None else None
        audio.follow(source, is_aligned=request.speech is not None and request.speech.is_aligned)
        params = partial(self._speaker_params, request, name)
        return run.add(SpeechReader(run, self._ar[name], source, audio, params, limit))

    def _close_text(self, source: TextSource) -> None:
        closing = asyncio.create_task(source.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _prompt(self, handle: ArHandle, request: OmniRequest, outputs: frozenset[Output]) -> Prompt:
        if request.prompt is not None:
            handle.check_text(len(request.prompt.text or request.prompt.token_ids))
            return request.prompt
        # Rendering blocks the event loop, for half a second with 32 MB of text, which would then be rejected.
        handle.check_text(sum(map(_num_chars, request.messages)))
        tools = () if request.tools is None else request.tools.tools
        return self._family.prompt(request.messages, outputs=outputs, tools=tools)

    def _add_speaker(
        self,
        run: RequestRun,
        request: OmniRequest,
        name: str,
        voice: str,
        prompt: tuple[int, ...],
        num_replaced: int,
        feeder: RowFeeder,
    ) -> ArTask:
        """Adds a stage that `feeder` feeds. `prompt` and `num_replaced` as in `EmbeddingsPrompt`."""
        params = self._speaker_params(request, name, len(prompt), num_replaced)
        audio = self._add_audio(run, request, name, voice)
        assert audio is not None
        return run.add(ArTask(run, self._ar[name], prompt, params, audio, source=feeder))

    def _speaker_params(
        self, request: OmniRequest, name: str, prompt_length: int, num_replaced: int | None = None
    ) -> StageSampling:
        """`num_replaced` as in `EmbeddingsPrompt`; None: the rows of the prompt replace all of it."""
        config = self._config.stages[name]
        assert isinstance(config, ArStage)
        asked = request.sampling.get(name)
        sampling = merged(config.default_sampling, asked)
        params = sampling_params(
            name,
            sampling,
            end_ids=self._family.stop_ids[config.model_stage],
            is_text=False,
            rows=RowsInput(num_replaced=prompt_length if num_replaced is None else num_replaced),
        )
        max_model_len = self._ar[name].any_engine.max_model_len
        _limit_tokens(params, max_model_len, prompt_length, asked=asked, fields=self._param_names(name))
        return params

    def _add_audio(
        self, run: RequestRun, request: OmniRequest, stage: str, voice: str | None
    ) -> AudioTask | None:
        """Adds the task that decodes the stage's tokens, or returns None if no audio is made of them."""
        decoding = self._decoding.get(stage)
        if decoding is None or request.speech is None or voice is None:
            return None
        seed = random.getrandbits(63) if request.speech.seed is None else request.speech.seed
        clone = request.speech.clone
        audio = AudioTask(
            run,
            stage,
            decoding=decoding,
            edge=decoding.factory(
                decoding.chunks,
                decoding.layout,
                voice=voice,
                noise_seed=seed % 2**64,
                past=() if clone is None else _frames_of(clone, decoding.frames.num_codebooks),
            ),
            stop_ids=self._family.stop_ids[self._config.stages[stage].model_stage],
            must_end=request.speech.must_end,
        )
        return run.add(audio)

    async def close(self) -> None:
        """Rejects new requests and releases the running ones."""
        self._is_closed = True
        for run in list(self._running.values()):
            await run.aclose()
        if self._closing:
            await asyncio.wait(self._closing)
        if self._voices is not None:
            await self._voices.close()

    def _check_up(self, names: Collection[str]) -> None:
        if self._is_closed:
            raise OverloadedError("the server is shutting down", code="server_shutting_down")
        down = self.stage_down(names)
        if down is not None:
            raise down

    def _check_open(self, request: OmniRequest, stages: Collection[str]) -> None:
        self._check_up(stages)
        if request.request_id in self._running:
            raise InvalidRequestError(f"a request with id '{request.request_id}' is running already")

    def _check_stages(self, sampling: Mapping[str, SamplingConfig]) -> None:
        for name in sampling:
            if name not in self._ar:
                raise InvalidRequestError(
                    f"there is no stage '{name}' to sample in; stages are {', '.join(self._ar)}",
                    param=f"stage_sampling.{name}",
                )

    def _voice(self, speech: SpeechOutput) -> str:
        voice = speech.voice if speech.voice is not None else self._family.default_voice
        if voice is None or voice not in self._family.voices:
            raise InvalidRequestError(
                f"voice '{voice}' is unknown; voices are {', '.join(self._family.voices)}",
                param="audio.voice",
            )
        return voice

    def _param_names(self, stage: str) -> tuple[str, str]:
        """Returns the request's fields for `max_tokens` and `min_tokens` of a stage that writes no text."""
        return f"stage_sampling.{stage}.max_tokens", f"stage_sampling.{stage}.min_tokens"

    def _count(self, prompt: RenderedPrompt) -> PromptTokens:
        ids, placeholders = prompt.token_ids[: prompt.length], self._family.placeholder_ids
        if placeholders is None:
            return PromptTokens(len(ids), len(ids), 0, 0, 0)
        audio, image, video = (
            ids.count(p) for p in (placeholders.audio, placeholders.image, placeholders.video)
        )
        return PromptTokens(len(ids), len(ids) - audio - image - video, audio, image, video)


@asynccontextmanager
async def _reading(handle: ArHandle, began: float, deadline_s: float) -> AsyncIterator[None]:
    async with _before_deadline(began, deadline_s), handle.life.needed():
        yield


@asynccontextmanager
async def _before_deadline(began: float, deadline_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(began + deadline_s - time.monotonic()):
            yield
    except TimeoutError:
        raise DeadlineExceededError(f"reading the prompt took longer than {deadline_s:g} s") from None


def _frames_of(clone: ClonedVoice, num_codebooks: int) -> list[Frame]:
    frames = np.frombuffer(clone.frames, np.int16).reshape(-1, num_codebooks)
    return [tuple(frame) for frame in frames.tolist()]


def _num_chars(message: ChatMessage) -> int:
    texts = sum(len(part.text) for part in message.content if isinstance(part, TextPart))
    return texts + sum(len(call.arguments) for call in message.tool_calls)


def _limit_tokens(
    params: StageSampling,
    max_model_len: int,
    prompt_length: int,
    *,
    asked: SamplingConfig | None,
    fields: tuple[str, str],
) -> None:
    """Lowers `params` to what the stage may sample after a prompt of `prompt_length` tokens.

    `asked` holds the request's own settings for the stage: its `max_tokens` and `min_tokens` must fit the
    context. Values from the stage config are cut to the context instead. `fields` names the request's fields
    for `max_tokens` and `min_tokens`. Raises `InvalidRequestError`.
    """
    max_tokens, min_tokens = (None, None) if asked is None else (asked.max_tokens, asked.min_tokens)
    needed = prompt_length + (max_tokens or min_tokens or 1)
    room = max_model_len - prompt_length
    if needed > max_model_len:
        param = "messages" if room < 1 else fields[0] if max_tokens else fields[1]
        raise context_length_exceeded(max_model_len, needed, param)
    params.max_tokens = min(room if params.max_tokens is None else params.max_tokens, room)
    params.min_tokens = min(params.min_tokens, params.max_tokens)
