"""Makes voices of recordings, each recording once."""

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from dataclasses import replace

import numpy as np

from omni_server.config.stages import CommonStage
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from omni_server.family import FamilyModel
from omni_server.types import AudioPart, ClonedVoice

_MAX_KEPT = 256
"""Voices in memory, each of about 30 kB."""
_SILENCE = 1e-3

_Key = tuple[bytes, bool]
"""Hash of the recording, and whether its codes are wanted."""


class VoiceEncoder:
    def __init__(
        self, family: FamilyModel, stage: Stage[DiffusionHandle], config: CommonStage, timeout_s: float
    ) -> None:
        self._family = family
        self._stage = stage
        assert family.codec is not None
        self._longest_s = family.codec.first_sample(config.max_model_len) / family.codec.sample_rate_hz
        self._timeout_s = timeout_s
        self._voices: OrderedDict[_Key, asyncio.Task[ClonedVoice]] = OrderedDict()
        """Finished or in flight; the last used last."""

    async def clone(self, recording: AudioPart, text: str) -> ClonedVoice:
        """See `Generator.clone_voice`."""
        seconds = len(recording.samples) / recording.sample_rate_hz
        if seconds > self._longest_s:
            raise InvalidRequestError(
                f"the recording has {seconds:.1f} s; at most {self._longest_s:.3g} s can be cloned"
            )
        if np.abs(recording.samples).max(initial=0.0) < _SILENCE:
            raise InvalidRequestError("the recording is silent")
        digest = await asyncio.to_thread(lambda: hashlib.sha256(recording.samples.tobytes()).digest())
        key = (digest, bool(text))
        task = self._voices.get(key)
        if task is None:
            task = self._voices[key] = asyncio.create_task(self._encode(recording, has_text=bool(text)))
            task.add_done_callback(lambda task: self._keep(key, task))
        self._voices.move_to_end(key)
        try:
            voice = await asyncio.shield(task)  # others may wait for it, too
        except asyncio.CancelledError:
            if task.cancelled():
                raise OverloadedError("the server is shutting down", code="server_shutting_down") from None
            raise
        return replace(voice, text=text)

    def _keep(self, key: _Key, task: "asyncio.Task[ClonedVoice]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._voices.pop(key, None)
        finished = [key for key, task in self._voices.items() if task.done()]
        for oldest in finished[: max(0, len(finished) - _MAX_KEPT)]:
            del self._voices[oldest]

    async def _encode(self, recording: AudioPart, *, has_text: bool) -> ClonedVoice:
        prompt = await asyncio.to_thread(self._family.voice_prompt, recording, has_text=has_text)
        handle = self._stage.choose()
        try:
            async with asyncio.timeout(self._timeout_s), handle.life.needed():
                result = await handle.run(f"voice-{uuid.uuid4().hex}", prompt.token_ids, prompt.payload)
        except TimeoutError:
            raise DeadlineExceededError(
                f"encoding the voice took longer than {self._timeout_s:g} s"
            ) from None
        finally:
            handle.leave()
        return self._family.cloned_voice(result)

    async def close(self) -> None:
        tasks = [task for task in self._voices.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
