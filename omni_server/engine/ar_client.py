"""The server's end of an autoregressive stage: requests in, tokens and rows out, one release path."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs import TextPrompt
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.output_processor import RequestOutputCollector

from omni_server.engine.async_engine import RowSink, StageAsyncLLM
from omni_server.engine.logprobs import TokenTable
from omni_server.engine.stage_client import StageClient, abort, stage_errors
from omni_server.errors import CorruptDataError, InvalidRequestError, OverloadedError, StageError
from omni_server.family import ThinkerPrompt
from omni_server.metrics.stage_metrics import RequestMeter
from omni_server.protocol.corruption import Corruption, decode_corruption
from omni_server.protocol.feeds import AddressedFeed
from omni_server.protocol.grammar_refusal import GRAMMAR_ALLOWS_NOTHING, GRAMMAR_TOO_SLOW, GRAMMARS_BUSY
from omni_server.protocol.rows import SharedBlock
from omni_server.protocol.token_blocks import TOKENS_PER_OUTPUT_KEY
from omni_server.transport.block_ledger import BlockLedger
from omni_server.types import FinishReason, SampledToken

_MAX_CAUSE = 300
_TOO_SLOW = (
    "The grammar of the structured output or of the tools takes too long to follow. It can be read in too many ways: "
    "avoid repetitions inside repetitions."
)
_ALLOWS_NOTHING = (
    "The grammar of the structured output or of the tools allows nothing to follow what has been written, not even the "
    "end: look for a rule or a '$ref' that cannot do without itself."
)
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+: ")


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt after tokenisation and media preprocessing."""

    token_ids: tuple[int, ...]
    engine_input: Any
    """vLLM's own form of it."""
    reply: str | None = None
    """Text of the last `num_reply` tokens: no part of the chat, but the answer to it that is to be spoken."""
    num_reply: int = 0

    @property
    def length(self) -> int:
        """Tokens of the chat."""
        return len(self.token_ids) - self.num_reply


class ArOutput(msgspec.Struct, frozen=True):
    """What came since the last output; several steps may be merged."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_cached_tokens: int
    logprobs: tuple[SampledToken, ...] = ()
    """Of `token_ids`, where they were asked for; without the end token, unless it is part of the text."""
    is_cut: bool = False
    """A stop string has ended the text; the last tokens are not part of it, or not as a whole."""


class ArStream:
    """One running request of the stage. `close` releases it, however it ended."""

    def __init__(
        self,
        stage: str,
        engine: StageAsyncLLM,
        external_id: str,
        queue: RequestOutputCollector,
        meter: RequestMeter,
        tokens: TokenTable | None,
        params: SamplingParams,
    ) -> None:
        """`tokens` is given where log-probabilities were asked for."""
        self._stage = stage
        self._engine = engine
        self._external_id = external_id
        self._queue = queue
        self._meter = meter
        self._tokens = tokens
        self._params = params
        self._is_finished = False

    @property
    def engine_id(self) -> str:
        """The engine's own id of the request, by which it is fed."""
        return self._queue.request_id

    async def outputs(self) -> AsyncGenerator[ArOutput, None]:
        """Until the request has finished. Raises `StageError` (`CorruptDataError` if it is about the request's data) or
        `StageDeadError`; `InvalidRequestError` or `OverloadedError` where the stage has given up its grammar."""
        with stage_errors(self._stage):
            while not self._is_finished:
                output = self._queue.get_nowait() or await self._queue.get()
                assert isinstance(output, RequestOutput)
                completion = output.outputs[0]
                self._is_finished = output.finished
                num_cached = output.num_cached_tokens or 0
                self._meter.tokens(len(completion.token_ids), num_cached=num_cached)
                if completion.finish_reason is not None:
                    self._meter.ended(completion.finish_reason)
                yield ArOutput(
                    token_ids=tuple(completion.token_ids),
                    text=completion.text,
                    finish_reason=self._finish_reason(completion),
                    num_cached_tokens=num_cached,
                    logprobs=self._logprobs(completion),
                    is_cut=isinstance(completion.stop_reason, str),
                )

    def _logprobs(self, completion: CompletionOutput) -> tuple[SampledToken, ...]:
        if self._tokens is None:
            return ()
        assert completion.logprobs is not None
        token_ids = list(completion.token_ids)
        is_end = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        if is_end and not self._is_shown(self._tokens, token_ids[-1]):
            token_ids.pop()
        candidates = list(completion.logprobs)[: len(token_ids)]
        return self._tokens.all_sampled(token_ids, candidates, self._params.logprobs or 0)

    def _is_shown(self, tokens: TokenTable, end_token: int) -> bool:
        """The text has the token that ended it."""
        is_skipped = self._params.skip_special_tokens and tokens.is_special(end_token)
        return self._params.include_stop_str_in_output and not is_skipped

    def _finish_reason(self, completion: CompletionOutput) -> FinishReason | None:
        match reason := completion.finish_reason:
            case None | "stop" | "length":
                return reason
            case "error" if corruption := _corruption(completion):
                raise CorruptDataError(self._stage, corruption.kind, corruption.detail)
            case "abort":
                raise StageError(self._stage, "the request was aborted inside the engine")
            case "error" if completion.stop_reason == GRAMMAR_TOO_SLOW:
                raise InvalidRequestError(_TOO_SLOW, code="unsupported_value")
            case "error" if completion.stop_reason == GRAMMAR_ALLOWS_NOTHING:
                raise InvalidRequestError(_ALLOWS_NOTHING, code="unsupported_value")
            case "error" if completion.stop_reason == GRAMMARS_BUSY:
                raise OverloadedError("Structured outputs of other requests take all the time there is for them.")
            case _:
                raise StageError(self._stage, f"the engine ended the request: {reason}")

    async def close(self) -> None:
        """Stop the request if it still runs and forget it; rows that still come are dropped."""
        self._engine.row_sinks.pop(self._external_id, None)
        if not self._is_finished:
            self._is_finished = True
            self._meter.ended("abort")
            await abort(self._engine, self._queue.request_id)


class ArStageClient(StageClient[StageAsyncLLM]):
    """The stage's `StageAsyncLLM`."""

    def __init__(
        self,
        name: str,
        engine: StageAsyncLLM,
        *,
        output_ledger: BlockLedger | None = None,
        input_ledger: BlockLedger | None = None,
    ) -> None:
        """The ledgers are those of the queues that the stage writes rows to and reads rows from."""
        self.metrics = engine.stage_metrics
        self._output_ledger = output_ledger
        self._input_ledger = input_ledger
        self._tokens: TokenTable | None = None
        super().__init__(name, engine)

    def attach(self, engine: StageAsyncLLM) -> None:
        engine.stage_metrics = self.metrics  # counters go on
        engine.row_ledger = self._output_ledger
        self.max_model_len: int = engine.model_config.max_model_len
        super().attach(engine)

    def detach(self, reason: str) -> StageAsyncLLM | None:
        self.metrics.reported(num_running=0, num_waiting=0, kv_cache_usage=0.0)
        return super().detach(reason)

    def max_media(self, modality: str) -> int:
        """Items of a modality that one prompt may hold (vLLM's `limit_mm_per_prompt`)."""
        config = self.engine.model_config.multimodal_config
        return 0 if config is None else config.get_limit_per_prompt(modality)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        text: str = self.engine.get_tokenizer().decode(list(token_ids), skip_special_tokens=True)
        return text

    def check_text(self, num_chars: int) -> None:
        """Refuses more text than `max_model_len` tokens can spell, which vLLM would do after it has been rendered.

        Raises `InvalidRequestError`.
        """
        if num_chars > self.max_model_len * self.engine.get_tokenizer().max_chars_per_token:
            raise _prompt_too_long(self.max_model_len)

    async def render(self, prompt: ThinkerPrompt, reply: str | None = None) -> RenderedPrompt:
        """Tokenise and preprocess media, off the event loop; behind them the tokens of `reply`.

        Raises `InvalidRequestError` if the prompt is too long or the media do not fit it.
        """
        media: dict[str, list[Any]] = {}
        if prompt.audios:
            media["audio"] = list(prompt.audios)
        if prompt.images:
            media["image"] = [_picture(pixels) for pixels in prompt.images]
        if prompt.videos:
            media["video"] = list(prompt.videos)
        if len(prompt.pieces) > self.max_model_len:  # each is one token at least
            raise context_length_exceeded(self.max_model_len, len(prompt.pieces), "messages")
        renderer = self.engine.renderer
        try:
            with stage_errors(self.name):
                raw: dict[str, Any] = {"prompt": prompt.text}
                if prompt.pieces:
                    raw = {"prompt_token_ids": await self._ids_of(prompt.pieces)}
                if media:
                    raw |= {"multi_modal_data": media, "mm_processor_kwargs": dict(prompt.processor_kwargs)}
                # vLLM's usual cache sends media once and refers to them from then on; rendering counts as sent, so a
                # prompt that is dropped after it, or overtaken on its way to the engine, would spoil the next with
                # the same media. The other cache keeps what preprocessing made and sends it every time.
                (engine_input,) = await renderer.render_cmpl_async(
                    [parse_model_prompt(self.engine.model_config, raw)],
                    renderer.default_cmpl_tok_params,
                    skip_mm_cache=True,
                )
        except (VLLMClientError, ValueError, TypeError) as exc:
            raise _invalid_prompt(exc, self.max_model_len) from exc
        reply_ids = () if reply is None else self._plain_ids(reply)
        token_ids = (*engine_input["prompt_token_ids"], *reply_ids)
        if len(token_ids) >= self.max_model_len:
            raise context_length_exceeded(self.max_model_len, len(token_ids), "messages")
        if reply_ids:
            engine_input = engine_input | {"prompt_token_ids": list(token_ids)}
        return RenderedPrompt(token_ids, engine_input, reply, len(reply_ids))

    async def _ids_of(self, pieces: Sequence[str]) -> list[int]:
        """Tokens of a prompt none of which reaches over the border of two pieces.

        vLLM's limits hold for each piece alone. So the pieces are tokenised one after the other, for other prompts to
        come between them, and not beyond what fits. Raises `InvalidRequestError`.
        """
        renderer = self.engine.renderer
        params = renderer.default_cmpl_tok_params
        inner = replace(params, add_special_tokens=False)
        token_ids: list[int] = []
        for piece in pieces:
            prompt = await renderer.tokenize_prompt_async(TextPrompt(prompt=piece), params)
            token_ids += prompt["prompt_token_ids"]
            if len(token_ids) > self.max_model_len:
                raise _prompt_too_long(self.max_model_len)
            params = inner
        return token_ids

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        """Tokens of `text` as the model would write it: without special ones, even where it spells one."""
        tokenizer = self.engine.get_tokenizer()
        spelled = "|".join(re.escape(token) for token in tokenizer.get_added_vocab())
        ids: list[int] = []
        for piece in re.split(f"({spelled})", text) if spelled else [text]:
            # Between its first two characters, a token that is only spelled is no longer seen as one.
            parts = (piece[:1], piece[1:]) if spelled and re.fullmatch(spelled, piece) else (piece,)
            for part in parts:
                ids += tokenizer.encode(part, add_special_tokens=False)
        return tuple(ids)

    async def check(self, params: SamplingParams, structured_param: str | None = None) -> None:
        """What `open` would refuse, refused before anything has been promised to the caller; `params` take notes.

        `structured_param` is the request's field that made `params.structured_outputs`. Raises `InvalidRequestError`.
        """
        config = self.engine.vllm_config
        tokenizer = self.engine.get_tokenizer()

        def verify() -> None:
            params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)
            params.update_from_tokenizer(tokenizer)

        try:
            if params.structured_outputs is None:
                verify()
            else:  # makes a grammar of a schema
                await asyncio.to_thread(verify)
        except (VLLMClientError, ValueError) as exc:
            known = exc.parameter if isinstance(exc, VLLMValidationError) else None
            raise InvalidRequestError(_refusal(exc), param=known if known is not None else structured_param) from exc

    async def open(
        self,
        request_id: str,
        prompt: RenderedPrompt | tuple[int, ...],
        params: SamplingParams,
        row_sink: RowSink | None = None,
        *,
        tokens_per_output: int = 1,
    ) -> ArStream:
        """Start a request; `row_sink` is called with each payload of rows, before the tokens of its step. It must
        not raise.

        With `tokens_per_output` n > 1 the stage sends tokens only when their number passes a multiple of n, and the
        rest at the end. Raises `InvalidRequestError`, `StageError` or `StageDeadError`.
        """
        engine = self.engine
        meter = self.metrics.request(len(_token_ids(prompt)), has_each_token=tokens_per_output == 1)
        engine_input = prompt.engine_input if isinstance(prompt, RenderedPrompt) else tokens_input(list(prompt))
        if tokens_per_output > 1:
            params.extra_args = (params.extra_args or {}) | {TOKENS_PER_OUTPUT_KEY: tokens_per_output}
        if row_sink is not None:
            engine.row_sinks[request_id] = row_sink
        try:
            with stage_errors(self.name):
                add = engine.add_request if params.structured_outputs is None else engine.add_structured_request
                queue = await add(request_id, engine_input, params)
        except BaseException as exc:
            engine.row_sinks.pop(request_id, None)
            # Cancelled while it was sent, the engine may have it already.
            await abort(engine, request_id, internal=False)
            if isinstance(exc, VLLMClientError | ValueError):
                raise InvalidRequestError(str(exc)) from exc
            raise
        tokens = None if params.logprobs is None else self._token_table()
        return ArStream(self.name, engine, request_id, queue, meter, tokens, params)

    def _token_table(self) -> TokenTable:
        if self._tokens is None:
            self._tokens = TokenTable(self.engine.get_tokenizer())
        return self._tokens

    async def send_feeds(self, feeds: Sequence[AddressedFeed]) -> None:
        """Rows for running requests, by their `ArStream.engine_id`; for those that have ended they are dropped.

        Raises `StageDeadError`; then nobody has taken them.
        """
        with stage_errors(self.name):
            engine = self.engine
            if self._input_ledger is not None:
                for _, feed in feeds:
                    if feed.payload is not None and isinstance(feed.payload.block, SharedBlock):
                        self._input_ledger.sent(feed.payload.block)
            await engine.send_feeds(feeds)

    async def num_row_requests(self) -> int:
        """Requests the stage's workers still hold rows for, summed over ranks."""
        return sum(await self.engine.collective_rpc("num_row_requests"))

    async def num_resumed(self) -> int:
        """How often the stage took a request up again after a preemption."""
        return max(await self.engine.collective_rpc("num_resumed"))

    async def num_steady_steps(self) -> int:
        """Decoding steps that the stage prepared by one kernel (`stages.runtime.steady_step`)."""
        return max(await self.engine.collective_rpc("num_steady_steps"))

    async def runner_generation(self) -> int:
        """1 or 2: the generation of vLLM's model runner that the stage's workers run."""
        return max(await self.engine.collective_rpc("runner_generation"))


def _corruption(completion: CompletionOutput) -> Corruption | None:
    """What the stage found wrong with the request's data, if that was its end."""
    return decode_corruption(completion.stop_reason) if isinstance(completion.stop_reason, str) else None


def _token_ids(prompt: RenderedPrompt | tuple[int, ...]) -> tuple[int, ...]:
    return prompt.token_ids if isinstance(prompt, RenderedPrompt) else prompt


def context_length_exceeded(limit: int, num_tokens: int, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This model's maximum context length is {limit} tokens, but the request needs {num_tokens}.",
        param=param,
        code="context_length_exceeded",
    )


def _prompt_too_long(limit: int) -> InvalidRequestError:
    """Where nobody has counted its tokens."""
    return InvalidRequestError(
        f"This model's maximum context length is {limit} tokens; the request is longer.",
        param="messages",
        code="context_length_exceeded",
    )


def _refusal(exc: Exception) -> str:
    """Without the value that vLLM appends; with what its grammar compiler says, but not where in its source. On one
    line: both may hold words of the request."""
    message = str(exc.args[0] if exc.args else exc)
    cause = str(exc.__cause__ or "")[:_MAX_CAUSE]
    if cause and cause not in message:
        message = f"{message} {cause}"
    message = _SOURCE_PLACE.sub("", message)
    return "".join(character if character.isprintable() else " " for character in message).strip()


def _invalid_prompt(exc: Exception, limit: int) -> InvalidRequestError:
    text = str(exc)
    if "maximum model length" in text or "maximum context length" in text or "context length" in text:
        return _prompt_too_long(limit)
    return InvalidRequestError(f"the prompt cannot be processed: {text}", param="messages")


def _picture(pixels: Any) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)
