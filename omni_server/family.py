"""What the server asks of a model family, and how it finds one.

The server knows no model. A stage config names a family, an object that satisfies `ModelFamily`; everything
that depends on the checkpoint comes from the `FamilyModel` that it opens. Stages go by the family's own names
here (`model_stage` of a stage config).
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from omni_server.config.pipeline import MODEL_FAMILY_VARIABLE, Pipeline, find_family, installed_families
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from omni_server.types import SAMPLE_RATE_HZ, ChatMessage, FunctionTool, ImageSize, Output, Task

logger = logging.getLogger(__name__)

HfOverrides = Callable[[Any], Any]
"""vLLM's `hf_overrides`: a Hugging Face config in, the stage's config out. Must be a module-level
function."""


@dataclass(frozen=True)
class Prompt:
    """A rendered chat with its media, in order of appearance, for an autoregressive entry."""

    text: str
    audios: tuple[tuple[npt.NDArray[np.float32], int], ...] = ()  # samples [n], rate in Hz
    images: tuple[npt.NDArray[np.uint8], ...] = ()  # each [height, width, 3]
    videos: tuple[npt.NDArray[np.uint8], ...] = ()  # each [frames, height, width, 3]
    processor_kwargs: Mapping[str, object] = field(default_factory=dict)
    pieces: tuple[str, ...] = ()
    """`text` cut inside of everything that only spells a special token: each piece is tokenised by itself.
    Empty where there is nothing to cut."""


@dataclass(frozen=True)
class DiffusionPrompt:
    """A rendered request for a diffusion entry."""

    token_ids: tuple[int, ...]
    """As many as the request counts towards `max_num_batched_tokens`."""
    payload: bytes
    """The stage's encoded input."""


@dataclass(frozen=True)
class EmbeddingsPrompt:
    """Prompt of a stage that embeddings flow to: token ids that stand for them, and where they stop
    replacing."""

    token_ids: tuple[int, ...]
    num_replaced: int
    """Embeddings below this position replace the stage's own; from there on they are added."""


@dataclass(frozen=True)
class PlaceholderIds:
    """Tokens of a prompt that stand for media."""

    audio: int
    image: int
    video: int


@dataclass(frozen=True)
class CodecLayout:
    """How frames of codec tokens relate to audio. A frame has one token per codebook."""

    frames_per_block: int
    """Frames in a block, the unit in which `ChunkPlan` counts: windows begin on multiples of it."""
    samples_per_frame: int
    """Samples of the decoder's waveform per frame."""
    sample_rate_hz: int = SAMPLE_RATE_HZ
    """Of the decoder's waveform. Divided by `samples_per_frame`, it is the frame rate."""


@dataclass(frozen=True)
class KvLayout:
    """What attention keeps of each token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Quantizable:
    """The weights of a stage that quantization makes smaller. All others stay as they are."""

    weights: frozenset[str]
    """Their names in a checkpoint that is not quantized."""
    method: str | None
    """How this checkpoint stores them, as `awq`; None: they are not quantized."""
    bits: float
    """Size of each in this checkpoint, its part of scales and zero points included."""
    fp8_engine_args: Mapping[str, object]
    """vLLM's engine arguments that make FP8 of these weights, and of no others, while they are loaded."""


@dataclass(frozen=True)
class StageFootprint:
    """What one stage takes of a checkpoint and of memory, as far as the checkpoint's config tells."""

    tensors: Mapping[str, tuple[int, ...]]
    """Shapes of the weights that the stage loads, by their names in a checkpoint that is not quantized."""
    dtype: str
    """What `dtype: auto` means for the stage: float32, bfloat16 or float16."""
    loads_float32: bool
    """Weights are float32 in memory, whatever their type in the checkpoint."""
    encodes_media: bool
    """Encoders of audio, images or video run in the stage."""
    kv: KvLayout | None
    """None: the stage has no KV cache."""
    values_per_token: int
    """An estimate of how many values a step holds at its widest place for each of its tokens."""
    stream_state_bytes: int = 0
    """Reserved at the start for each utterance whose state is kept, beside weights and KV cache."""
    preparation_bytes: int = 0
    """Held beside the loaded weights while they are turned into what a GPU runs; free again before the first
    step."""
    quantizable: Quantizable | None = None
    """None: the stage is never quantized."""


@dataclass(frozen=True)
class NeededFile:
    """A file of a checkpoint's folder besides its weights."""

    names: tuple[str, ...]
    """Any one of these will do."""
    purpose: str


class FamilyModel(Protocol):
    """One checkpoint of the family, as the server process sees it."""

    voices: tuple[str, ...]
    default_voice: str | None
    stop_ids: Mapping[str, tuple[int, ...]]
    """By autoregressive stage, the tokens that end its sequence."""
    placeholder_ids: PlaceholderIds | None
    """None: the prompt has no media."""
    codec: CodecLayout | None
    """None: the model does not speak."""
    row_width: int
    """Width of what an edge with embeddings carries; 0 without one."""
    extra_rows_per_request: int
    """Rows that a request's first payload may carry beside those of its tokens."""
    image_sizes: tuple[ImageSize, ...]
    """Of the images that the model makes, the default first; empty: it makes none."""

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        outputs: Collection[Output],
        tools: Sequence[FunctionTool] = (),
    ) -> Prompt:
        """Render a chat for an autoregressive entry; with "audio" among `outputs`, the system prompt that speech
        needs is inserted where none is given. Calls are rendered, and asked for, as
        `omni_server.protocol.tool_calls` says.

        Raises `InvalidRequestError` if the chat cannot be rendered.
        """
        ...

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        """The chat by which this model is given the task.

        To `ReadAloud` the answer is the text itself (`SpeechOutput.text`), to `Transcribe` what was said.
        Raises `InvalidRequestError` for a task that the model cannot do.
        """
        ...

    def embeddings_prompt(self, stage: str, source_ids: Sequence[int]) -> EmbeddingsPrompt:
        """For a stage that embeddings flow to, where the prompt of their source is `source_ids`."""
        ...

    def image_prompt(self, messages: Sequence[ChatMessage], *, size: ImageSize, seed: int) -> DiffusionPrompt:
        """For a diffusion entry. `size` is one of `image_sizes`; `seed`, 0 to 2**63 - 1, decides the noise.

        The last stage must return the pixels, RGB `[height, width, 3]` in [0, 1]. Raises
        `InvalidRequestError` if the messages cannot be rendered.
        """
        ...

    def dtype_name(self) -> str:
        """The checkpoint's own dtype, what `dtype: auto` means: float32, bfloat16 or float16."""
        ...


class ModelFamily(Protocol):
    """Knows how to run its models in stages."""

    pipeline: Pipeline
    """All stages of the family and what flows between them."""
    architectures: tuple[str, ...]
    """What `architectures` of a config.json may say."""
    reference: str | None
    """`package.module:name` of an `omni_server.reference.ReferenceFactory`, another implementation of the
    model with which `omni-server verify` compares; None: there is none."""
    engine_modules: tuple[str, ...]
    """Modules of its models, which the fork server imports once for all engines."""

    def needed_files(self) -> tuple[NeededFile, ...]:
        """What a checkpoint's folder must hold besides config.json and weights."""
        ...

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        """What each stage takes, by name; no weights are read. Raises `ConfigError` if config.json does not
        tell.

        Memory is planned and checked by it. It depends on the stages of `config`, their options and dtype,
        but not on their lengths, batch sizes and devices.
        """
        ...

    def open(self, model_dir: Path) -> FamilyModel:
        """Read what the server process needs, no weights. Raises `ConfigError` if the folder does not fit."""
        ...

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        """How vLLM sees the stage's part of the checkpoint's config."""
        ...

    def register(self) -> None:
        """Make the family's model classes known to vLLM in this process."""
        ...


def open_model(family: ModelFamily, folder: Path) -> FamilyModel:
    """`family.open`, whose every failure is a `ConfigError` that names the folder."""
    try:
        return family.open(folder)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises all kinds of them for damaged files
        raise ConfigError(f"{folder}: the server cannot open it: {type(error).__name__}: {error}") from error


def servable_architectures() -> tuple[str, ...]:
    """Of all families that are installed."""
    return tuple(name for family in _installed() for name in family.architectures)


def families_of_this_process() -> list[ModelFamily]:
    """The family that the server names to its engines' processes; all installed ones in any other process."""
    served = os.environ.get(MODEL_FAMILY_VARIABLE)
    return [load_family(served)] if served else _installed()


def _installed() -> list[ModelFamily]:
    """All families that are installed. Those that cannot be loaded are reported and left out: nobody asked for
    them."""
    families = []
    for name in installed_families():
        try:
            families.append(load_family(name))
        except ConfigError as error:
            logger.warning("%s", error)
    return families


def load_family(name: str) -> ModelFamily:
    """The family that a stage config names. Raises `ConfigError` if there is no such thing."""
    try:
        return cast(ModelFamily, find_family(name))
    except ValueError as error:
        raise ConfigError(f"model_family '{name}': {error}") from error
