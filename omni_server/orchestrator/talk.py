"""The spoken half of one request: the thinker's rows go in, codec tokens and sound come out."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from omni_server.edge import CodecEdge
from omni_server.engine.ar_client import ArStageClient
from omni_server.engine.ar_stream import ArOutput
from omni_server.engine.diffusion_client import DiffusionStageClient
from omni_server.engine.sampling import StageSampling
from omni_server.family import TalkerPrompt
from omni_server.orchestrator.feed_outbox import FeedOutbox
from omni_server.orchestrator.row_feeder import RowFeeder
from omni_server.orchestrator.speech_scheduler import SpeechScheduler
from omni_server.orchestrator.speech_stream import SpeechStream
from omni_server.orchestrator.stage_clock import StageClock
from omni_server.protocol.rows import SharedBlock
from omni_server.types import AudioDelta, CodecDelta, FinishReason, OmniEvent


@dataclass(frozen=True)
class SpeechPlan:
    """What a request that is answered by voice needs beside its thinker prompt."""

    talker: ArStageClient
    code2wav: DiffusionStageClient
    talker_prompt: TalkerPrompt
    talker_params: StageSampling
    talker_stop_ids: tuple[int, ...]
    codes_per_output: int
    """The talker's tokens are wanted in blocks of this many; windows end where a block does."""
    codec_edge: CodecEdge
    scheduler: SpeechScheduler
    num_boundary_rows: int
    """Rows between the thinker's prompt and the first generated row."""
    outbox: FeedOutbox
    """Takes feeds for the talker."""
    drop_block: Callable[[SharedBlock], None]
    """Ends a reference to shared memory that will not be fed any more."""


class Talk:
    """`run` speaks what `rows` is given, until `end_text` has said how much that is."""

    def __init__(
        self,
        request_id: str,
        plan: SpeechPlan,
        *,
        is_limited: bool,
        clock: StageClock,
        emit: Callable[[OmniEvent], None],
    ) -> None:
        """With `is_limited`, only what `rows.allow` permits is spoken."""
        self._request_id = request_id
        self._plan = plan
        self._clock = clock
        self._emit = emit
        self.rows = RowFeeder(
            plan.outbox,
            plan.drop_block,
            num_first_rows=plan.talker_prompt.num_replaced + plan.num_boundary_rows,
            is_limited=is_limited,
        )
        self._speech = SpeechStream(
            request_id,
            code2wav=plan.code2wav,
            edge=plan.codec_edge,
            scheduler=plan.scheduler,
            clock=clock,
            emit=self._emit_audio,
        )
        self._listening: asyncio.Task[None] | None = None
        self.num_codes = 0
        """Codec tokens that became sound."""
        self.finish_reason: FinishReason | None = None
        """Why the talker ended; None before that, and if there was nothing to speak."""

    async def run(self) -> None:
        """Raises a group of `OmniError`. Ended in any way, it has released the request in the talker and in code2wav;
        `close` must follow."""
        async with asyncio.TaskGroup() as group:
            self._listening = group.create_task(self._listen())
            group.create_task(self._speech.run())

    def end_text(self, num_tokens: int) -> None:
        """So many tokens are to be spoken in all; their rows have come, and `run` has begun."""
        if num_tokens >= 1:
            self.rows.finish(num_tokens)
            return
        # Without the row of a token the talker has not begun, and will not.
        assert self._listening is not None
        self._listening.cancel()
        self._speech.finish()

    def close(self) -> None:
        """Rows that have not been handed on, or come later, are dropped. Harmless when already closed."""
        self.rows.close()

    async def _listen(self) -> None:
        async with self._plan.talker.life.needed():
            await self._speak()
        self._speech.finish()

    async def _speak(self) -> None:
        plan = self._plan
        await self.rows.has_rows.wait()
        stream = await plan.talker.open(
            self._request_id,
            plan.talker_prompt.token_ids,
            plan.talker_params,
            tokens_per_output=plan.codes_per_output,
        )
        try:
            self._clock.talker()
            self.rows.connect(stream.engine_id)
            async with aclosing(stream.outputs()) as outputs:
                async for output in outputs:
                    self._take(output)
        finally:
            self.rows.close()
            await stream.close()

    def _take(self, output: ArOutput) -> None:
        codes = output.token_ids
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            if output.finish_reason == "stop" and codes and codes[-1] in self._plan.talker_stop_ids:
                codes = codes[:-1]
        if codes:
            self._clock.codes()
            self.num_codes += len(codes)
            self._emit(CodecDelta(codes))
            self._speech.push(codes)

    def _emit_audio(self, delta: AudioDelta) -> None:
        self._clock.audio()
        self._emit(delta)
