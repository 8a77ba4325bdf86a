"""The interface between the server and a model family, and how the server finds a family.

The server contains no model code. A stage config names a family, an object that implements `ModelFamily`;
everything that depends on the checkpoint comes from the `FamilyModel` that the family opens. In this
module, stages have the family's own names (`model_stage` in a stage config).
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
"""vLLM's `hf_overrides`: takes a Hugging Face config and returns the stage's config. Must be a module-level
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
    """`text`, cut inside every string that merely spells a special token, so that tokenising each piece by
    itself yields no special token. Empty if nothing has to be cut."""


@dataclass(frozen=True)
class DiffusionPrompt:
    """A rendered request for a diffusion entry."""

    token_ids: tuple[int, ...]
    """One for each token that the request counts towards `max_num_batched_tokens`."""
    payload: bytes
    """The stage's encoded input."""


@dataclass(frozen=True)
class EmbeddingsPrompt:
    """Prompt of a stage that receives embeddings: the token ids that stand for the embeddings, and the
    position from which embeddings are added instead of replacing the stage's own."""

    token_ids: tuple[int, ...]
    num_replaced: int
    """Embeddings before this position replace the stage's own; later ones are added to them."""


@dataclass(frozen=True)
class PlaceholderIds:
    """The tokens that stand for media in a prompt."""

    audio: int
    image: int
    video: int


@dataclass(frozen=True)
class CodecLayout:
    """How frames of codec tokens relate to audio. A frame has one token per codebook."""

    frames_per_block: int
    """Frames in a block, the unit in which `ChunkPlan` counts: windows begin on multiples of it."""
    samples_per_frame: int
    """Samples per frame of the decoder's waveform."""
    sample_rate_hz: int = SAMPLE_RATE_HZ
    """Sample rate of the decoder's waveform. Divided by `samples_per_frame`, it is the frame rate."""


@dataclass(frozen=True)
class KvLayout:
    """What attention stores in the KV cache per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Quantizable:
    """The weights of a stage that can be quantized. All other weights stay unchanged."""

    weights: frozenset[str]
    """Their names in a checkpoint that is not quantized."""
    method: str | None
    """How this checkpoint stores them, such as `awq`; None: they are not quantized."""
    bits: float
    """Bits per weight in this checkpoint, including scales and zero points."""
    fp8_engine_args: Mapping[str, object]
    """vLLM's engine arguments that quantize exactly these weights to FP8 while they are loaded."""


@dataclass(frozen=True)
class StageFootprint:
    """The weights that one stage loads and the memory that it needs, according to the checkpoint's config."""

    tensors: Mapping[str, tuple[int, ...]]
    """Shapes of the weights that the stage loads, by their names in a checkpoint that is not quantized."""
    dtype: str
    """The meaning of `dtype: auto` for the stage: float32, bfloat16 or float16."""
    loads_float32: bool
    """Weights are float32 in memory, regardless of their type in the checkpoint."""
    encodes_media: bool
    """The stage runs encoders of audio, images or video."""
    kv: KvLayout | None
    """None: the stage has no KV cache."""
    values_per_token: int
    """An estimate of the largest number of values per token that a step holds at the same time."""
    stream_state_bytes: int = 0
    """Memory reserved at the start for each utterance whose state is kept, besides weights and KV cache."""
    preparation_bytes: int = 0
    """Memory needed besides the loaded weights while they are converted for the GPU; freed before the first
    step."""
    quantizable: Quantizable | None = None
    """None: the stage is never quantized."""


@dataclass(frozen=True)
class NeededFile:
    """A file of a checkpoint's folder besides its weights."""

    names: tuple[str, ...]
    """Alternative names; one of these files must exist."""
    purpose: str


class FamilyModel(Protocol):
    """One checkpoint of the family, as the server process sees it."""

    voices: tuple[str, ...]
    default_voice: str | None
    stop_ids: Mapping[str, tuple[int, ...]]
    """For each autoregressive stage, the tokens that end its sequence."""
    placeholder_ids: PlaceholderIds | None
    """None: the prompt cannot contain media."""
    codec: CodecLayout | None
    """None: the model does not speak."""
    row_width: int
    """Width of the rows on an edge with embeddings; 0 if there is no such edge."""
    extra_rows_per_request: int
    """Rows that the first payload of a request may contain besides those of its tokens."""
    image_sizes: tuple[ImageSize, ...]
    """Sizes of the images that the model can generate, the default first; empty: it generates none."""

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
        """The prompt of a stage that receives embeddings from a source whose prompt is `source_ids`."""
        ...

    def image_prompt(self, messages: Sequence[ChatMessage], *, size: ImageSize, seed: int) -> DiffusionPrompt:
        """For a diffusion entry. `size` is one of `image_sizes`; `seed`, 0 to 2**63 - 1, decides the noise.

        The last stage must return the pixels, RGB `[height, width, 3]` in [0, 1]. Raises
        `InvalidRequestError` if the messages cannot be rendered.
        """
        ...

    def dtype_name(self) -> str:
        """The checkpoint's own dtype, which `dtype: auto` selects: float32, bfloat16 or float16."""
        ...


class ModelFamily(Protocol):
    """Knows how to run its models in stages."""

    pipeline: Pipeline
    """All stages of the family and what flows between them."""
    architectures: tuple[str, ...]
    """The supported values of `architectures` in config.json."""
    reference: str | None
    """`package.module:name` of an `omni_server.reference.ReferenceFactory`, another implementation of the
    model that `omni-server verify` compares with; None if there is none."""
    engine_modules: tuple[str, ...]
    """Modules of its models, which the fork server imports once for all engines."""

    def needed_files(self) -> tuple[NeededFile, ...]:
        """The files that a checkpoint's folder must contain besides config.json and weights."""
        ...

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        """What each stage takes, by name; no weights are read. Raises `ConfigError` if config.json does not
        tell.

        Memory is planned and checked by it. It depends on the stages of `config`, their options and dtype,
        but not on their lengths, batch sizes and devices.
        """
        ...

    def open(self, model_dir: Path) -> FamilyModel:
        """Read what the server process needs, without weights. Raises `ConfigError` for an unsuitable
        folder."""
        ...

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        """Gives vLLM the stage's part of the checkpoint's config; None if vLLM reads the config unchanged."""
        ...

    def register(self) -> None:
        """Make the family's model classes known to vLLM in this process."""
        ...


def open_model(family: ModelFamily, folder: Path) -> FamilyModel:
    """Call `family.open`. Raises `ConfigError`, which names the folder, for every failure."""
    try:
        return family.open(folder)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises all kinds of them for damaged files
        raise ConfigError(f"{folder}: the server cannot open it: {type(error).__name__}: {error}") from error


def servable_architectures() -> tuple[str, ...]:
    """The architectures of all installed families."""
    return tuple(name for family in _installed() for name in family.architectures)


def families_of_this_process() -> list[ModelFamily]:
    """In an engine's process, the family that is served; in any other process, all installed families."""
    served = os.environ.get(MODEL_FAMILY_VARIABLE)
    return [load_family(served)] if served else _installed()


def _installed() -> list[ModelFamily]:
    """All installed families. A family that cannot be loaded is skipped with a warning."""
    families = []
    for name in installed_families():
        try:
            families.append(load_family(name))
        except ConfigError as error:
            logger.warning("%s", error)
    return families


def load_family(name: str) -> ModelFamily:
    """The family that a stage config names. Raises `ConfigError` if it does not exist."""
    try:
        return cast(ModelFamily, find_family(name))
    except ValueError as error:
        raise ConfigError(f"model_family '{name}': {error}") from error
