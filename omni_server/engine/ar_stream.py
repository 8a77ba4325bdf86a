"""A running request of an autoregressive stage, seen from the server."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.output_processor import RequestOutputCollector

from omni_server.engine.async_engine import StageAsyncLLM, abort, stage_errors
from omni_server.engine.token_table import TokenTable
from omni_server.errors import CorruptDataError, InvalidRequestError, OverloadedError, StageError
from omni_server.metrics.stage_metrics import RequestMeter
from omni_server.protocol.corruption import decode_corruption
from omni_server.protocol.vllm_fields import GRAMMAR_ALLOWS_NOTHING, GRAMMAR_TOO_SLOW, GRAMMARS_BUSY
from omni_server.types import FinishReason, SampledToken

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NUM_LAST_TOKENS = 8
"""More than the bytes of a character: the text of this many tokens ends like the text of all tokens."""

_TOO_SLOW = (
    "The grammar of the structured output or of the tools takes too long to follow. It can be read in too "
    "many ways: avoid repetitions inside repetitions."
)
_ALLOWS_NOTHING = (
    "The grammar of the structured output or of the tools allows nothing to follow what has been written, "
    "not even the end: look for a rule or a '$ref' that cannot do without itself."
)


class ArOutput(msgspec.Struct, frozen=True):
    """Everything since the last output; several steps may be merged."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_cached_tokens: int
    logprobs: tuple[SampledToken, ...] = ()
    """Set for `token_ids` on request; without the end token, unless it is part of the text."""
    is_cut: bool = False
    """A stop string ended the text; the last tokens are not, or not completely, part of it."""
    predicted: npt.NDArray[np.int16] | None = None
    """The codes predicted for `token_ids`, `[n, num_predicted]`, one row per token. None if the stage
    predicts none."""


@dataclass(eq=False)
class ArStream:
    """One running request of the stage. `close` releases it, however it ended."""

    stage: str
    engine: StageAsyncLLM
    external_id: str
    queue: RequestOutputCollector
    meter: RequestMeter
    tokens: TokenTable | None
    """Set if log-probabilities were requested."""
    params: SamplingParams

    def __post_init__(self) -> None:
        self._is_finished = False
        self._token_ids: list[int] = []  # only for text
        self._num_chars = 0

    @property
    def engine_id(self) -> str:
        """The engine's own id of the request, used to feed it."""
        return self.queue.request_id

    async def outputs(self) -> AsyncGenerator[ArOutput, None]:
        """Yields outputs until the request has finished. Raises `StageError` (`CorruptDataError` if the
        request's data is corrupt) or `StageDeadError`; `InvalidRequestError` or `OverloadedError` if the
        stage has given up its grammar."""
        with stage_errors(self.stage):
            while not self._is_finished:
                output = self.queue.get_nowait() or await self.queue.get()
                assert isinstance(output, RequestOutput)
                completion = output.outputs[0]
                self._is_finished = output.finished
                num_cached = output.num_cached_tokens or 0
                self.meter.tokens(len(completion.token_ids), num_cached=num_cached)
                if completion.finish_reason is not None:
                    self.meter.ended(completion.finish_reason)
                finish_reason = self._finish_reason(completion)
                yield ArOutput(
                    token_ids=tuple(completion.token_ids),
                    text=self._text(completion),
                    finish_reason=finish_reason,
                    num_cached_tokens=num_cached,
                    logprobs=self._logprobs(completion),
                    is_cut=isinstance(completion.stop_reason, str),
                    predicted=self._predicted(len(completion.token_ids)),
                )

    def _predicted(self, num_tokens: int) -> npt.NDArray[np.int16] | None:
        """The codes predicted for the next tokens. Raises `CorruptDataError` if they have not come."""
        codes = self.engine.output_processor.take_codes(self.external_id, num_tokens)
        if codes is not None and len(codes) < num_tokens:
            raise CorruptDataError(
                self.stage, "shape", f"{num_tokens} tokens with {len(codes)} rows of codes"
            )
        return codes

    def _text(self, completion: CompletionOutput) -> str:
        """Returns the text, even if it ends inside a character. vLLM holds that end back until the rest of
        the character arrives, which never happens."""
        if not self.params.detokenize:
            return ""
        self._token_ids += completion.token_ids
        self._num_chars += len(completion.text)
        if completion.finish_reason is None or isinstance(completion.stop_reason, str):
            return completion.text
        if completion.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            self._token_ids.pop()
        number = _NUM_LAST_TOKENS
        while not (end := self._decode(self._token_ids[-number:])) and number < len(self._token_ids):
            number *= 2  # special tokens have no text
        if not end.endswith(_REPLACEMENT):
            return completion.text
        return completion.text + self._decode(self._token_ids)[self._num_chars :]

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer = self.engine.get_tokenizer()
        text: str = tokenizer.decode(token_ids, skip_special_tokens=self.params.skip_special_tokens)
        return text

    def _logprobs(self, completion: CompletionOutput) -> tuple[SampledToken, ...]:
        if self.tokens is None:
            return ()
        assert completion.logprobs is not None
        token_ids = list(completion.token_ids)
        is_end = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        if is_end and not self._is_shown(self.tokens, token_ids[-1]):
            token_ids.pop()
        candidates = list(completion.logprobs)[: len(token_ids)]
        num_top = self.params.logprobs or 0
        return tuple(
            self.tokens.sampled(token_id, of_token, num_top)
            for token_id, of_token in zip(token_ids, candidates, strict=True)
        )

    def _is_shown(self, tokens: TokenTable, end_token: int) -> bool:
        """Whether the text includes the token that ended it."""
        is_skipped = self.params.skip_special_tokens and tokens.is_special(end_token)
        return self.params.include_stop_str_in_output and not is_skipped

    def _finish_reason(self, completion: CompletionOutput) -> FinishReason | None:
        match reason := completion.finish_reason:
            case None | "stop" | "length":
                return reason
            case "error" if corruption := decode_corruption(str(completion.stop_reason)):
                raise CorruptDataError(self.stage, corruption.kind, corruption.detail)
            case "abort":
                raise StageError(self.stage, "the request was aborted inside the engine")
            case "error" if completion.stop_reason == GRAMMAR_TOO_SLOW:
                raise InvalidRequestError(_TOO_SLOW, code="unsupported_value")
            case "error" if completion.stop_reason == GRAMMAR_ALLOWS_NOTHING:
                raise InvalidRequestError(_ALLOWS_NOTHING, code="unsupported_value")
            case "error" if completion.stop_reason == GRAMMARS_BUSY:
                raise OverloadedError(
                    "Structured outputs of other requests take all the time there is for them."
                )
            case _:
                raise StageError(self.stage, f"the engine ended the request: {reason}")

    async def close(self) -> None:
        """Stops the request if it is still running, and forgets it. Rows that arrive later are dropped."""
        self.engine.output_processor.row_sinks.pop(self.external_id, None)
        self.engine.output_processor.drop_codes(self.external_id)
        if not self._is_finished:
            self._is_finished = True
            self.meter.ended("abort")
            await abort(self.engine, self.queue.request_id)
