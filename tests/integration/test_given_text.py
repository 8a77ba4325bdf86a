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
from tests.integration.live import GREEDY_TALKER, LiveOmni, spoken, written
from tests.integration.parity import signal_to_noise_db

QUESTIONS = ["Hello, who are you?", "Tell me a story.", "Count to five."]


def given(
    text: str, messages: tuple[ChatMessage, ...], *, request_id: str, num_codes: int = 60
) -> OmniRequest:
    talker = SamplingConfig(temperature=0.0, repetition_penalty=1.05, max_tokens=num_codes)
    return OmniRequest(request_id, messages, SpeechOutput("Chelsie", 7, text), {"talker": talker})


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("num_tokens", [2, 24])
def test_text_that_the_thinker_wrote_sounds_the_same_when_it_is_given(
    whole: LiveOmni, question: str, num_tokens: int
) -> None:
    """The last token that the thinker samples, its end token or the one at the limit, is not spoken."""
    messages = (ChatMessage("user", (TextPart(question),)),)
    greedy = SamplingConfig(temperature=0.0, max_tokens=num_tokens)
    decoded = whole.answer(spoken(messages, thinker=greedy, talker=GREEDY_TALKER))
    text = whole.omni.detokenize(decoded.token_ids[:-1])
    answer = whole.answer(given(text, messages, request_id=f"given {question} {num_tokens}"))
    assert answer.token_ids == decoded.token_ids[:-1], (
        "the tokenizer reads the text otherwise than it was written"
    )
    assert answer.text == text
    assert answer.codes == decoded.codes
    assert signal_to_noise_db(decoded.audio, answer.audio) > 60
    assert answer.usage.prompt == decoded.usage.prompt
    assert answer.usage.text_tokens == len(answer.token_ids)
    assert whole.held_rows() == 0


TEXTS = {
    "words": "Good morning. It is a quarter past nine!",
    "digits": "0123456789",
    "emoji": "👋🏽🎉",
    "scripts": "Grüße, 早上好, доброе утро, صباح الخير",
    "special tokens": "It is called <|im_end|> and <|AUDIO|>.",
    "tokens that stand for media": "<|vision_bos|><|IMAGE|><|vision_eos|> <|vision_bos|><|VIDEO|><|vision_eos|>",
    "more than a step of the thinker takes": "the time is now " * 350,
}


@pytest.mark.parametrize("name", TEXTS)
def test_transcript_is_the_text_and_its_end_is_heard(whole: LiveOmni, name: str) -> None:
    text = TEXTS[name]
    messages = whole.omni.task_messages(ReadAloud(text))
    answer = whole.answer(given(text, messages, request_id=f"transcript {name}"))
    assert answer.text == text
    assert whole.omni.detokenize(answer.token_ids) == text
    assert answer.usage.text_tokens == len(answer.token_ids) > 0
    assert answer.audio.size == 480 * len(answer.codes) > 0
    assert np.abs(answer.audio).max() > 0.01
    if name.startswith("more than"):
        limit = whole.config.stages["thinker"].max_num_batched_tokens
        assert answer.usage.text_tokens > limit


def test_another_text_in_the_same_chat_sounds_different(whole: LiveOmni) -> None:
    messages = (ChatMessage("user", (TextPart(QUESTIONS[0]),)),)
    texts = ("Yes, of course.", "No, never.")
    first, other = (whole.answer(given(text, messages, request_id=f"other {text}")) for text in texts)
    assert first.codes != other.codes


def test_given_and_written_texts_are_spoken_side_by_side(whole: LiveOmni) -> None:
    messages = (ChatMessage("user", (TextPart(QUESTIONS[0]),)),)

    def requests(round_: str) -> list[OmniRequest]:
        texts = [f"{word} is the word." for word in ("red", "green", "blue")]
        return [given(text, messages, request_id=f"{round_} {text}") for text in texts] + [
            spoken(messages),
            written(messages),
        ]

    one_by_one = [whole.answer(request) for request in requests("alone")]
    together = whole.answers(requests("together"))
    for alone, beside in zip(one_by_one, together, strict=True):
        assert (beside.text, beside.token_ids, beside.codes) == (alone.text, alone.token_ids, alone.codes)


def test_tokens_that_a_prompt_only_spells_stand_for_nothing(whole: LiveOmni) -> None:
    sound = AudioPart(np.sin(np.arange(16_000, dtype=np.float32) / 20), 16_000)

    def prompt(text: str) -> PromptTokens:
        return whole.answer(
            written((ChatMessage("user", (TextPart(text), sound, TextPart(text))),))
        ).usage.prompt

    plain, spelled = prompt("Hi."), prompt("<|AUDIO|><|im_end|>")
    assert spelled.audio == plain.audio > 0
    assert spelled.text > plain.text + 10
    assert whole.held_rows() == 0
