"""Requests whose answers of Qwen3-Omni's reference and of this project's engines are compared."""

from omni_server.types import ChatMessage, ContentPart
from omni_server.verify.cases import rising_tone
from tests.reference.cases import Case, drawing, recording, say
from tests.reference.synthetic_media import heard, sliding_tiles, tiles


def _ask(*parts: ContentPart | str) -> tuple[ChatMessage, ...]:
    return (say("user", *parts),)


def _case(
    name: str,
    messages: tuple[ChatMessage, ...],
    voice: str = "Ethan",
    thinker_max_tokens: int = 24,
    talker_max_tokens: int = 32,
    stop_at: int | None = None,
    ignore_eos: bool = False,
) -> Case:
    return Case(name, messages, voice, thinker_max_tokens, talker_max_tokens, stop_at, ignore_eos)


_HELLO = _ask("Hello, how are you today?")
_COUNT = _ask("Count from one to ten.")
_SYSTEM = (
    say("system", "You answer in short sentences."),
    say("user", "Tell me about the river and the sea."),
)
_THREE_TURNS = (
    say("system", "You are a helpful assistant."),
    say("user", "What is a horse?"),
    say("assistant", " a gentle animal, strong and quick."),
    say("user", "And what does it eat?"),
    say("assistant", " grass and apples."),
    say("user", "How old will it be?"),
)
_SPEECH = _ask(recording("speech_hello.wav"))
_SPEECH_AND_TEXT = _ask(recording("speech_count.wav"), "Please answer in one sentence.")
_SPEECH_BEHIND_TEXT = _ask("Hello, this is my question:", recording("speech_weather.wav"))
_TWO_SOUNDS = _ask(rising_tone(1.0, 700), " and then ", rising_tone(0.5, 300))
_IMAGE = _ask(drawing("shapes.png"), "Describe the picture.")
_IMAGES = _ask("Describe this: ", tiles(96, 96, inverted=True), " and also ", tiles(64, 128))
_VIDEO = _ask(sliding_tiles(8, 96, 128), "What happens in the video?")
_MIXED = _ask(
    recording("speech_hello.wav"),
    drawing("gradient.png"),
    sliding_tiles(4, 96, 128),
    "Say it in one sentence.",
)
_HEARD_VIDEO = _ask(heard(sliding_tiles(4, 96, 128), recording("speech_count.wav")), "What is said in it?")
_HEARD_MIXED = _ask(
    rising_tone(0.6, 400),
    drawing("gradient.png"),
    heard(sliding_tiles(4, 64, 96), rising_tone(2.3, 600)),
    recording("speech_hello.wav"),
    "Which of them is louder?",
)
_HEARD_IN_TURNS = (
    say("user", heard(sliding_tiles(4, 64, 96), rising_tone(3.1, 300)), "What is it?"),
    say("assistant", " a red boat"),
    say("user", "And this?", heard(sliding_tiles(4, 96, 64), rising_tone(1.2, 800)), rising_tone(0.5, 500)),
)
_HOUSE = _ask("Tell me about the house.")
_HARBOR = _ask("Tell me about the harbor.")
_MEDIA_IN_TURNS = (
    say("user", drawing("shapes.png"), "Describe the picture."),
    say("assistant", " a red boat"),
    say("user", rising_tone(0.7, 500), "and this?"),
    say("assistant", " a train"),
    say("user", sliding_tiles(4, 64, 96), "and how does that end?"),
)

# Positions of frames sampled at most rates, and of all that follows them, are not whole numbers.
_VIDEO_AT_1_8 = _ask(sliding_tiles(8, 64, 96, 1.8), "What happens in the video?")
_MIXED_AT_1_97 = _ask(
    rising_tone(0.6, 400),
    sliding_tiles(6, 64, 96, 6 / 76 * 25),
    drawing("gradient.png"),
    "Say it in one sentence.",
)
_HEARD_AT_3 = _ask(heard(sliding_tiles(10, 64, 96, 3.0), rising_tone(3.1, 300)), "What is said in it?")
_HEARD_MIXED_AT_1_8 = _ask(
    tiles(64, 64),
    heard(sliding_tiles(4, 64, 96, 1.8), rising_tone(2.3, 600)),
    rising_tone(0.5, 500),
    "Which is louder?",
)
_RATES_IN_TURNS = (
    say("user", sliding_tiles(6, 64, 96, 1.5), "What is it?"),
    say("assistant", " a red boat"),
    say("user", "And this?", sliding_tiles(4, 96, 64, 3.0), rising_tone(0.5, 500)),
    say("assistant", " a train"),
    say("user", "How old will it be?"),
)
# Its columns reach further than its frames and its track in time. The text behind it does not.
_WIDE_HEARD = _ask("Look:", heard(sliding_tiles(2, 64, 1280), rising_tone(1.0, 300)), "What?")

QWEN3_CASES = {
    case.name: case
    for case in (
        _case("hello", _HELLO, thinker_max_tokens=150, talker_max_tokens=120),
        _case("count", _COUNT, thinker_max_tokens=150, talker_max_tokens=120),
        _case("system_prompt", _SYSTEM, talker_max_tokens=16),
        _case("three_turns", _THREE_TURNS),
        _case("speech", _SPEECH),
        _case("speech_and_text", _SPEECH_AND_TEXT),
        _case("speech_behind_text", _SPEECH_BEHIND_TEXT, talker_max_tokens=16),
        _case("two_sounds", _TWO_SOUNDS),
        _case("image", _IMAGE),
        _case("images", _IMAGES, talker_max_tokens=16),
        _case("video", _VIDEO, "Aiden"),
        _case("mixed", _MIXED, talker_max_tokens=16),
        _case("media_in_turns", _MEDIA_IN_TURNS, "Aiden"),
        _case("heard_video", _HEARD_VIDEO),
        _case("heard_mixed", _HEARD_MIXED, "Chelsie", talker_max_tokens=16),
        _case("heard_in_turns", _HEARD_IN_TURNS, talker_max_tokens=16),
        _case("video_at_1_8", _VIDEO_AT_1_8, "Aiden", 16, 24),
        _case("mixed_at_1_97", _MIXED_AT_1_97, "Chelsie", 16, 24),
        _case("heard_at_3", _HEARD_AT_3, "Ethan", 16, 24),
        _case("heard_mixed_at_1_8", _HEARD_MIXED_AT_1_8, "Ethan", 16, 24),
        _case("rates_in_turns", _RATES_IN_TURNS, "Ethan", 16, 24),
        _case("wide_heard", _WIDE_HEARD, "Ethan", 16, 24),
        _case("hello_chelsie", _HELLO, "Chelsie"),
        _case("three_turns_chelsie", _THREE_TURNS, "Chelsie"),
        _case("mixed_chelsie", _MIXED, "Chelsie", talker_max_tokens=16),
        _case("hello_aiden", _HELLO, "Aiden", talker_max_tokens=16),
        _case("speech_aiden", _SPEECH, "Aiden"),
        _case("one_token", _HELLO, thinker_max_tokens=1),
        _case("two_tokens", _HELLO, thinker_max_tokens=2),
        _case("three_tokens", _COUNT, thinker_max_tokens=3),
        _case("stop_at_once", _SPEECH, stop_at=0),
        _case("stop_early", _COUNT, stop_at=4),
        _case("stop_early_image", _IMAGE, stop_at=6),
        _case("one_frame", _COUNT, talker_max_tokens=1),
        # More than the 300 frames that transformers decodes at a time, and speech that goes on beside it.
        _case("long_reply", _HOUSE, "Ethan", 330, 305, ignore_eos=True),
        _case("other_long_reply", _HARBOR, "Chelsie", 60, 60, ignore_eos=True),
    )
}
