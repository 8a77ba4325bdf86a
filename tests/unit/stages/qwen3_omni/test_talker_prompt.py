"""The talker's prompt is the one that transformers makes of the same chat.

The reference's own `generate` runs up to the talker, between stand-ins for the parts that have weights: text
projections, embeddings and hidden states are numbers that tell where they come from.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from omni_server.errors import ConfigError
from omni_server.family import MEDIA_ROW, EmbeddingsPrompt
from stages.qwen3_omni.ids import SpecialIds, SpeechIds
from stages.qwen3_omni.talker_prompt import talker_prompt

IM_START, IM_END, SYSTEM, USER, ASSISTANT, NEWLINE, END = 50, 51, 52, 53, 54, 55, 51
AUDIO, IMAGE, VIDEO = 61, 62, 63
IDS = SpecialIds(
    im_start=IM_START,
    im_end=IM_END,
    user=USER,
    assistant=ASSISTANT,
    audio_placeholder=AUDIO,
    image_placeholder=IMAGE,
    video_placeholder=VIDEO,
    speech=SpeechIds(
        tts_pad=71,
        tts_bos=72,
        tts_eos=73,
        codec_pad=2148,
        codec_bos=2149,
        codec_eos=2150,
        codec_nothink=2155,
        codec_think_bos=2156,
        codec_think_eos=2157,
        speakers={"ethan": 2302, "chelsie": 2301},
    ),
)
ACCEPT = 2
WIDTH = 3


def embedded(token_ids: torch.Tensor) -> torch.Tensor:
    """Of text: 1000 and the id."""
    return (1000.0 + token_ids)[..., None].repeat_interleave(WIDTH, -1)


def hidden_states(first: int, count: int) -> torch.Tensor:
    """Of the layer that the talker sees: the position, negative."""
    return -(1.0 + torch.arange(first, first + count))[None, :, None].repeat(1, 1, WIDTH)


def coded(token_ids: torch.Tensor) -> torch.Tensor:
    """Of codec ids: millions."""
    return (1e6 * token_ids)[..., None].repeat_interleave(WIDTH, -1)


class Seen(Exception):
    """What the talker was given."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.embeds: torch.Tensor = given["inputs_embeds"][0]
        self.trailing: torch.Tensor = given["trailing_text_hidden"][0]
        self.pad: torch.Tensor = given["tts_pad_embed"][0, 0]


class Thinker:
    device = torch.device("cpu")

    def __init__(self, reply: Sequence[int]) -> None:
        self._reply = reply

    def get_input_embeddings(self) -> Any:
        return embedded

    def generate(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """As transformers returns it: a step for the prompt, then one for each token but the last."""
        sequences = torch.cat([input_ids, torch.tensor([list(self._reply)])], 1)
        length = input_ids.shape[1]
        parts = [(0, length), *[(length + index, 1) for index in range(len(self._reply) - 1)]]
        steps = tuple(
            (embedded(sequences[:, first : first + count]), *[hidden_states(first, count)] * ACCEPT)
            for first, count in parts
        )
        return SimpleNamespace(sequences=sequences, hidden_states=steps)


class Talker:
    dtype = torch.float32

    @staticmethod
    def text_projection(embeds: torch.Tensor) -> torch.Tensor:
        return embeds

    @staticmethod
    def hidden_projection(hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden

    def get_input_embeddings(self) -> Any:
        return coded

    def generate(self, **given: Any) -> None:
        raise Seen(given)


def reference(source_ids: Sequence[int], reply: Sequence[int], voice: str) -> Seen:
    speech = IDS.speech
    assert speech is not None
    model: Any = Qwen3OmniMoeForConditionalGeneration.__new__(Qwen3OmniMoeForConditionalGeneration)
    torch.nn.Module.__init__(model)
    config = Qwen3OmniMoeConfig(
        im_start_token_id=IM_START,
        im_end_token_id=IM_END,
        user_token_id=USER,
        assistant_token_id=ASSISTANT,
        system_token_id=SYSTEM,
        tts_pad_token_id=speech.tts_pad,
        tts_bos_token_id=speech.tts_bos,
        tts_eos_token_id=speech.tts_eos,
        thinker_config={"audio_token_id": AUDIO, "image_token_id": IMAGE, "video_token_id": VIDEO},
        talker_config={
            "accept_hidden_layer": ACCEPT,
            "codec_nothink_id": speech.codec_nothink,
            "codec_think_bos_id": speech.codec_think_bos,
            "codec_think_eos_id": speech.codec_think_eos,
            "codec_pad_id": speech.codec_pad,
            "codec_bos_id": speech.codec_bos,
            "codec_eos_token_id": speech.codec_eos,
            "speaker_id": dict(speech.speakers),
            "text_config": {"hidden_size": WIDTH, "vocab_size": 3072},
            "spatial_merge_size": 2,
        },
    )
    vars(model).update(config=config, has_talker=True, thinker=Thinker(reply), talker=Talker())
    with pytest.raises(Seen) as seen:
        model.generate(input_ids=torch.tensor([list(source_ids)]), speaker=voice, thinker_eos_token_id=END)
    return seen.value


def rows_of(prompt: EmbeddingsPrompt) -> torch.Tensor:
    """The rows of the prompt as the talker makes them, `[len(row_ids), WIDTH]`."""
    text = prompt.text
    assert text is not None
    rows = embedded(torch.tensor(text.row_ids))
    for span in text.spans:
        if span.has_rows:
            own = 2 * hidden_states(span.source_first, span.count)[0]
            rows[span.target_first : span.target_first + span.count] = own
    return rows


def turn(role: int, *token_ids: int) -> list[int]:
    return [IM_START, role, NEWLINE, *token_ids, IM_END, NEWLINE]


BEGUN = [IM_START, ASSISTANT, NEWLINE]
CHATS = {
    "text": [*turn(USER, 1, 2, 3), *BEGUN],
    "a system prompt": [*turn(SYSTEM, 9, 9), *turn(USER, 1, 2, 3), *BEGUN],
    "media": [*turn(SYSTEM, 9), *turn(USER, 5, AUDIO, AUDIO, 6, IMAGE, VIDEO, VIDEO, 7), *BEGUN],
    "media without text": [*turn(USER, *[VIDEO] * 9), *BEGUN],
    "several turns": [
        *turn(SYSTEM, 9),
        *turn(USER, IMAGE, IMAGE, 1),
        *turn(ASSISTANT, 2, 3),
        *turn(USER, 4, AUDIO),
        *turn(ASSISTANT),
        *turn(USER, 5, 6),
        *BEGUN,
    ],
    "two turns of the user": [*turn(USER, 1, IMAGE), *turn(USER, IMAGE, 2), *BEGUN],
    "media of others": [
        *turn(SYSTEM, IMAGE),
        *turn(USER, 1),
        *turn(ASSISTANT, AUDIO),
        *turn(USER, 2),
        *BEGUN,
    ],
}


@pytest.mark.parametrize("voice", ["ethan", "chelsie"])
@pytest.mark.parametrize("reply", [[31, END], [31, 32, END], [31, 32, 33, 34, END]])
@pytest.mark.parametrize("name", list(CHATS))
def test_the_prompt_is_the_references(name: str, reply: list[int], voice: str) -> None:
    source = CHATS[name]
    seen = reference(source, reply, voice)
    prompt = talker_prompt(IDS, source, voice)
    assert prompt.text is not None
    spoken = reply[:-1]
    rows = torch.cat([rows_of(prompt), embedded(torch.tensor([*spoken, *prompt.text.tail_ids]))])
    length = len(prompt.token_ids)
    embeds = rows[:length].clone()
    embeds[prompt.num_replaced :] += coded(torch.tensor(prompt.token_ids[prompt.num_replaced :]))
    assert torch.equal(embeds, seen.embeds)
    assert torch.equal(rows[length:-1], seen.trailing)
    assert torch.equal(rows[-1], seen.pad)


@pytest.mark.parametrize("name", list(CHATS))
def test_the_prompts_own_ids_are_never_sampled(name: str) -> None:
    """The reference applies its repetition penalty to generated codes only, which are below 2048."""
    prompt = talker_prompt(IDS, CHATS[name], "ethan")
    assert prompt.text is not None
    assert min(prompt.token_ids) >= 2048
    assert len(prompt.text.row_ids) == len(prompt.token_ids) - 1


def test_media_rows_are_where_spans_have_rows() -> None:
    text = talker_prompt(IDS, CHATS["several turns"], "ethan").text
    assert text is not None
    assert text.has_media
    in_spans = {
        position
        for span in text.spans
        if span.has_rows
        for position in range(span.target_first, span.target_first + span.count)
    }
    assert in_spans == {position for position, row in enumerate(text.row_ids) if row == MEDIA_ROW}
    assert all(span.count > 0 for span in text.spans)


@pytest.mark.parametrize("name", ["text", "a system prompt", "media of others"])
def test_a_chat_whose_user_sends_text_only_needs_no_rows(name: str) -> None:
    text = talker_prompt(IDS, CHATS[name], "ethan").text
    assert text is not None
    assert not text.has_media


def test_a_chat_without_the_user_has_a_prompt_too() -> None:
    prompt = talker_prompt(IDS, [*turn(SYSTEM, 9), *BEGUN], "ethan")
    assert prompt.num_replaced == 3
    assert prompt.text is not None
    assert prompt.text.row_ids == (*BEGUN, 71, 71, 71, 71, 72)
    assert prompt.text.spans == ()


@pytest.mark.parametrize("source", [[], [IM_START], turn(USER, 1), [*turn(USER, 1), *BEGUN, 5]])
def test_a_prompt_that_ends_otherwise_is_refused(source: list[int]) -> None:
    with pytest.raises(ConfigError, match="does not end where the assistant's turn begins"):
        talker_prompt(IDS, source, "ethan")


def test_a_checkpoint_without_a_talker_has_no_prompt() -> None:
    ids = SpecialIds(IM_START, IM_END, USER, ASSISTANT, AUDIO, IMAGE, VIDEO, speech=None)
    with pytest.raises(ConfigError, match="no talker"):
        talker_prompt(ids, CHATS["text"], "ethan")
