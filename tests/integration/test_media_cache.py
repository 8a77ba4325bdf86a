"""Media reach the thinker whole, whatever became of earlier requests with the same media."""

import asyncio

import numpy as np
import pytest

from omni_server.errors import InvalidRequestError
from omni_server.offline import OmniOutput, collect
from omni_server.types import AudioPart, ChatMessage, ImagePart, SamplingConfig
from omni_server.verify.cases import rising_tone
from tests.integration.live import LiveOmni, spoken, written
from tests.reference.cases import CASES, ask
from tests.reference.synthetic_media import heard, sliding_tiles


def noisy_picture(seed: int) -> tuple[ChatMessage, ...]:
    """A question about a picture that no other test shows."""
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    return ask("What is this?", ImagePart(pixels))


def test_a_refused_request_does_not_spoil_the_next_with_the_same_picture(whole: LiveOmni) -> None:
    messages = CASES["image"].messages
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        whole.answer(written(messages, thinker=SamplingConfig(max_tokens=10**6)))
    assert whole.answer(written(messages)).token_ids


@pytest.mark.parametrize("after_ms", range(0, 12, 3))
def test_a_client_that_leaves_at_any_moment_spoils_no_request_beside_or_behind_it(
    whole: LiveOmni, after_ms: int
) -> None:
    messages = noisy_picture(after_ms)

    async def one_leaves() -> OmniOutput:
        leaving = asyncio.create_task(whole.omni.submit(written(messages), lambda _: None))
        staying = asyncio.create_task(collect(whole.omni, written(messages)))
        for _ in range(after_ms):
            await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.wait([leaving])
        if not leaving.cancelled():  # it was admitted before it left
            await leaving.result().aclose()
        return await staying

    assert whole.run(one_leaves()).token_ids
    assert whole.answer(written(messages)).token_ids


def test_a_client_that_leaves_right_after_admission_does_not_spoil_the_next_request(whole: LiveOmni) -> None:
    messages = CASES["speech"].messages

    async def leave() -> None:
        await (await whole.omni.submit(written(messages), lambda _: None)).aclose()

    whole.run(leave())
    assert whole.answer(written(messages)).token_ids


def test_the_same_frames_with_other_audio_are_another_video(whole: LiveOmni) -> None:
    """To the prefix cache and to that of prepared media, though both prompts have the same ids."""

    def num_cached(track: AudioPart) -> int:
        messages = ask(heard(sliding_tiles(4, 56, 84), track), "What is this?")
        return whole.answer(written(messages)).usage.prompt.cached

    first, second = rising_tone(2.1, 300), rising_tone(2.1, 900)
    without_video = num_cached(first)
    assert num_cached(first) > without_video + 100
    assert num_cached(second) <= without_video + 32  # a block that ends before the video


def test_a_spoken_answers_prompt_of_text_is_taken_from_the_prefix_cache(qwen3_live: LiveOmni) -> None:
    """The talker needs no rows of text."""
    request = ask("hello world how are you today " * 12)
    first, again = (qwen3_live.answer(spoken(request)).usage.prompt.cached for _ in range(2))
    assert first < again
