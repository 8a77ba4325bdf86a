"""A `Generator` that follows a script, so that the HTTP layer can be tested without engines."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from omni_server.errors import InvalidRequestError, OmniError, StageDownError
from omni_server.generation import Deliver
from omni_server.types import (
    AudioDelta,
    AudioPart,
    ChatMessage,
    ClonedVoice,
    CodecDelta,
    Finished,
    FinishReason,
    ModelInfo,
    OmniEvent,
    OmniRequest,
    Prompt,
    PromptTokens,
    Task,
    TextDelta,
    TextPart,
    TokenizedPrompt,
    Usage,
)
from omni_server.types.images import (
    FreeSizes,
    ImageDone,
    ImageFeatures,
    ImageOutput,
    ImageProgress,
    ImageSize,
    PartialImage,
)

MODEL = ModelInfo(
    name="org/omni-tiny",
    aliases=("omni",),
    voices=("Chelsie", "Ethan"),
    default_voice="Chelsie",
    outputs=frozenset({"text", "audio"}),
    text_stage="thinker",
    speech_stage="talker",
    max_model_len=2048,
    input_modalities=("audio", "image", "video"),
    max_media_per_prompt={"audio": 2, "image": 2, "video": 1},
    created=1_780_000_000,
    fingerprint="fp_0123456789",
    hears_videos=True,
)
CLONING_MODEL = replace(
    MODEL,
    voices=("Default",),
    default_voice="Default",
    outputs=frozenset({"audio", "voice"}),
    text_stage=None,
    input_modalities=(),
    reads_text=True,
)
CLONING_CHAT_MODEL = replace(CLONING_MODEL, outputs=MODEL.outputs | {"voice"}, text_stage=MODEL.text_stage)
TEXT_ONLY_MODEL = replace(
    MODEL, voices=(), default_voice=None, outputs=frozenset({"text"}), speech_stage=None
)
READING_MODEL = replace(
    MODEL,
    outputs=frozenset({"audio"}),
    text_stage=None,
    input_modalities=(),
    max_media_per_prompt={},
    hears_videos=False,
    reads_text=True,
)
"""It only reads aloud."""

IMAGE_MODEL = replace(
    TEXT_ONLY_MODEL,
    outputs=frozenset({"image"}),
    text_stage=None,
    input_modalities=(),
    image_sizes=(ImageSize(32, 32), ImageSize(48, 32)),
)
EDITING_MODEL = replace(
    IMAGE_MODEL,
    input_modalities=("image",),
    max_media_per_prompt={"image": 2},
    image_features=ImageFeatures(
        parameters=frozenset(
            {
                "negative_prompt",
                "num_steps",
                "guidance_scale",
                "true_cfg_scale",
                "num_partial_images",
                "loras",
            }
        ),
        free_sizes=FreeSizes(multiple=16, max_ratio=3.0, max_pixels=64 * 64),
        max_input_images=2,
        loras=("paper", "ink"),
    ),
)
"""Generates and edits images in steps."""
VERSATILE_MODEL = replace(
    MODEL,
    outputs=MODEL.outputs | IMAGE_MODEL.outputs,
    image_sizes=IMAGE_MODEL.image_sizes,
    image_features=EDITING_MODEL.image_features,
)
"""No endpoint refuses it, but chats of it have no images."""

PROMPT = PromptTokens(total=20, text=12, audio=5, image=2, video=1, cached=3)
IMAGE_PROMPT = PromptTokens(total=16, text=0, audio=0, image=16, video=0)
"""Of a model that writes no text: the tokens of the images to edit."""
# Bytes and line breaks that careless code cuts apart.
WORDS = ("Hello", " wörld", "", " 👋🏽", "\u2028", "!")
TEXT = "".join(WORDS)
# Odd lengths, so that no delta ends at a multiple of six bytes by itself.
SAMPLES = np.sin(np.arange(7001, dtype=np.float32) / 20) * np.float32(0.5)
PIECES = (1001, 2, 2999, 1, 2998)


class Hang:
    """Script entry: nothing comes any more."""


class Wait:
    """Script entry: nothing comes until `event` is set."""

    def __init__(self, event: asyncio.Event) -> None:
        self.event = event


ScriptEntry = OmniEvent | Exception | Hang | Wait


def finished(finish_reason: FinishReason = "stop", *, codec_tokens: int = 0) -> Finished:
    return Finished(finish_reason, Usage(prompt=PROMPT, text_tokens=len(WORDS), codec_tokens=codec_tokens))


def text_script(finish_reason: FinishReason = "stop") -> list[ScriptEntry]:
    words: list[ScriptEntry] = [TextDelta(word, (index,)) for index, word in enumerate(WORDS)]
    return [*words, finished(finish_reason)]


def speech_script() -> list[ScriptEntry]:
    """Text and sound interleaved."""
    script: list[ScriptEntry] = [TextDelta(WORDS[0], (0,)), TextDelta(WORDS[1], (1,))]
    position = 0
    for index, num_samples in enumerate(PIECES):
        script.append(CodecDelta((index,)))
        script.append(AudioDelta(position, SAMPLES[position : position + num_samples]))
        position += num_samples
        if index < len(WORDS) - 2:
            script.append(TextDelta(WORDS[index + 2], (index + 2,)))
    return [*script, finished(codec_tokens=len(PIECES))]


def image_of(image: ImageOutput) -> npt.NDArray[np.uint8]:
    """Pixels that depend on size and seed; no size counts as the model's first, and no seed as 0."""
    size = image.size or IMAGE_MODEL.image_sizes[0]
    shape = (size.height, size.width, 3)
    return np.random.default_rng(image.seed or 0).integers(0, 256, shape, np.uint8)


NUM_STEPS = 4


def image_script(image: ImageOutput) -> list[ScriptEntry]:
    """Steps, with the previews that are asked for, and the image. Previews are darker than the image."""
    script: list[ScriptEntry] = []
    for step in range(1, NUM_STEPS + 1):
        script.append(ImageProgress(step, NUM_STEPS))
        if step <= image.num_partial_images:
            script.append(PartialImage(step - 1, preview_of(image, step - 1)))
    usage = Usage(IMAGE_PROMPT, text_tokens=0, codec_tokens=0, image_tokens=tokens_of(image))
    return [*script, ImageDone(image_of(image)), Finished("stop", usage)]


def tokens_of(image: ImageOutput) -> int:
    return image_of(image).size // (3 * 16 * 16)


def preview_of(image: ImageOutput, index: int) -> npt.NDArray[np.uint8]:
    return (image_of(image) >> (3 - index)).astype(np.uint8)


class FakeGeneration:
    def __init__(self, request_id: str, script: Sequence[ScriptEntry], deliver: Deliver) -> None:
        self.request_id = request_id
        self.prompt = PROMPT
        self.began = time.perf_counter()
        self.num_closed = 0
        self.closed = asyncio.Event()
        self._task = asyncio.create_task(self._run(script, deliver))

    async def _run(self, script: Sequence[ScriptEntry], deliver: Deliver) -> None:
        for entry in script:
            await asyncio.sleep(0)
            match entry:
                case Hang():
                    await asyncio.Event().wait()
                case Wait(event=event):
                    await event.wait()
                case _:
                    deliver(entry)

    def cancel(self) -> None:
        self._task.cancel()
        self.closed.set()

    async def aclose(self) -> None:
        self.num_closed += 1
        self.cancel()


class FakeGenerator:
    """Answers every request by `script`, or by what suits the request. Remembers requests and generations."""

    def __init__(self, model_info: ModelInfo = MODEL, script: Sequence[ScriptEntry] | None = None) -> None:
        self.model_info = model_info
        self.script = script
        self.submit_error: OmniError | Exception | None = None
        self.submit_hangs = False
        self.submit_cancelled = False
        self.may_submit = asyncio.Event()
        self.may_submit.set()
        self.submitted = asyncio.Event()
        self.ready = True
        self.alive = True
        self.down: StageDownError | None = None
        self.failed: tuple[str, ...] = ()
        self.metrics = b""
        self.requests: list[OmniRequest] = []
        self.tasks: list[Task] = []
        self.recordings: list[AudioPart] = []
        self.voice_error: OmniError | None = None
        self.generations: list[FakeGeneration] = []

    @property
    def last_request(self) -> OmniRequest:
        return self.requests[-1]

    async def submit(self, request: OmniRequest, deliver: Deliver) -> FakeGeneration:
        self.requests.append(request)
        self.submitted.set()
        if self.submit_hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.submit_cancelled = True
                raise
        await self.may_submit.wait()
        if self.submit_error is not None:
            raise self.submit_error
        script = self.script
        if script is None and request.image is not None:
            script = image_script(request.image)
        elif script is None:
            script = speech_script() if request.speech is not None else text_script()
            if self.model_info.text_stage is None:
                script = [entry for entry in script if not isinstance(entry, TextDelta)]
        generation = FakeGeneration(request.request_id, script, deliver)
        self.generations.append(generation)
        return generation

    async def tokenize(self, request: OmniRequest) -> TokenizedPrompt:
        """A token for each character; a chat has those of its texts."""
        self.requests.append(request)
        if self.submit_error is not None:
            raise self.submit_error
        parts = [part for message in request.messages for part in message.content]
        prompt = request.prompt or Prompt("".join(p.text for p in parts if isinstance(p, TextPart)))
        if not all(0xE000 <= token < 0x110000 or token < 0xD800 for token in prompt.token_ids):
            raise InvalidRequestError("Invalid token id.", param="messages")
        text = prompt.text or "".join(map(chr, prompt.token_ids))
        return TokenizedPrompt(tuple(map(ord, text)), tuple(text), text)

    async def clone_voice(self, recording: AudioPart, text: str = "") -> ClonedVoice:
        """The voice tells what it was made of."""
        self.recordings.append(recording)
        if self.voice_error is not None:
            raise self.voice_error
        return ClonedVoice(recording.samples[:4].tobytes(), bytes(32) if text else b"", text)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        self.tasks.append(task)
        return (ChatMessage("user", (TextPart(type(task).__name__),)),)

    def is_ready(self) -> bool:
        return self.ready and self.alive

    def is_alive(self) -> bool:
        return self.alive

    def stage_down(self) -> StageDownError | None:
        return self.down

    def failed_replicas(self) -> tuple[str, ...]:
        return self.failed

    def metrics_text(self) -> bytes:
        return self.metrics
