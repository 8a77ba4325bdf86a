"""Qwen3-Omni's code2wav stage."""

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from vllm.config import VllmConfig

from stages.qwen_codec.code2wav.model import Code2WavModel
from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.codec_layout import code2wav_layout


class Qwen3OmniCode2Wav(Code2WavModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: Qwen3OmniMoeCode2WavConfig = vllm_config.model_config.hf_config
        layout = code2wav_layout(config.to_dict())
        super().__init__(Code2WavNetwork(config), layout, "code2wav.", vllm_config, prefix)
