"""Routes requests through the stages. Contains no model code and touches no tensors."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from omni_server.config.pipeline import Embeddings, Text, TokenFrames, imported
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import EngineHandle, Stage
from omni_server.engine.prompt_rendering import RenderedPrompt
from omni_server.engine.sampling import StageSampling, add_rows, limit_tokens, merged, sampling_params
from omni_server.errors import (
    CorruptDataError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    StageDownError,
)
from omni_server.family import FamilyModel
from omni_server.family.speech_text import SpokenTextFilterFactory
from omni_server.generation import Deliver
from omni_server.orchestrator.fair_share import FairShareQueue
from omni_server.orchestrator.image_requests import ImageRequests, ImageTask
from omni_server.orchestrator.request_plan import RequestPlan, plan_request, requested_outputs
from omni_server.orchestrator.request_run import RequestRun
from omni_server.orchestrator.row_feeder import RowFeeder, TextRowFeeder
from omni_server.orchestrator.speech_decoding import SpeechDecoding, speech_decoding
from omni_server.orchestrator.speech_reader import SpeechReader
from omni_server.orchestrator.speech_tasks import SPOKEN_TOKENS_PER_OUTPUT, ArTask, AudioTask, TextOutput
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
    Prompt,
    PromptTokens,
    SamplingConfig,
    Task,
    TokenizedPrompt,
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
        async with _before_deadline(time.monotonic(), self._request_timeout_s), handle.life.needed():
            outputs = requested_outputs(request, self._config)
            return await handle.tokenize(self._prompt(handle, request, outputs))

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
        """Validates, tokenises and starts the request. `pinned_engine`: the engine to choose in its stage,
        for a warm-up. Raises the errors of `Generator.submit`."""
        plan = plan_request(request, self._config, self._family, self._request_timeout_s)
        self._check_open(plan)
        run = RequestRun(request.request_id, self._fair_share.take(request.caller), deliver, pinned_engine)
        try:
            if request.image is not None:
                tokens = await self._add_image(run, request, request.image)
            elif plan.reader is not None:
                tokens = await self._add_reading(run, plan, plan.reader)
            else:
                tokens = await self._add_ar(run, plan)
            self._check_open(plan)  # again: rendering takes time
        except BaseException:
            run.close()
            raise
        self._running[request.request_id] = run
        run.start(
            tokens,
            deadline_s=plan.deadline_s - (time.monotonic() - plan.began),
            is_logged=request.is_logged,
            on_corrupt=self._count_corrupt,
            on_end=lambda request_id: self._running.pop(request_id, None),
        )
        return run

    async def _add_image(self, run: RequestRun, request: OmniRequest, image: ImageOutput) -> PromptTokens:
        prompt, size = await asyncio.to_thread(self.images.render, request.messages, image)
        run.num_image_tokens = num_image_tokens(size.width, size.height)
        run.add(ImageTask(run, self._diffusion[self._entry], prompt, size))
        num_given = len(prompt.token_ids) - run.num_image_tokens
        return PromptTokens(num_given, text=0, audio=0, image=num_given, video=0)

    async def _add_ar(self, run: RequestRun, plan: RequestPlan) -> PromptTokens:
        request = plan.request
        entry, config = self._ar[self._entry], self._config.stages[self._entry]
        handle = run.choose(entry)  # an engine caches the media that its prompts refer to
        assert isinstance(config, ArStage)
        is_text = "text" in plan.outputs
        asked = request.sampling.get(self._entry)
        sampling = merged(config.default_sampling, asked)
        reply = None if request.speech is None or not is_text else request.speech.text
        if reply is not None:
            sampling = PREFILL_ONLY
        rendered = self._prompt(handle, request, plan.outputs)
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
        async with _before_deadline(plan.began, plan.deadline_s), handle.life.needed():
            await handle.check(params, None if structured is None else structured.param)
            prompt = await handle.render(rendered, reply)
        tokens = prompt.count(self._family.placeholder_ids)
        if request.prompt is not None and tokens.text < tokens.total:
            raise InvalidRequestError("Only chats can have tokens that stand for media.", param="messages")
        is_default_asked = reply is not None or request.can_be_shortened
        limit_tokens(
            self._entry,
            params,
            handle.max_model_len,
            len(prompt.token_ids),
            asked=sampling if is_default_asked else asked,
            text_fields=(request.max_tokens_param, "min_tokens") if is_text else None,
        )
        is_limited = bool(sampling.stop) or request.tools is not None
        speaker, text, written = None, None, None
        if plan.voice and (edge := self._config.edge_from(self._entry, Text)) is not None:
            written = self._add_written(run, plan, edge.target, rendered)
        if plan.voice and (edge := self._config.edge_from(self._entry, Embeddings)) is not None:
            speaker = self._add_speaker(run, plan, edge.target, prompt, params, is_limited=is_limited)
        if is_text:
            # A stop string cuts the text behind any token, and log-probabilities come with single tokens.
            crosses_as_ids = speaker is not None and isinstance(speaker.source, TextRowFeeder)
            is_together = crosses_as_ids and not sampling.stop and params.logprobs is None
            text = TextOutput(
                run,
                self._entry,
                prompt,
                spoken_text=SpokenText(handle.detokenize) if speaker is not None and is_limited else None,
                tool_parser=ToolParser(is_parallel=request.tools.is_parallel) if request.tools else None,
                speaker=speaker,
                written=written,
                tokens_per_output=SPOKEN_TOKENS_PER_OUTPUT if is_together else (1,),
            )
        output = self._add_audio(run, plan, self._entry) or text
        assert output is not None
        run.add(ArTask(run, entry, prompt, params, output, speaker=speaker, handle=handle))
        return tokens

    async def _add_reading(self, run: RequestRun, plan: RequestPlan, name: str) -> PromptTokens:
        """Adds the stage that reads the text of the request."""
        speech = plan.request.speech
        assert speech is not None
        source = TextSource(
            self._family.speech_text(speech, plan.voice),
            speech.pieces or in_one_piece(speech.text or ""),
            is_whole=speech.pieces is None,
            on_later_text=run.add_prompt_text,
        )
        reader = self._add_reader(run, plan, name, source)
        async with _before_deadline(plan.began, plan.deadline_s):
            num_tokens = await reader.prepare()
        if not num_tokens:
            raise InvalidRequestError("there is no text to read", param="messages")
        return PromptTokens(num_tokens, num_tokens, 0, 0, 0)

    def _add_written(self, run: RequestRun, plan: RequestPlan, name: str, prompt: Prompt) -> WrittenText:
        """Adds the stage that reads what the entry writes."""
        request = plan.request
        assert request.speech is not None
        assert self._spoken_text_filter is not None
        self._speaker_params(request, name, 1)  # before the answer is written
        written = WrittenText(self._spoken_text_filter(prompt.text))
        source = TextSource(
            self._family.speech_text(replace(request.speech, text_first=False), plan.voice),
            written.pieces(),
            is_whole=False,
            on_later_text=lambda num_tokens: None,
        )
        self._add_reader(run, plan, name, source)
        return written

    def _add_reader(self, run: RequestRun, plan: RequestPlan, name: str, source: TextSource) -> SpeechReader:
        request, audio = plan.request, self._add_audio(run, plan, name)
        assert audio is not None
        asked = request.sampling.get(name)
        # In place of what follows from the text's length, the request may limit the speech.
        limit = audio.limit if asked is None or asked.max_tokens is None else None
        audio.follow(source, is_aligned=request.speech is not None and request.speech.is_aligned)
        params = partial(self._speaker_params, request, name)
        return run.add(SpeechReader(run, self._ar[name], source, audio, params, limit))

    def _prompt(self, handle: ArHandle, request: OmniRequest, outputs: frozenset[Output]) -> Prompt:
        # Rendering blocks the event loop, for half a second with 32 MB of text, which would then be rejected.
        handle.check_text(request.num_chars)
        if request.prompt is not None:
            return request.prompt
        tools = () if request.tools is None else request.tools.tools
        return self._family.prompt(request.messages, outputs=outputs, tools=tools)

    def _add_speaker(
        self,
        run: RequestRun,
        plan: RequestPlan,
        name: str,
        prompt: RenderedPrompt,
        entry_params: StageSampling,
        *,
        is_limited: bool,
    ) -> ArTask:
        """Adds the stage that receives the entry's embeddings."""
        fed = self._family.embeddings_prompt(
            self._config.stages[name].model_stage, prompt.token_ids[: prompt.length], voice=plan.voice
        )
        # Without rows to send, the entry may use its prefix cache.
        if fed.text is None or fed.text.has_media:
            spans = None if fed.text is None else fed.text.spans
            add_rows(entry_params, RowsOutput(voice=plan.voice, num_reply=prompt.num_reply, spans=spans))
        num_first_rows = len(fed.token_ids) - 1  # the row of the first generated token follows
        drop = self._ar[name].any_engine.outbox.drop  # all replicas read the same queues
        if fed.text is None:
            feeder = RowFeeder(drop, num_first_rows=num_first_rows, is_limited=is_limited)
        else:
            assert len(fed.text.row_ids) == num_first_rows
            feeder = TextRowFeeder(drop, fed.text, is_limited=is_limited)
        params = self._speaker_params(plan.request, name, len(fed.token_ids), fed.num_replaced)
        audio = self._add_audio(run, plan, name)
        assert audio is not None
        return run.add(ArTask(run, self._ar[name], fed.token_ids, params, audio, source=feeder))

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
        limit_tokens(name, params, max_model_len, prompt_length, asked=asked)
        return params

    def _add_audio(self, run: RequestRun, plan: RequestPlan, stage: str) -> AudioTask | None:
        """Adds the task that decodes the stage's tokens, or returns None if no audio is made of them."""
        decoding, speech = self._decoding.get(stage), plan.request.speech
        if decoding is None or speech is None:
            return None
        audio = AudioTask(
            run,
            stage,
            decoding=decoding,
            edge=decoding.new_edge(speech, plan.voice),
            stop_ids=self._family.stop_ids[self._config.stages[stage].model_stage],
            must_end=speech.must_end,
        )
        return run.add(audio)

    async def close(self) -> None:
        """Rejects new requests and releases the running ones."""
        self._is_closed = True
        for run in list(self._running.values()):
            await run.aclose()
        if self._voices is not None:
            await self._voices.close()

    def _check_up(self, names: Collection[str]) -> None:
        if self._is_closed:
            raise OverloadedError("the server is shutting down", code="server_shutting_down")
        down = self.stage_down(names)
        if down is not None:
            raise down

    def _check_open(self, plan: RequestPlan) -> None:
        self._check_up(plan.stages)
        if (request_id := plan.request.request_id) in self._running:
            raise InvalidRequestError(f"a request with id '{request_id}' is running already")


@asynccontextmanager
async def _before_deadline(began: float, deadline_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(began + deadline_s - time.monotonic()):
            yield
    except TimeoutError:
        raise DeadlineExceededError(f"reading the prompt took longer than {deadline_s:g} s") from None
