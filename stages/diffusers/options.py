"""Stage config options of a Diffusers pipeline."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from omni_server.config.stages import DiffusionStage
from omni_server.protocol.diffusion_config import ComputeDtype

LoraName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
LoraPlace = Annotated[str, Field(pattern=r"\.safetensors$")]


AttentionBackend = Literal[
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "flash",
    "_flash_3",
    "sage",
    "xformers",
]
"""Diffusers' names, without those that download code when they are chosen."""


class DiffusersStage(DiffusionStage):
    """`max_model_len` limits a request, with its images to edit, and `max_num_batched_tokens` all requests of
    a step, in image tokens: one is a square of 16 x 16 pixels."""

    gpu_dtype: ClassVar[ComputeDtype] = "bfloat16"
    """What the published pipelines are meant for; several overflow in float16."""

    max_image_tokens: Annotated[int, Field(ge=16)] | None = None
    """The largest image that is generated; `null`: `max_model_len`, which is meant for pipelines that edit no
    images."""
    join_requests: bool = True
    """Compute the denoising steps of several requests in one pass. An image then depends on the others of its
    step in the last bits. Switched off by itself for a model whose requests cannot be joined."""
    step_cache: Literal["none", "first_block"] = "none"
    """`first_block`: skip the rest of the denoiser in steps in which its first block's output hardly changes;
    faster, and less exact. Such steps are not joined."""
    step_cache_threshold: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Relative change of the first block's output up to which a step is skipped."""
    compile: bool = False
    """Compile the repeated blocks of the denoiser with `torch.compile` before the server is ready. Not
    together with `step_cache`, `layerwise_casting` or `loras`."""
    attention_backend: AttentionBackend | None = None
    """Diffusers' name of the implementation of attention; `null`: torch's. Those of other packages must be
    installed. Without support for masks, requests with prompts of different lengths are not joined."""
    layerwise_casting: bool = False
    """Store the weights of the denoiser and of text encoders in float8 (e4m3), and convert each layer's for
    the time of its computation: about half the memory, and images that differ slightly."""
    loras: dict[LoraName, LoraPlace] = Field(default_factory=dict)
    """LoRA adapters that requests may choose by name: each is a file, or OWNER/NAME/FILE on the hub. They are
    loaded at the start. Requests with different ones are not joined."""
    vae_tiling: bool = False
    """Decode large images in tiles: needs less memory and changes the image slightly where tiles meet."""

    @property
    def largest_image(self) -> int:
        """`max_image_tokens`, or its default."""
        return self.max_model_len if self.max_image_tokens is None else self.max_image_tokens

    @model_validator(mode="after")
    def _check_compile(self) -> "DiffusersStage":
        changing = {
            "step_cache": self.step_cache != "none",
            "loras": bool(self.loras),
            "layerwise_casting": self.layerwise_casting,
        }
        for name, is_set in changing.items():
            if self.compile and is_set:
                raise ValueError(
                    f"compile and {name} exclude each other: blocks would be compiled again while serving"
                )
        return self

    @model_validator(mode="after")
    def _check_image_tokens(self) -> "DiffusersStage":
        if self.largest_image > self.max_model_len:
            raise ValueError(
                f"max_image_tokens is {self.max_image_tokens}, more than max_model_len ({self.max_model_len}), "
                "which limits the whole request: lower it, or raise max_model_len"
            )
        return self
