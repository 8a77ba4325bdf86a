"""Qwen3-Omni's thinker in an engine of its own: its talker would see what transformers gives its own."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration
from vllm import ModelRegistry, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.sampling_params import RequestOutputKind

from omni_server.config.pipeline import MODEL_FAMILY_VARIABLE
from omni_server.config.stages import ArStage
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.engine_args import ar_engine_args
from omni_server.engine.sampling import add_rows
from omni_server.family import EmbeddingsPrompt, Prompt, SourceSpan
from omni_server.orchestrator.row_feeder import TextRowFeeder
from omni_server.protocol.rows import AddressedFeed, RowsFeed, RowsInput, RowsOutput, RowsPayload
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from omni_server.types import VideoPart
from stages.qwen3_omni.hf_overrides import THINKER, thinker_config
from stages.qwen3_omni.ids import SpecialIds, read_special_ids
from stages.qwen3_omni.talker_prompt import talker_prompt
from stages.qwen3_omni.thinker import MAX_AUDIO_S, Qwen3OmniThinker
from stages.runtime.embedding_store import RowStore
from tests.integration.engines import CPU_ENVIRONMENT, ar_engine

RATE_HZ = 16_000
INLINE = QueueSpec(capacity=1, path=None, slot_bytes=0, max_portions=8, num_consumers=1)
DEADLINE_S = 120.0

AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
FPS = 1.8  # a rate at which the times of frames are not whole numbers


def sound(num_samples: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return (0.1 * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


def picture(height: int, width: int) -> npt.NDArray[np.uint8]:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 // width, y * 255 // height, (x // 16 + y // 16) % 2 * 200], -1).astype(np.uint8)


def film(num_frames: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    return np.stack([np.roll(picture(height, width), 5 * number, axis=1) for number in range(num_frames)])


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@dataclass(frozen=True)
class Case:
    turns: str
    voice: str = "ethan"
    audios: tuple[npt.NDArray[np.float32], ...] = ()
    images: tuple[npt.NDArray[np.uint8], ...] = ()
    videos: tuple[npt.NDArray[np.uint8], ...] = ()

    @property
    def text(self) -> str:
        return turn("system", "You speak.") + self.turns + "<|im_start|>assistant\n"

    def prompt(self) -> Prompt:
        return Prompt(
            self.text,
            audios=tuple((samples, RATE_HZ) for samples in self.audios),
            images=self.images,
            videos=tuple(VideoPart(frames, FPS) for frames in self.videos),
            processor_kwargs={"do_sample_frames": False} if self.videos else {},
        )


CASES = {
    "text": Case(turn("user", "hello world how are you today")),
    "turns": Case(turn("user", "hello") + turn("assistant", "yes") + turn("user", "count"), "chelsie"),
    "audio": Case(turn("user", AUDIO + "What is it?"), audios=(sound(20_133),)),
    "image": Case(turn("user", IMAGE + "What is it?"), images=(picture(112, 140),)),
    "video": Case(turn("user", VIDEO + "What happens?"), "chelsie", videos=(film(4, 64, 96),)),
    "everything": Case(
        turn("user", AUDIO + "and" + IMAGE + VIDEO + "Say it."),
        audios=(sound(24_000),),
        images=(picture(84, 84),),
        videos=(film(4, 64, 64),),
    ),
    "several turns with media": Case(
        turn("user", IMAGE + "What is it?") + turn("assistant", "how are you") + turn("user", AUDIO + "And?"),
        audios=(sound(11_200, 1),),
        images=(picture(112, 84),),
    ),
}
NUM_TOKENS = {name: 3 + 4 * (index % 3) for index, name in enumerate(CASES)}

# -- the reference


class Seen(Exception):
    """What the talker would be given."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


@dataclass
class Expected:
    token_ids: list[int]
    reply: list[int]
    embeds: torch.Tensor  # [prompt, width], codec embeddings included
    trailing: torch.Tensor  # [n, width]
    positions: torch.Tensor  # [3, prompt]


class HfReference:
    """transformers' model, which never speaks."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        talker = self.model.talker
        # `get_rope_index` reads it, but the talker's config has no such part.
        talker.config.audio_config = self.model.config.thinker_config.audio_config
        talker.generate = self._see
        self.table = talker.text_projection(self.model.thinker.get_input_embeddings().weight).detach()
        self.codec = talker.get_input_embeddings().weight.detach()

    def _see(self, **given: Any) -> None:
        raise Seen(given)

    def inputs(self, case: Case) -> Any:
        media: dict[str, Any] = {}
        if case.audios:
            media["audio"] = list(case.audios)
        if case.images:
            media["images"] = [Image.fromarray(pixels) for pixels in case.images]
        if case.videos:
            frames = [torch.from_numpy(video).permute(0, 3, 1, 2) for video in case.videos]
            media |= {"videos": frames, "fps": FPS, "do_sample_frames": False}
        return self.processor(text=case.text, return_tensors="pt", **media)

    @torch.no_grad()
    def run(self, case: Case, num_tokens: int, end: int) -> Expected:
        inputs = self.inputs(case)
        generated: list[torch.Tensor] = []
        generate = self.model.thinker.generate

        def thinker_generate(**given: Any) -> Any:
            result = generate(**given)
            generated.append(result.sequences[0])
            return result

        self.model.thinker.generate = thinker_generate
        try:
            self.model.generate(
                **inputs,
                thinker_max_new_tokens=num_tokens,
                thinker_do_sample=False,
                thinker_eos_token_id=end,
                speaker=case.voice,
            )
            raise AssertionError("the talker was not reached")
        except Seen as seen:
            given = seen.given
        finally:
            self.model.thinker.generate = generate
        prompt = inputs["input_ids"][0].tolist()
        return Expected(
            prompt,
            generated[0][len(prompt) :].tolist(),
            given["inputs_embeds"][0],
            given["trailing_text_hidden"][0],
            self._positions(given),
        )

    def _positions(self, given: dict[str, Any]) -> torch.Tensor:
        """As the talker's forward pass takes them: with pictures, those of its own prompt."""
        ids = given["talker_input_ids"]
        images, videos = given.get("image_grid_thw"), given.get("video_grid_thw")
        if images is None and videos is None:
            return torch.arange(ids.shape[1], dtype=torch.float32).expand(3, -1)
        positions, _ = self.model.talker.get_rope_index(
            ids,
            images,
            videos,
            torch.ones_like(ids),
            False,
            given.get("audio_feature_lengths"),
            None if videos is None else torch.full((len(videos),), 2 / FPS),
        )
        return positions[:, 0]


# -- the engine


@dataclass
class Outbox:
    """Stands for the talker's."""

    feeds: list[RowsFeed] = field(default_factory=list)

    def put(self, feed: AddressedFeed) -> None:
        self.feeds.append(feed[1])

    def drop(self, feed: RowsFeed) -> None:
        raise AssertionError("nothing ends early")


@dataclass
class Answer:
    token_ids: tuple[int, ...]
    reply: list[int]
    prompt: EmbeddingsPrompt
    feeds: list[RowsFeed]
    num_payloads: int


async def answer(handle: ArHandle, ids: SpecialIds, case: Case, name: str, num_tokens: int) -> Answer:
    """What the server would feed the talker."""
    rendered = await handle.render(case.prompt())
    prompt = talker_prompt(ids, rendered.token_ids, case.voice)
    assert prompt.text is not None
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        stop_token_ids=[ids.im_end],
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args={},
    )
    if prompt.text.has_media:
        add_rows(params, RowsOutput(voice=case.voice, spans=prompt.text.spans))
    outbox = Outbox()
    feeder = TextRowFeeder(outbox.drop, prompt.text, is_limited=False)
    feeder.connect(outbox, "talker")  # type: ignore[arg-type]
    payloads: list[RowsPayload] = []

    def take(payload: RowsPayload) -> None:
        payloads.append(payload)
        feeder.take(payload)

    stream = await handle.open(name, rendered, params, take)
    reply: list[int] = []
    async for output in stream.outputs():
        reply += output.token_ids
        is_ended = output.finish_reason == "stop"
        feeder.speak(output.token_ids[:-1] if is_ended else output.token_ids)
    await stream.close()
    feeder.finish(len(reply) - (reply[-1] == ids.im_end))
    return Answer(rendered.token_ids, reply, prompt, outbox.feeds, len(payloads))


@pytest.fixture(scope="module")
def ids(qwen3_checkpoint: Path) -> SpecialIds:
    return read_special_ids(qwen3_checkpoint)


@pytest.fixture(scope="module")
def hf(qwen3_checkpoint: Path) -> HfReference:
    return HfReference(qwen3_checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker(qwen3_checkpoint: Path) -> AsyncIterator[ArHandle]:
    """With steps that are shorter than most prompts."""
    ModelRegistry.register_model(THINKER, Qwen3OmniThinker)
    stage = ArStage.model_validate(
        {
            "engine": "ar",
            "model_stage": "thinker",
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "dtype": "float32",
            "engine_args": {
                "enforce_eager": True,
                "block_size": 32,
                "kv_cache_memory_bytes": 64 << 20,
                "use_tqdm_on_load": False,
                "limit_mm_per_prompt": {"audio": 2, "image": 2, "video": 1},
                "skip_mm_profiling": True,
            },
        }
    )
    arguments = ar_engine_args(
        qwen3_checkpoint,
        stage,
        StageRuntimeConfig(
            str(qwen3_checkpoint),
            row_producer="stages.qwen3_omni.thinker_to_talker:ThinkerToTalker",
            output_queue=INLINE,
        ),
        platform="cpu",
        load_format="auto",
        hf_overrides=thinker_config,
    )
    with pytest.MonkeyPatch.context() as environment, tempfile.TemporaryDirectory(prefix="t-") as folder:
        for name, value in {**CPU_ENVIRONMENT, MODEL_FAMILY_VARIABLE: "stages.qwen3_omni:FAMILY"}.items():
            environment.setenv(name, value)
        handle = await ar_engine("thinker", arguments, Path(folder))
        try:
            yield handle
        finally:
            await handle.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(thinker: ArHandle, ids: SpecialIds) -> dict[str, Answer]:
    """All at once."""
    async with asyncio.timeout(DEADLINE_S):
        made = await asyncio.gather(
            *(answer(thinker, ids, case, name, NUM_TOKENS[name]) for name, case in CASES.items())
        )
    return dict(zip(CASES, made, strict=True))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", list(CASES))
async def test_the_talker_is_fed_what_the_reference_gives_its_own(
    answers: dict[str, Answer], hf: HfReference, ids: SpecialIds, name: str
) -> None:
    given = answers[name]
    wanted = hf.run(CASES[name], NUM_TOKENS[name], ids.im_end)
    assert list(given.token_ids) == wanted.token_ids
    assert given.reply == wanted.reply
    store = RowStore((), 0)
    store.use_table(hf.table)
    store.announce("r", RowsInput(num_replaced=given.prompt.num_replaced))
    for feed in given.feeds:
        store.add("r", feed)
    request = store.get("r")
    assert request is not None
    length = len(given.prompt.token_ids)
    assert length == len(wanted.embeds)

    def rows(first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(np.stack(request.at(first, count))).view(torch.float32)

    embeds = rows(0, length).clone()
    embeds[given.prompt.num_replaced :] += hf.codec[list(given.prompt.token_ids[given.prompt.num_replaced :])]
    torch.testing.assert_close(embeds, wanted.embeds, rtol=0, atol=2e-4)
    # The reference does not speak its last token, which is the end token or that of the length limit.
    num_spoken = len(wanted.reply) - 2
    torch.testing.assert_close(rows(length, num_spoken), wanted.trailing[:num_spoken], rtol=0, atol=1e-5)
    end = len(request.rows)
    torch.testing.assert_close(rows(end, 1)[0], wanted.trailing[-1], rtol=0, atol=1e-5)
    positions = request.prompt_positions(length)
    if positions is None:
        positions = torch.arange(length, dtype=torch.float32).expand(3, -1)
    assert torch.equal(positions, wanted.positions)


@pytest.mark.asyncio(loop_scope="module")
async def test_only_media_send_rows_and_in_the_steps_that_compute_them(answers: dict[str, Answer]) -> None:
    for name, given in answers.items():
        assert given.prompt.text is not None
        assert (given.num_payloads > 0) == given.prompt.text.has_media, name
        assert given.num_payloads < len(given.reply) + len(given.token_ids) // 64 + 2
    assert answers["everything"].num_payloads > 1, "the prompt is longer than a step"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_of_text_is_taken_from_the_prefix_cache(thinker: ArHandle, ids: SpecialIds) -> None:
    case = Case(turn("user", "hello world how are you today " * 12))

    async def num_cached() -> int:
        rendered = await thinker.render(case.prompt())
        params = SamplingParams(temperature=0.0, max_tokens=2, output_kind=RequestOutputKind.DELTA)
        stream = await thinker.open(f"cached-{len(rendered.token_ids)}", rendered, params)
        numbers = [output.num_cached_tokens async for output in stream.outputs()]
        await stream.close()
        return max(numbers)

    async with asyncio.timeout(DEADLINE_S):
        assert await num_cached() < await num_cached()


# -- media


@pytest.fixture(scope="module")
def ours(qwen3_checkpoint: Path) -> BaseMultiModalProcessor[Any]:
    ModelRegistry.register_model(THINKER, Qwen3OmniThinker)
    arguments = EngineArgs(
        str(qwen3_checkpoint),
        hf_overrides=thinker_config,
        limit_mm_per_prompt={"audio": 4, "video": 2},
        dtype="float32",
    )
    return MULTIMODAL_REGISTRY.create_processor(arguments.create_model_config())


def features(
    processor: BaseMultiModalProcessor[Any], *sounds: npt.NDArray[np.float32]
) -> tuple[list[int], list[torch.Tensor]]:
    """Token ids, and mel frames of each sound [128, num_frames]."""
    items = processor.info.parse_mm_data({"audio": [(samples, RATE_HZ) for samples in sounds]})
    result = processor(AUDIO * len(sounds), items)
    return result["prompt_token_ids"], [
        item["input_audio_features"].data for item in result["mm_kwargs"]["audio"]
    ]


@pytest.mark.parametrize(
    "num_samples", [201, 401, 640, 799, 16_000, 16_001, 16_159, 33_333, 31 * RATE_HZ + 7]
)
def test_features_of_a_sound_are_those_of_the_checkpoints_processor(
    ours: BaseMultiModalProcessor[Any], hf: HfReference, num_samples: int
) -> None:
    """Whether or not it has whole frames, and beyond the 30 s of the extractor."""
    samples = sound(num_samples)
    expected = hf.processor(text=AUDIO, audio=[samples], return_tensors="pt")
    token_ids, (mel,) = features(ours, samples)
    assert token_ids == expected["input_ids"][0].tolist()
    mask = expected["feature_attention_mask"][0].bool()
    torch.testing.assert_close(mel, expected["input_features"][0][:, mask], rtol=0, atol=1e-6)


def test_features_do_not_depend_on_other_sounds(ours: BaseMultiModalProcessor[Any]) -> None:
    sounds = [sound(16_001), sound(33_333, 1), sound(799, 2)]
    together_ids, together = features(ours, *sounds)
    alone = [features(ours, samples) for samples in sounds]
    assert together_ids == [token for token_ids, _ in alone for token in token_ids]
    for mel, (_, (own,)) in zip(together, alone, strict=True):
        torch.testing.assert_close(mel, own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[100], [200], [16_000, 200]])
def test_a_sound_that_is_too_short_is_told(
    ours: BaseMultiModalProcessor[Any], lengths: Sequence[int]
) -> None:
    with pytest.raises(ValueError, match="too short to be represented"):
        features(ours, *map(sound, lengths))


@pytest.mark.parametrize("max_num_batched_tokens", [64, 8192])
def test_the_encoder_cache_holds_the_longest_audio(
    qwen3_checkpoint: Path, max_num_batched_tokens: int
) -> None:
    ModelRegistry.register_model(THINKER, Qwen3OmniThinker)
    arguments = EngineArgs(
        str(qwen3_checkpoint),
        hf_overrides=thinker_config,
        dtype="float32",
        max_model_len=8192,
        max_num_batched_tokens=max_num_batched_tokens,
        limit_mm_per_prompt={"audio": 1, "image": 0, "video": 0},
    )
    budget = MultiModalBudget(arguments.create_engine_config(), MULTIMODAL_REGISTRY)
    num_tokens = MAX_AUDIO_S * 13
    assert budget.encoder_cache_size == max(num_tokens, max_num_batched_tokens)
    ((_, dummy),) = budget.get_dummy_encoder_profile_inputs(max_items_per_batch=1)
    assert dummy["input_audio_features"].data.shape[1] == MAX_AUDIO_S * 100


def test_spans_of_a_prompt_cover_the_users_turns(ids: SpecialIds, hf: HfReference) -> None:
    case = CASES["several turns with media"]
    source = hf.inputs(case)["input_ids"][0].tolist()
    text = talker_prompt(ids, source, case.voice).text
    assert text is not None
    covered = [position for span in text.spans for position in _positions(span)]
    starts = [position for position, token in enumerate(source) if token == ids.im_start]
    turns = zip(starts, [*starts[1:], len(source)], strict=True)
    assert covered == [p for first, end in turns if source[first + 1] == ids.user for p in range(first, end)]


def _positions(span: SourceSpan) -> range:
    return range(span.source_first, span.source_first + span.count)
