"""The interface between the server and a model family, and how the server finds a family.

The server contains no model code. A stage config names a family, an object that implements `ModelFamily`;
everything that depends on the checkpoint comes from the `FamilyModel` that the family opens. This module
uses the family's own names for stages (`model_stage` in a stage config).
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from omni_server.config.checkpoint_files import config_errors
from omni_server.config.pipeline import MODEL_FAMILY_VARIABLE, Pipeline, find_family, installed_families
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import CommonStage
from omni_server.errors import ConfigError
from omni_server.family.codec import CodecLayout
from omni_server.family.footprint import StageFootprint
from omni_server.family.speech_text import SpeechText
from omni_server.protocol.rows import SourceSpan
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ClonedVoice,
    FunctionTool,
    MediaKind,
    Output,
    Prompt,
    SpeechOutput,
    Task,
)
from omni_server.types.images import ImageFeatures, ImageOutput, ImageSize

logger = logging.getLogger(__name__)

HfOverrides = Callable[[Any], Any]
"""vLLM's `hf_overrides`: takes a Hugging Face config and returns the stage's config. Must be a module-level
function."""


SAMPLED_FPS = "fps"
"""Where an engine finds the rate of a video's frames: a key of the metadata that vLLM passes on with them."""

AUDIO_TRACK = "audio_track"
"""The key of a video's audio track, with the samples `[n]` and their rate in Hz. Absent without a track."""


@dataclass(frozen=True)
class DiffusionPrompt:
    """A rendered request for a diffusion entry."""

    token_ids: tuple[int, ...]
    """One id per token that counts towards `max_num_batched_tokens`."""
    payload: bytes
    """The stage's encoded input."""


MEDIA_ROW = -1
"""In `TextRows.row_ids`: the source sends the row of this position."""


@dataclass(frozen=True)
class TextRows:
    """The rows of a stage that looks up those of text (`Embeddings.text_ids`), by position in its prompt.

    The ids of generated text follow those of the prompt, and the tail follows them.
    """

    row_ids: tuple[int, ...]
    """Ids of all rows that precede the first generated one; `MEDIA_ROW` where a span has rows."""
    spans: tuple[SourceSpan, ...]
    """What the prompt has of the source's, in order."""
    tail_ids: tuple[int, ...]
    """Ids of the rows that follow the last one: each in turn, the last one forever."""

    @property
    def has_media(self) -> bool:
        """Whether the source must send rows."""
        return any(span.has_rows for span in self.spans)


@dataclass(frozen=True)
class EmbeddingsPrompt:
    """Prompt of a stage that receives embeddings: placeholder token ids, and the position from which
    embeddings are added to the stage's own instead of replacing them.

    The row of the first generated token belongs to the last position.
    """

    token_ids: tuple[int, ...]
    num_replaced: int
    """Embeddings before this position replace the stage's own; later ones are added to them."""
    text: TextRows | None = None
    """Set if text crosses the edge as ids (`Embeddings.text_ids`). Its `row_ids` are one fewer than
    `token_ids`."""


@dataclass(frozen=True)
class PlaceholderIds:
    """The tokens that stand for media in a prompt; None for media that it cannot contain."""

    audio: int | None = None
    image: int | None = None
    video: int | None = None


@dataclass(frozen=True)
class NeededFile:
    """A file of a checkpoint's folder besides its weights."""

    names: tuple[str, ...]
    """Alternative names, one of which must exist."""
    purpose: str


@dataclass(frozen=True)
class ReferenceImplementation:
    """Another implementation of a family's models, which `omni-server verify` compares with."""

    factory: str
    """`package.module:name` of an `omni_server.protocol.reference.ReferenceFactory`."""
    package: str = "transformers"
    """Its name on PyPI. The server itself does not need it."""


@dataclass(frozen=True)
class DefaultConfigs:
    """Names of the shipped stage configs with which a family is served if no other is given."""

    gpu: str
    """Is fitted to the GPUs of the machine."""
    demo: str
    """For small checkpoints, on a CPU."""
    cpu: str | None = None
    """For genuine checkpoints on a CPU; None if that is too slow to be of use."""


class FamilyModel(ABC):
    """One checkpoint of the family, as the server process sees it.

    Families derive from it and override what their pipeline has: the defaults are those of a model without
    speech, media and images. The methods that render prompts are called only for stages of their kind.
    """

    voices: tuple[str, ...] = ()
    default_voice: str | None = None
    stop_ids: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """For each autoregressive stage, the tokens that end its sequence."""
    input_modalities: tuple[MediaKind, ...] = ()
    """Media that prompts may contain."""
    placeholder_ids: PlaceholderIds = PlaceholderIds()
    hears_videos: bool = False
    """Whether the model can hear the audio track of a video with its frames (`VideoPart.audio`)."""
    warm_up_speech: SpeechOutput = SpeechOutput()
    """Of the first requests, before the server is ready."""
    codec: CodecLayout | None = None
    """None if there is no speech."""
    row_width: int = 0
    """Width of the rows on an edge with embeddings; 0 without such an edge."""
    extra_rows_per_request: int = 0
    """Rows that the first payload of a request may contain in addition to one per token."""
    image_sizes: tuple[ImageSize, ...] = ()
    """Sizes of images that the model can generate, the default first; empty if it generates none."""

    def image_features(self, stage: CommonStage) -> ImageFeatures:
        """What requests for images may contain. `stage` is the first stage of the stage config."""
        return ImageFeatures()

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        outputs: Collection[Output],
        tools: Sequence[FunctionTool] = (),
    ) -> Prompt:
        """Render a chat for an autoregressive entry. With "audio" in `outputs`, adds the system prompt that
        speech needs unless the chat has one. Tool calls follow the format in
        `omni_server.protocol.tool_calls`.

        Raises `InvalidRequestError` if the chat cannot be rendered.
        """
        raise NotImplementedError

    @abstractmethod
    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        """Returns the chat that gives the model the task.

        The answer to `ReadAloud` is the text itself (`SpeechOutput.text`), to `Transcribe` what was said.
        Raises `InvalidRequestError` for a task that the model cannot do.
        """

    def embeddings_prompt(self, stage: str, source_ids: Sequence[int], *, voice: str) -> EmbeddingsPrompt:
        """Returns the prompt of a stage that receives embeddings, given its source's prompt. `voice`
        is one of `voices`."""
        raise NotImplementedError

    def speech_text(self, speech: SpeechOutput, voice: str) -> SpeechText:
        """For the stage that reads text; nothing of the text has been pushed. `voice` is one of `voices`.
        Raises `InvalidRequestError`."""
        raise NotImplementedError

    def voice_prompt(self, recording: AudioPart, *, has_text: bool) -> DiffusionPrompt:
        """Of the stage that makes voices. `has_text`: what is said in the recording will be known, so that
        speech can continue it. Raises `InvalidRequestError`."""
        raise NotImplementedError

    def cloned_voice(self, result: npt.NDArray[np.float32]) -> ClonedVoice:
        """Returns what the stage that makes voices has made, without a text."""
        raise NotImplementedError

    def image_prompt(
        self, messages: Sequence[ChatMessage], image: ImageOutput, *, size: ImageSize, seed: int
    ) -> DiffusionPrompt:
        """Renders a diffusion request. `size` is in `image_sizes` or allowed by `image_features`; `seed` (0
        to 2**63 - 1) sets the noise. The other fields of `image` that are set are in `image_features`.

        The prompt's tokens are those of the image (`omni_server.protocol.images.num_image_tokens`), and more
        for images in the messages: the API reports them as usage. The last stage must return the pixels, RGB
        `[height, width, 3]` in [0, 1]. Raises `InvalidRequestError` if the messages cannot be rendered.
        """
        raise NotImplementedError

    @abstractmethod
    def dtype_name(self) -> str:
        """The checkpoint's dtype, which `dtype: auto` selects: float32, bfloat16 or float16."""


class ModelFamily(Protocol):
    """Knows how to run its models in stages."""

    pipeline: Pipeline
    """All stages of the family and what flows between them."""
    architectures: tuple[str, ...]
    """The supported values of `architectures` in config.json."""
    reference: ReferenceImplementation | None
    engine_modules: tuple[str, ...]
    """Model modules, which the fork server imports once for all engines."""
    default_configs: DefaultConfigs | None
    """None if a checkpoint of the family always needs a stage config."""

    def needed_files(self) -> tuple[NeededFile, ...]:
        """Returns the files that a folder must contain besides config.json and weights."""
        ...

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        """Returns the footprints by stage, without reading weights. Raises `ConfigError` if config.json lacks
        the data.

        Memory is planned and checked with them. They depend on the stages of `config`, their options and
        dtype, but not on their lengths, batch sizes and devices.
        """
        ...

    def outputs(self, model_dir: Path) -> frozenset[Output]:
        """Returns the outputs of the pipeline that the checkpoint has weights for. Without a stage config,
        only their stages are deployed. Raises `ConfigError` if config.json lacks the data."""
        ...

    def open(self, model_dir: Path) -> FamilyModel:
        """Read what the server process needs, without weights. Raises `ConfigError` for an unsuitable
        folder."""
        ...

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        """Selects the stage's part of the checkpoint's config; None if vLLM reads the config unchanged."""
        ...

    def register(self) -> None:
        """Make the family's model classes known to vLLM in this process."""
        ...


def open_model(family: ModelFamily, folder: Path) -> FamilyModel:
    """Call `family.open`. Raises `ConfigError`, naming the folder, for every failure."""
    with config_errors(f"{folder}: the server cannot open it"):
        return family.open(folder)


def without_missing_voice_encoder(config: StageConfig, family: ModelFamily, folder: Path) -> StageConfig:
    """Returns `config`, without the stage that makes voices if the checkpoint has no weights for it. Raises
    `ConfigError` if it has none for another output."""
    present = family.outputs(folder)
    config = config.reduced_to(present | (config.outputs - {"voice"}))
    if missing := config.outputs - present:
        stages = {name for output in missing for name in config.stages_for((output,))}
        kept = config.stages_for(present)
        raise ConfigError(
            f"{folder}: the checkpoint answers in {' and '.join(sorted(present))} only and has no "
            f"{' or '.join(name for name in config.stages if name in stages and name not in kept)}: use a stage "
            f"config with the {' and '.join(kept)} alone, or none"
        )
    return config


def servable_architectures() -> tuple[str, ...]:
    """All installed families' architectures."""
    return tuple(name for family in _installed() for name in family.architectures)


def family_of(architectures: Collection[str]) -> ModelFamily | None:
    """The installed family that runs one of these `architectures` of a config.json."""
    return next((f for f in _installed() if not set(f.architectures).isdisjoint(architectures)), None)


def families_of_this_process() -> list[ModelFamily]:
    """Returns the served family in an engine process, and all installed families elsewhere."""
    served = os.environ.get(MODEL_FAMILY_VARIABLE)
    return [load_family(served)] if served else _installed()


def _installed() -> list[ModelFamily]:
    """Loads all installed families, skipping those that fail to load with a warning."""
    families = []
    for name in installed_families():
        try:
            families.append(load_family(name))
        except ConfigError as error:
            logger.warning("%s", error)
    return families


def load_family(name: str) -> ModelFamily:
    """Load the family that a config names. Raises `ConfigError` if it does not exist."""
    try:
        return cast(ModelFamily, find_family(name))
    except ValueError as error:
        raise ConfigError(f"model_family '{name}': {error}") from error
