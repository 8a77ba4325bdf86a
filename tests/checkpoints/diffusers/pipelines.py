"""Pipelines with random weights, in the structure of published ones; all but one are tiny."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from diffusers import (
    AutoencoderKLQwenImage,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)

from tests.checkpoints.diffusers.parts import (
    HIDDEN,
    clip_text_encoder,
    clip_tokenizer,
    genuine_qwen_text_encoder,
    projecting_clip_text_encoder,
    qwen_processor,
    qwen_text_encoder,
    qwen_tokenizer,
    qwen_vae,
    t5_text_encoder,
    t5_tokenizer,
    vae,
)


def _qwen_transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
    )


def _qwen_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )


def qwen_image() -> DiffusionPipeline:
    """Qwen/Qwen-Image."""
    tokenizer = qwen_tokenizer()
    return QwenImagePipeline(
        scheduler=_qwen_scheduler(),
        vae=qwen_vae(),
        text_encoder=qwen_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=_qwen_transformer(),
    )


def genuine_qwen_image() -> DiffusionPipeline:
    """Qwen/Qwen-Image in its sizes, with 28.8 billion parameters. Only its tokenizer is a small one."""
    tokenizer = qwen_tokenizer()
    return QwenImagePipeline(
        scheduler=_qwen_scheduler(),
        vae=AutoencoderKLQwenImage(),  # Diffusers' defaults are this model's, of the transformer, too
        text_encoder=genuine_qwen_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(),
    )


def qwen_image_edit() -> DiffusionPipeline:
    """Qwen/Qwen-Image-Edit."""
    tokenizer = qwen_tokenizer()
    return QwenImageEditPipeline(
        scheduler=_qwen_scheduler(),
        vae=qwen_vae(base_dim=4),  # it encodes images of 1024x1024, whatever is given
        text_encoder=qwen_text_encoder(tokenizer),
        tokenizer=tokenizer,
        processor=qwen_processor(tokenizer),
        transformer=_qwen_transformer(),
    )


def sd15() -> DiffusionPipeline:
    """stable-diffusion-v1-5/stable-diffusion-v1-5."""
    tokenizer = clip_tokenizer()
    unet = UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=64,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=HIDDEN,
        norm_num_groups=2,
        attention_head_dim=4,
    )
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    return StableDiffusionPipeline(
        unet=unet,
        vae=vae(4),
        text_encoder=clip_text_encoder(tokenizer),
        tokenizer=tokenizer,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
    )


def sd3() -> DiffusionPipeline:
    """stabilityai/stable-diffusion-3-medium-diffusers."""
    tokenizer = clip_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=HIDDEN,
        joint_attention_dim=2 * HIDDEN,
        pooled_projection_dim=2 * HIDDEN,
        out_channels=4,
        pos_embed_max_size=96,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(4, shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=projecting_clip_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=projecting_clip_text_encoder(tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=t5_text_encoder(2 * HIDDEN),
        tokenizer_3=t5_tokenizer(),
    )


def flux() -> DiffusionPipeline:
    """black-forest-labs/FLUX.1-dev."""
    return _flux(FluxPipeline)


def flux_kontext() -> DiffusionPipeline:
    """black-forest-labs/FLUX.1-Kontext-dev."""
    return _flux(FluxKontextPipeline)


def _flux(cls: type[FluxPipeline] | type[FluxKontextPipeline]) -> DiffusionPipeline:
    tokenizer = clip_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=4096,
        max_shift=1.15,
        shift=3.0,
        use_dynamic_shifting=True,
    )
    return cls(
        transformer=transformer,
        scheduler=scheduler,
        vae=vae(4, shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=clip_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=t5_text_encoder(HIDDEN),
        tokenizer_2=t5_tokenizer(),
    )


PIPELINES: Mapping[str, Callable[[], DiffusionPipeline]] = MappingProxyType(
    {
        "qwen-image": qwen_image,
        "qwen-image-edit": qwen_image_edit,
        "sd15": sd15,
        "sd3": sd3,
        "flux": flux,
        "flux-kontext": flux_kontext,
    }
)
