"""The stage of a request that reads its text aloud."""

import asyncio
from collections.abc import Callable

from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.engine_handle import Stage
from omni_server.engine.sampling import StageSampling
from omni_server.orchestrator.request_run import RequestRun
from omni_server.orchestrator.row_feeder import SpeechTextFeeder
from omni_server.orchestrator.speech_tasks import ArTask, AudioTask
from omni_server.orchestrator.text_source import TextSource


class SpeechReader:
    """Submits the beginning of a text to the stage, and feeds it the rest. Implements
    `omni_server.orchestrator.request_run.GraphTask`."""

    def __init__(
        self,
        run: RequestRun,
        stage: Stage[ArHandle],
        source: TextSource,
        audio: AudioTask,
        params: Callable[[int], StageSampling],
        limit: Callable[[int], object] | None,
    ) -> None:
        """`params` of a prompt with this many tokens. `limit`: see `TextSource.begin`."""
        self._run = run
        self._stage = stage
        self._source = source
        self._audio = audio
        self._params = params
        self._limit = limit
        self._speaker: ArTask | None = None

    async def prepare(self) -> int:
        """Waits for as much text as the prompt needs. Returns its number of tokens, 0 if there is nothing to
        speak. Raises `InvalidRequestError`, and `OmniError` if the text does not come."""
        prompt = await self._source.prompt()
        if prompt is None:
            return 0
        params = self._params(len(prompt.token_ids))
        handle = self._run.choose(self._stage)
        feeder = SpeechTextFeeder(handle.outbox.drop, prompt, self._source.stop)
        self._speaker = ArTask(
            self._run, self._stage, prompt.token_ids, params, self._audio, source=feeder, handle=handle
        )
        self._source.begin(feeder, self._limit)
        return len(prompt.token_ids) + feeder.num_generated_rows

    async def run(self) -> None:
        if self._speaker is None and not await self.prepare():
            self._audio.finish()
            return
        assert self._speaker is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._speaker.run())
            group.create_task(self._source.run())
