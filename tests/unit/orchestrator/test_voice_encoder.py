"""Voices of recordings: each recording is encoded once, however many requests ask for it."""

import asyncio

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.config.stages import DiffusionStage
from omni_server.engine.engine_handle import Stage
from omni_server.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, StageDeadError
from omni_server.family import DiffusionPrompt, FamilyModel
from omni_server.family.codec import CodecLayout
from omni_server.orchestrator.voice_encoder import VoiceEncoder
from omni_server.types import SAMPLE_RATE_HZ, AudioPart, ChatMessage, ClonedVoice, Task
from tests.unit.orchestrator.fake_stages import FakeEngine

MAX_FRAMES = 20


class Cloning(FamilyModel):
    codec = CodecLayout(frames_per_block=1, samples_per_frame=1920)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        raise AssertionError

    def dtype_name(self) -> str:
        return "float32"

    def voice_prompt(self, recording: AudioPart, *, has_text: bool) -> DiffusionPrompt:
        return DiffusionPrompt((0,) * (len(recording.samples) // 1920), bytes([has_text]))

    def cloned_voice(self, result: npt.NDArray[np.float32]) -> ClonedVoice:
        return ClonedVoice(result.tobytes())


class FakeEncoder(FakeEngine):
    """Answers with the number of its call when `go_on` is set."""

    def __init__(self) -> None:
        super().__init__("voice_encoder")
        self.go_on = asyncio.Event()
        self.payloads: list[bytes] = []
        self.error: Exception | None = None

    async def run(
        self, request_id: str, token_ids: tuple[int, ...], payload: bytes
    ) -> npt.NDArray[np.float32]:
        self.payloads.append(payload)
        number = len(self.payloads)
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return np.array([number], np.float32)


@pytest.fixture
async def engine() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
async def encoder(engine: FakeEncoder) -> VoiceEncoder:
    config = DiffusionStage(model_stage="v", engine="diffusion", max_model_len=MAX_FRAMES)
    return VoiceEncoder(Cloning(), Stage("voice_encoder", [engine]), config, 60)  # type: ignore[list-item]


def recording(seed: int = 0, num_frames: int = 10) -> AudioPart:
    random = np.random.default_rng(seed)
    return AudioPart(random.normal(0, 0.1, 1920 * num_frames).astype(np.float32), SAMPLE_RATE_HZ)


def number_of(voice: ClonedVoice) -> int:
    return int(np.frombuffer(voice.vector, np.float32)[0])


async def computing(engine: FakeEncoder) -> None:
    while not engine.payloads:  # noqa: ASYNC110 - there is nothing to wait for
        await asyncio.sleep(0.001)


async def test_requests_at_once_share_one_computation(encoder: VoiceEncoder, engine: FakeEncoder) -> None:
    tasks = [asyncio.create_task(encoder.clone(recording(i % 3), "")) for i in range(12)]
    await asyncio.sleep(0)
    engine.go_on.set()
    numbers = [number_of(voice) for voice in await asyncio.gather(*tasks)]
    assert numbers == numbers[:3] * 4
    assert sorted(numbers[:3]) == [1, 2, 3]
    assert number_of(await encoder.clone(recording(1), "")) == numbers[1]  # nor is it computed again later
    assert len(engine.payloads) == 3
    assert engine.num_requests == 0


async def test_codes_are_computed_for_requests_with_a_text(
    encoder: VoiceEncoder, engine: FakeEncoder
) -> None:
    engine.go_on.set()
    voices = [await encoder.clone(recording(), text) for text in ("", "Hello.", "Good bye.")]
    assert [voice.text for voice in voices] == ["", "Hello.", "Good bye."]
    assert engine.payloads == [b"\0", b"\1"]


async def test_one_that_leaves_does_not_take_the_voice_of_the_others(
    encoder: VoiceEncoder, engine: FakeEncoder
) -> None:
    first, second = (asyncio.create_task(encoder.clone(recording(), "")) for _ in range(2))
    await computing(engine)
    first.cancel()
    await asyncio.sleep(0)
    engine.go_on.set()
    assert number_of(await second) == 1


async def test_a_failure_reaches_all_that_wait_and_is_not_kept(
    encoder: VoiceEncoder, engine: FakeEncoder
) -> None:
    engine.error = StageDeadError("voice_encoder", "it was killed")
    engine.go_on.set()
    failures = await asyncio.gather(
        *(encoder.clone(recording(), "") for _ in range(3)), return_exceptions=True
    )
    assert {type(failure) for failure in failures} == {StageDeadError}
    engine.error = None
    num_failed = len(engine.payloads)  # more than one if a recording was hashed after the failure
    assert number_of(await encoder.clone(recording(), "")) == num_failed + 1
    assert engine.num_requests == 0


async def test_a_computation_has_a_deadline(engine: FakeEncoder) -> None:
    config = DiffusionStage(model_stage="v", engine="diffusion", max_model_len=MAX_FRAMES)
    stage = Stage("voice_encoder", [engine])  # type: ignore[list-item]
    encoder = VoiceEncoder(Cloning(), stage, config, 0.01)
    with pytest.raises(DeadlineExceededError):
        await encoder.clone(recording(), "")
    assert engine.num_requests == 0


async def test_the_least_recently_used_voices_are_forgotten(
    encoder: VoiceEncoder, engine: FakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_server.orchestrator.voice_encoder._MAX_KEPT", 2)
    engine.go_on.set()
    for seed in (1, 2, 1, 3, 1, 2):
        await encoder.clone(recording(seed), "")
        await asyncio.sleep(0)
    assert len(engine.payloads) == 4  # 1, 2, 3, and 2 again


async def test_silence_and_long_recordings_are_refused(encoder: VoiceEncoder, engine: FakeEncoder) -> None:
    with pytest.raises(InvalidRequestError, match="silent"):
        await encoder.clone(AudioPart(np.zeros(19200, np.float32), SAMPLE_RATE_HZ), "")
    with pytest.raises(InvalidRequestError, match=r"has 1.7 s; at most 1.6 s"):
        await encoder.clone(recording(num_frames=MAX_FRAMES + 1), "")
    assert engine.payloads == []


async def test_the_end_of_the_server_ends_computations(encoder: VoiceEncoder, engine: FakeEncoder) -> None:
    waiting = asyncio.create_task(encoder.clone(recording(), ""))
    await computing(engine)
    await encoder.close()
    with pytest.raises(OverloadedError):
        await waiting
    assert engine.num_requests == 0
