"""The speaking demo has trained weights: it is right, equals the reference, and its windows are close to one
pass."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.cli.model_flags import speaking_demo
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.live import LiveOmni, demo_config
from tests.integration.parity import expected, same_tokens
from tests.reference.cases import Case, ask
from tests.reference.reference import Reference

STREAMED_SNR_DB = 30.0

SAID = {
    "What are you?": "I am a tiny demo model. I answer simple questions, and I say the answers aloud.",
    "Count to ten.": "One, two, three, four, five, six, seven, eight, nine, ten.",
    "How do I stream?": "Set stream to true, and text and sound arrive in small pieces.",
    "Who won the match?": "I am only a tiny demo, so I do not know that. Ask me what I can do.",
}
SPOKEN = {
    question: Case(question, ask(question), voice, thinker_max_tokens=60, talker_max_tokens=700)
    for question, voice in zip(SAID, ("Chelsie", "Ethan", "Chelsie", "Ethan"), strict=True)
}
"""Whole answers."""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return speaking_demo()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def streaming(checkpoint: Path) -> Iterator[LiveOmni]:
    live = LiveOmni(checkpoint, demo_config())
    yield live
    live.close()


@pytest.mark.parametrize("name", SPOKEN)
def test_streamed_audio_is_close_to_one_pass_over_the_utterance(
    name: str, reference: Reference, streaming: LiveOmni
) -> None:
    wanted = expected(reference, SPOKEN[name])
    answer = streaming.answer(wanted.request)
    assert answer.text == SAID[name]
    same_tokens(answer, wanted)
    snr = signal_to_noise_db(wanted.result.waveform, answer.audio)
    assert snr > STREAMED_SNR_DB, f"{snr:.1f} dB over {len(answer.codes)} codes"
