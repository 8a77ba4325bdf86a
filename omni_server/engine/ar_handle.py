"""The server's end of an autoregressive engine: requests in, tokens and rows out, one release path."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs.engine import tokens_input

from omni_server.engine.ar_stream import ArStream
from omni_server.engine.async_engine import RowSink, abort, stage_errors
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_handle import BuildEngine, EngineHandle
from omni_server.engine.feed_outbox import FeedOutbox
from omni_server.engine.grammar_check import GrammarCheck
from omni_server.engine.prompt_rendering import PromptRenderer, RenderedPrompt
from omni_server.engine.token_table import TokenTable
from omni_server.errors import InvalidRequestError, StageDeadError, StageError
from omni_server.metrics.stage_metrics import ArStageMetrics, RequestMeter
from omni_server.protocol.rows import AddressedFeed, SharedBlock
from omni_server.protocol.vllm_fields import TOKENS_PER_OUTPUT_KEY
from omni_server.transport.block_ledger import BlockLedger
from omni_server.types import Prompt, TokenizedPrompt

WorkerCount = Literal["num_row_requests", "num_resumed", "num_steady_steps", "runner_generation"]
"""Requests that the worker holds rows for; preempted requests that it has resumed; decoding steps prepared by
one kernel (`stages.runtime.decode_fast_path`); the generation of vLLM's model runner, 1 or 2."""

_MAX_CAUSE = 300
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+: ")


class ArHandle(EngineHandle):
    """Handle of an engine that samples tokens."""

    max_model_len: int
    """Maximum tokens of a prompt and its answer. Known after the first start."""

    def __init__(
        self,
        name: str,
        build: BuildEngine,
        *,
        output_ledger: BlockLedger | None = None,
        input_ledgers: Sequence[BlockLedger] = (),
    ) -> None:
        """The ledgers belong to the queue that the engine writes rows to, and to those that it reads rows
        from, by their numbers."""
        super().__init__(name, build)
        self.metrics = ArStageMetrics()
        self._output_ledger = output_ledger
        self._input_ledgers = input_ledgers
        self._tokens: TokenTable | None = None
        self._grammars = GrammarCheck(lambda: self.engine.vllm_config)
        self.outbox = FeedOutbox(self.feed, self._drop if input_ledgers else None, self._fail)

    def attach(self, built: BuiltEngine) -> None:
        engine = built.client
        engine.output_processor.stage_metrics = self.metrics  # counters survive a restart
        engine.output_processor.row_ledger = self._output_ledger
        self.max_model_len = engine.model_config.max_model_len
        super().attach(built)

    def detach(self, reason: str) -> BuiltEngine | None:
        self.metrics.reported(num_running=0, num_waiting=0, kv_cache_usage=0.0)
        built = super().detach(reason)
        self._grammars.end()  # last: a check that is about to begin finds no engine
        return built

    def end_blocks(self) -> int:
        num_blocks = 0 if self._output_ledger is None else self._output_ledger.producer_died()
        return num_blocks + sum(ledger.consumer_died(self.number) for ledger in self._input_ledgers)

    def _drop(self, block: SharedBlock) -> None:
        self._input_ledgers[block.queue].drop(block)

    def _fail(self, engine_id: str) -> None:
        with suppress(StageDeadError):  # then the request learns that
            self.engine.fail(engine_id, StageError(self.name, "its input could not be sent"))

    def max_media(self, modality: str) -> int:
        """Returns how many items of a modality one prompt may hold (vLLM's `limit_mm_per_prompt`)."""
        config = self.engine.model_config.multimodal_config
        return 0 if config is None else config.get_limit_per_prompt(modality)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` without special tokens."""
        text: str = self.engine.get_tokenizer().decode(list(token_ids), skip_special_tokens=True)
        return text

    def check_text(self, num_chars: int) -> None:
        PromptRenderer(self.name, self.engine).check_text(num_chars)

    async def render(self, prompt: Prompt, reply: str | None = None) -> RenderedPrompt:
        """See `PromptRenderer.render`. Also raises `StageDeadError`."""
        return await PromptRenderer(self.name, self.engine).render(prompt, reply)

    async def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """See `PromptRenderer.tokenize`. Also raises `StageDeadError`."""
        return await PromptRenderer(self.name, self.engine).tokenize(prompt)

    async def check(self, params: SamplingParams, structured_param: str | None = None) -> None:
        """Rejects what `open` would reject, before anything has been promised to the caller. Updates
        `params`.

        `structured_param` is the request field that `params.structured_outputs` was made from. Raises
        `InvalidRequestError`.
        """
        config = self.engine.vllm_config
        tokenizer = self.engine.get_tokenizer()
        try:
            params.verify(config.model_config, config.speculative_config, None, tokenizer)
            params.update_from_tokenizer(tokenizer)
            if params.structured_outputs is not None:
                params.structured_outputs = await self._grammars.check(params.structured_outputs)
        except InvalidRequestError as exc:
            exc.param = structured_param
            raise
        except VLLMClientError as exc:
            known = exc.parameter if isinstance(exc, VLLMValidationError) else None
            raise InvalidRequestError(
                _refusal(exc), param=known if known is not None else structured_param
            ) from exc

    async def open(
        self,
        request_id: str,
        prompt: RenderedPrompt | tuple[int, ...],
        params: SamplingParams,
        row_sink: RowSink | None = None,
        *,
        tokens_per_output: tuple[int, ...] = (1,),
        priority: int = 0,
    ) -> ArStream:
        """Starts a request. `row_sink` is called with each payload of rows, before the tokens of its step. It
        must not raise.

        The stage sends tokens in blocks of `tokens_per_output`, whose last number applies to all further
        blocks, and the rest at the end. Requests with the lowest `priority` are computed first, and the
        earliest of equal ones. Raises `InvalidRequestError`, `StageError` or `StageDeadError`.
        """
        engine = self.engine
        if params.logprobs is not None and self._tokens is None:
            self._tokens = TokenTable(engine.get_tokenizer())
        if isinstance(prompt, RenderedPrompt):
            token_ids, engine_input = prompt.token_ids, prompt.engine_input
        else:
            token_ids, engine_input = prompt, tokens_input(list(prompt))
        meter = RequestMeter(self.metrics, len(token_ids), has_first_token=tokens_per_output[0] == 1)
        if tokens_per_output != (1,):
            params.extra_args = (params.extra_args or {}) | {TOKENS_PER_OUTPUT_KEY: tokens_per_output}
        if row_sink is not None:
            engine.output_processor.row_sinks[request_id] = row_sink
        try:
            with stage_errors(self.name):
                queue = await engine.add_request(request_id, engine_input, params, priority=priority)
        except BaseException as exc:
            engine.output_processor.row_sinks.pop(request_id, None)
            engine.output_processor.drop_codes(request_id)
            # If this was cancelled while sending, the engine may already have the request.
            await abort(engine, request_id, internal=False)
            if isinstance(exc, VLLMClientError):
                raise InvalidRequestError(_refusal(exc)) from exc
            raise
        tokens = None if params.logprobs is None else self._tokens
        return ArStream(self.name, engine, request_id, queue, meter, tokens, params)

    async def feed(self, feeds: Sequence[AddressedFeed]) -> None:
        """Sends rows to running requests, by `ArStream.engine_id`; called by `outbox`. Rows for ended
        requests are dropped.

        Raises `StageDeadError`; in that case no rows were sent.
        """
        with stage_errors(self.name):
            engine = self.engine
            for _, feed in feeds:
                if (block := feed.shared_block) is not None:
                    self._input_ledgers[block.queue].sent(block, self.number)
            await engine.send_feeds(feeds)

    async def worker_count(self, name: WorkerCount) -> int:
        """Returns a count of the engine's workers, the greatest of all ranks."""
        return max(await self.engine.collective_rpc(name))


def _refusal(exc: Exception) -> str:
    """Returns the message without the value that vLLM appends, but with the cause from its grammar compiler,
    without the place in its source. On one line: both may contain text of the request."""
    message = str(exc.args[0] if exc.args else exc)
    cause = str(exc.__cause__ or "")[:_MAX_CAUSE]
    if cause and cause not in message:
        message = f"{message} {cause}"
    message = _SOURCE_PLACE.sub("", message)
    return "".join(character if character.isprintable() else " " for character in message).strip()
