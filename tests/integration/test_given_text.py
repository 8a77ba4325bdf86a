"""A text that is given is spoken as if the thinker had written it."""

import numpy as np
import pytest

from omni_server.types import (
    AudioPart,
    ChatMessage,
    OmniRequest,
    PromptTokens,
    ReadAloud,
    SamplingConfig,
    SpeechOutput,
    TextPart,
)
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.conftest import SharedPipelines
from tests.integration.live import LiveOmni, spoken, written
from tests.omni_families import OmniFamily, for_each_family

QUESTIONS = ["Hello, who are you?", "Tell me a story.", "Count to five."]
TALKER = SamplingConfig(temperature=0.0, repetition_penalty=1.05, max_tokens=30)


@pytest.fixture(scope="module")
def live(shared_pipelines: SharedPipelines, family: OmniFamily) -> LiveOmni:
    return shared_pipelines.of(family)


def given(text: str, messages: tuple[ChatMessage, ...], *, request_id: str) -> OmniRequest:
    return OmniRequest(request_id, messages, SpeechOutput("Chelsie", 7, text), {"talker": TALKER})


@for_each_family
@pytest.mark.parametrize(("question", "num_tokens"), [*zip(QUESTIONS, (2, 24, 24), strict=True)])
def test_text_that_the_thinker_wrote_sounds_the_same_when_it_is_given(
    family: OmniFamily, live: LiveOmni, question: str, num_tokens: int
) -> None:
    """The thinker's end token is not spoken, and the last token before its limit in one of the families."""
    messages = (ChatMessage("user", (TextPart(question),)),)
    greedy = SamplingConfig(temperature=0.0, max_tokens=num_tokens)
    decoded = live.answer(spoken(messages, thinker=greedy, talker=TALKER))
    is_whole = family.speaks_last_token and len(decoded.token_ids) == num_tokens
    said = decoded.token_ids if is_whole else decoded.token_ids[:-1]
    text = live.omni.detokenize(said)
    answer = live.answer(given(text, messages, request_id=f"given {question} {num_tokens}"))
    assert answer.token_ids == said, "the tokenizer reads the text otherwise than it was written"
    assert answer.text == text
    assert answer.codes == decoded.codes
    assert signal_to_noise_db(decoded.audio, answer.audio) > 60
    assert answer.usage.prompt == decoded.usage.prompt
    assert answer.usage.text_tokens == len(answer.token_ids)
    assert live.held_rows() == 0


TEXTS = {
    "words": "Good morning. It is a quarter past nine!",
    "digits": "0123456789",
    "emoji": "👋🏽🎉",
    "scripts": "Grüße, 早上好, доброе утро, صباح الخير",
    "special tokens": "It is called <|im_end|> and <|AUDIO|> or <|audio_pad|>.",
    "tokens that stand for media": "<|vision_bos|><|IMAGE|><|vision_eos|> <|vision_start|><|video_pad|><|vision_end|>",
    "more than a step of the thinker takes": "the time is now " * 350,
}


@for_each_family
@pytest.mark.parametrize("name", TEXTS)
def test_transcript_is_the_text_and_its_end_is_heard(family: OmniFamily, live: LiveOmni, name: str) -> None:
    text = TEXTS[name]
    messages = live.omni.task_messages(ReadAloud(text))
    answer = live.answer(given(text, messages, request_id=f"transcript {name}"))
    assert answer.text == text
    assert live.omni.detokenize(answer.token_ids) == text
    assert answer.usage.text_tokens == len(answer.token_ids) > 0
    assert answer.audio.size == family.num_samples(answer.usage.codec_tokens) > 0
    assert np.abs(answer.audio).max() > 0.01
    if name.startswith("more than"):
        limit = live.config.stages["thinker"].max_num_batched_tokens
        assert answer.usage.text_tokens > limit


@for_each_family
def test_another_text_in_the_same_chat_sounds_different(live: LiveOmni) -> None:
    messages = (ChatMessage("user", (TextPart(QUESTIONS[0]),)),)
    texts = ("Yes, of course.", "No, never.")
    first, other = (live.answer(given(text, messages, request_id=f"other {text}")) for text in texts)
    assert first.codes != other.codes


@for_each_family
def test_given_and_written_texts_are_spoken_side_by_side(live: LiveOmni) -> None:
    messages = (ChatMessage("user", (TextPart(QUESTIONS[0]),)),)

    def requests(round_: str) -> list[OmniRequest]:
        texts = [f"{word} is the word." for word in ("red", "green", "blue")]
        return [given(text, messages, request_id=f"{round_} {text}") for text in texts] + [
            spoken(messages, talker=TALKER),
            written(messages),
        ]

    one_by_one = [live.answer(request) for request in requests("alone")]
    together = live.answers(requests("together"))
    for alone, beside in zip(one_by_one, together, strict=True):
        assert (beside.text, beside.token_ids, beside.codes) == (alone.text, alone.token_ids, alone.codes)


@for_each_family
def test_tokens_that_a_prompt_only_spells_stand_for_nothing(live: LiveOmni) -> None:
    sound = AudioPart(np.sin(np.arange(16_000, dtype=np.float32) / 20), 16_000)

    def prompt(text: str) -> PromptTokens:
        return live.answer(
            written((ChatMessage("user", (TextPart(text), sound, TextPart(text))),))
        ).usage.prompt

    plain, spelled = prompt("Hi."), prompt("<|AUDIO|><|audio_pad|><|im_end|>")
    assert spelled.audio == plain.audio > 0
    assert spelled.text > plain.text + 10
    assert live.held_rows() == 0
