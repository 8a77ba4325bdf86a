"""Diffusers pipelines in the server process: what a folder can generate, without weights."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omni_server.config.checkpoint_files import config_errors
from omni_server.config.pipeline import Pipeline, StageSpec, StepwiseEngine
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import CommonStage
from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.family import (
    DefaultConfigs,
    DiffusionPrompt,
    FamilyModel,
    HfOverrides,
    NeededFile,
    ReferenceImplementation,
)
from omni_server.family.footprint import StageFootprint
from omni_server.protocol.images import PIXELS_PER_TOKEN, ImageJob, Pixels, encode_job, num_image_tokens
from omni_server.types import ChatMessage, ImagePart, Output, Task, TextPart
from omni_server.types.images import FreeSizes, ImageFeatures, ImageOutput, ImageSize
from stages.diffusers.options import DiffusersStage
from stages.diffusers.pipeline_folder import (
    CONFIG_FORMAT,
    INDEX,
    PipelineFolder,
    component_class,
    read_pipeline_folder,
)

DEFAULT_SIDE = 1024
"""Of models that do not say for which size they were trained."""
SIDE_MULTIPLE = 16
"""OpenAI's; most models need it, too."""
MAX_RATIO = 3.0
"""OpenAI's."""
MAX_INPUT_IMAGES = 16
"""OpenAI's."""

NUM_STEPS = "num_inference_steps"
PARAMETERS = MappingProxyType(
    {
        "negative_prompt": "negative_prompt",
        NUM_STEPS: "num_steps",
        "guidance_scale": "guidance_scale",
        "true_cfg_scale": "true_cfg_scale",
    }
)
"""Of a pipeline's `__call__`, and the field of `ImageOutput` and `ImageJob` that sets it."""
_TAKE_SEVERAL_IMAGES = frozenset(
    {
        "BriaFibo2Pipeline",
        "BriaFiboEditPipeline",
        "Flux2KleinKVPipeline",
        "Flux2KleinPipeline",
        "Flux2Pipeline",
        "GlmImagePipeline",
        "QwenImage21Pipeline",
        "QwenImageEditPlusPipeline",
        "ZImageOmniPipeline",
    }
)
"""Pipelines to which a list of images is one request. All others take it for a batch of requests."""
_DTYPES = MappingProxyType({"BF16": "bfloat16", "F16": "float16"})
_REQUIRED = ("prompt", "height", "width", NUM_STEPS, "generator", "output_type")
_VIDEO_PARAMETERS = frozenset({"frames", "num_frames", "video", "video_length"})
_CONTROL_PARAMETERS = frozenset(
    {"adapter_conditioning_scale", "control_image", "control_video", "controlnet_conditioning_scale"}
)
"""Of pipelines that follow a second image, such as the edges or the depth of what they draw."""


class DiffusersFamily:
    """Implements `omni_server.family.ModelFamily`."""

    pipeline = Pipeline(
        {
            "image": StageSpec(
                "diffusion",
                output="image",
                config=DiffusersStage,
                stepwise=StepwiseEngine("stages.diffusers.pipeline_worker.PipelineWorker", CONFIG_FORMAT),
            )
        }
    )
    architectures = ("DiffusionPipeline",)
    reference: ReferenceImplementation | None = None
    engine_modules: tuple[str, ...] = ("stages.diffusers.pipeline_worker", "stages.runtime.step_scheduler")
    default_configs: DefaultConfigs | None = DefaultConfigs(gpu="diffusers", demo="diffusers.demo-cpu")

    def open(self, model_dir: Path) -> "DiffusersModel":
        return DiffusersModel(model_dir)

    def needed_files(self) -> tuple[NeededFile, ...]:
        return (NeededFile(("model_index.json",), "the list of the pipeline's components"),)

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        from stages.diffusers.footprint import stage_footprints

        with config_errors(f"{model_dir / INDEX} describes no model that can be built"):
            return stage_footprints(read_pipeline_folder(model_dir), config)

    def outputs(self, model_dir: Path) -> frozenset[Output]:
        return self.pipeline.outputs

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return None

    def register(self) -> None:
        from stages.diffusers.vllm_model import register

        register()


class DiffusersModel(FamilyModel):
    """One folder of Diffusers."""

    def __init__(self, model_dir: Path) -> None:
        """Raises `ConfigError` for a folder that is unsafe or incomplete, or that generates no images."""
        folder = self._folder = read_pipeline_folder(model_dir)
        cls = pipeline_class(folder)
        for name in folder.components:
            component_class(folder, name)
        parameters = inspect.signature(cls.__call__).parameters
        _check_class(cls, parameters)
        self._parameters = frozenset(parameters)
        self._pixels_per_latent = _pixels_per_latent(folder)
        self._loads_loras = hasattr(cls, "load_lora_weights")
        several = MAX_INPUT_IMAGES if folder.class_name in _TAKE_SEVERAL_IMAGES else 1
        self._max_input_images = several if "image" in self._parameters else 0
        self._needs_image = "image" in self._parameters and not _draws_without_image(cls)
        side = _trained_side(folder)
        self.image_sizes = (ImageSize(side, side),)
        self._input_tokens = input_image_tokens(folder)

    def image_features(self, stage: CommonStage) -> ImageFeatures:
        assert isinstance(stage, DiffusersStage)
        names = {ours for theirs, ours in PARAMETERS.items() if theirs in self._parameters}
        multiple = max(SIDE_MULTIPLE, self._pixels_per_latent)
        max_pixels = stage.largest_image * PIXELS_PER_TOKEN
        if max_pixels < multiple**2:
            raise ConfigError(
                f"an image has at least {num_image_tokens(multiple, multiple)} image tokens, and max_image_tokens "
                f"(or max_model_len) is {stage.largest_image}: raise it"
            )
        if self._needs_image:
            self._check_room_for_an_edit(stage)
        if stage.loras and not self._loads_loras:
            raise ConfigError(f"loras: {self._folder.class_name} loads no LoRA; leave it out")
        if stage.loras:
            names.add("loras")
        return ImageFeatures(
            parameters=frozenset(names | {"num_partial_images"}),
            free_sizes=FreeSizes(multiple, MAX_RATIO, max_pixels),
            max_input_images=self._max_input_images,
            needs_input_image=self._needs_image,
            loras=tuple(stage.loras),
        )

    def _check_room_for_an_edit(self, stage: DiffusersStage) -> None:
        """Raises `ConfigError` if the stage refuses every request that leaves its size to the model."""
        default = self.image_sizes[0]
        result = min(num_image_tokens(default.width, default.height), stage.largest_image)
        needed = result + self._input_tokens
        if needed > stage.max_model_len:
            raise ConfigError(
                f"an edit of automatic size needs {needed} image tokens, {self._input_tokens} of them for the image "
                f"to edit, and max_model_len is {stage.max_model_len}: raise it, or lower max_image_tokens"
            )

    def image_prompt(
        self, messages: Sequence[ChatMessage], image: ImageOutput, *, size: ImageSize, seed: int
    ) -> DiffusionPrompt:
        """The pipeline gets the text of all messages, and their images.

        An image to edit counts `input_image_tokens`. Its sides must have at least `SIDE_MULTIPLE` pixels,
        because pipelines round them down.
        """
        parts = [part for message in messages for part in message.content]
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        images = tuple(Pixels.of(part.pixels) for part in parts if isinstance(part, ImagePart))
        if len(texts) + len(images) < len(parts):
            raise InvalidRequestError("this model takes texts and images only", param="messages")
        for given in images:
            if min(given.width, given.height) < SIDE_MULTIPLE:
                raise InvalidRequestError(
                    f"an image to edit has {given.width}x{given.height} pixels; both sides must have "
                    f"{SIDE_MULTIPLE} at least",
                    param="image",
                    code="invalid_image",
                )
        job = ImageJob(
            prompt="\n".join(texts),
            width=size.width,
            height=size.height,
            seed=seed,
            negative_prompt=image.negative_prompt,
            num_steps=image.num_steps,
            guidance_scale=image.guidance_scale,
            true_cfg_scale=image.true_cfg_scale,
            images=images,
            num_partial_images=image.num_partial_images,
            loras=image.loras,
        )
        num_tokens = num_image_tokens(size.width, size.height) + len(images) * self._input_tokens
        return DiffusionPrompt((0,) * num_tokens, encode_job(job))

    def dtype_name(self) -> str:
        """That of the first weight of the denoiser, or of the first component; that of GPUs if there are no
        weights."""
        from safetensors import safe_open

        if not self._folder.has_weights:
            return DiffusersStage.gpu_dtype
        files = list(self._folder.weight_files())
        of_denoiser = [path for path in files if path.parent.name in ("transformer", "unet")]
        with safe_open((of_denoiser or files)[0], "np") as file:
            name = file.get_slice(next(iter(file.keys()))).get_dtype()
        return _DTYPES.get(name, "float32")

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        raise InvalidRequestError("this model generates images only")


def pipeline_class(folder: PipelineFolder) -> Any:
    """Returns the class of diffusers. Raises `ConfigError` if there is none of this name."""
    import diffusers  # takes seconds

    cls = getattr(diffusers, folder.class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise ConfigError(
            f"{folder.path}: {folder.class_name} is no pipeline of diffusers {diffusers.__version__}"
        )
    return cls


def _check_class(cls: Any, parameters: Mapping[str, inspect.Parameter]) -> None:
    missing = [name for name in _REQUIRED if name not in parameters]
    if missing or not _VIDEO_PARAMETERS.isdisjoint(parameters):
        what = f"has no parameter {missing[0]}" if missing else "makes videos"
        raise ConfigError(
            f"{cls.__name__} {what}; only pipelines that make an image from a prompt can be served"
        )
    given = ("self", "prompt", "image", "args", "kwargs")
    needed = [
        name for name, value in parameters.items() if value.default is value.empty and name not in given
    ]
    if not _CONTROL_PARAMETERS.isdisjoint(parameters):
        needed.append("a control image")
    if "mask_image" in parameters and not _draws_without_image(cls):
        needed.append("a mask")
    if needed:
        raise ConfigError(f"{cls.__name__} needs {needed[0]} with each prompt, which requests cannot contain")


def _draws_without_image(cls: Any) -> bool:
    from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING

    return cls in AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()


def _pixels_per_latent(folder: PipelineFolder) -> int:
    """Per side."""
    config = folder.config_of("vae")
    for name in ("block_out_channels", "encoder_block_out_channels"):
        blocks = config.get(name)
        if isinstance(blocks, list) and blocks:
            return int(2 ** (len(blocks) - 1))
    return 8


def input_image_tokens(folder: PipelineFolder) -> int:
    """Image tokens of an image to edit, whatever its size: pipelines resize it to about the size for which
    they were trained, and their denoisers compute it together with the result."""
    side = _trained_side(folder)
    return num_image_tokens(side, side)


def _trained_side(folder: PipelineFolder) -> int:
    for name in ("unet", "transformer"):
        side = folder.config_of(name).get("sample_size") if name in folder.components else None
        if isinstance(side, int):
            return side * _pixels_per_latent(folder)
    return DEFAULT_SIDE
