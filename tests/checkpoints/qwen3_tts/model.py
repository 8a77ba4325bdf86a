"""Modules with the parameters of Qwen3-TTS, which transformers does not have.

What is not used to make weights cannot be called.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MimiConfig, MimiModel, Qwen3Config, Qwen3Model
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavTransformerModel,
)


class Qwen3TTS(nn.Module):
    """All parts of the checkpoint in `folder`; two of them are saved in speech_tokenizer."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        codec = json.loads((folder / "speech_tokenizer" / "config.json").read_text())
        self.talker = Talker(config["talker_config"])
        self.speaker_encoder = (
            _speaker_encoder(config["speaker_encoder_config"]) if config["tts_model_type"] == "base" else None
        )
        self.code2wav = Decoder(codec["decoder_config"])
        self.audio_encoder = _audio_encoder(codec["encoder_config"])


class Talker(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, text_width = config["hidden_size"], config["text_hidden_size"]
        self.model = _decoder(config)
        self.model.codec_embedding = nn.Embedding(config["vocab_size"], width)
        self.model.text_embedding = nn.Embedding(config["text_vocab_size"], text_width)
        self.text_projection = _TextProjection(text_width, width)
        self.codec_head = nn.Linear(width, config["vocab_size"], bias=False)
        self.code_predictor = CodePredictor(config["code_predictor_config"], width)

    def text_rows(self, text_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.text_projection(self.model.text_embedding(text_ids))
        return rows


class CodePredictor(nn.Module):
    def __init__(self, config: dict[str, Any], talker_width: int) -> None:
        super().__init__()
        width, codes, predicted = config["hidden_size"], config["vocab_size"], config["num_code_groups"] - 1
        self.model = _decoder(config)
        self.model.codec_embedding = nn.ModuleList(
            nn.Embedding(codes, talker_width) for _ in range(predicted)
        )
        self.lm_head = nn.ModuleList(nn.Linear(width, codes, bias=False) for _ in range(predicted))
        if width != talker_width:
            self.small_to_mtp_projection = nn.Linear(talker_width, width)


def _decoder(config: dict[str, Any]) -> Qwen3Model:
    """Without token embeddings; the positions are those of plain RoPE, as all axes of M-RoPE are equal."""
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_key_value_heads", "head_dim", "rms_norm_eps")
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    decoder = Qwen3Model(
        Qwen3Config(vocab_size=1, rope_parameters=rope, **{key: config[key] for key in kept})
    )
    del decoder.embed_tokens
    return decoder


class _TextProjection(nn.Module):
    def __init__(self, text_width: int, width: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(text_width, text_width)
        self.linear_fc2 = nn.Linear(text_width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.linear_fc2(nn.functional.silu(self.linear_fc1(rows)))
        return projected


class Decoder(nn.Module):
    """Audio of this class is good for its level only: Qwen3-Omni's upsampling cuts it elsewhere."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, latent = config["codebook_dim"], config["latent_dim"]
        self.quantizer = _Quantizer(config)
        self.pre_conv = Qwen3OmniMoeCausalConvNet(width, latent, 3)
        self.pre_transformer = Qwen3OmniMoeCode2WavTransformerModel(Qwen3OmniMoeCode2WavConfig(**config))
        self.pre_transformer.input_proj = nn.Linear(latent, config["hidden_size"])
        self.pre_transformer.output_proj = nn.Linear(config["hidden_size"], latent)
        upsampler = Qwen3OmniMoeCode2Wav(
            Qwen3OmniMoeCode2WavConfig(**config | {"hidden_size": latent, "num_hidden_layers": 0})
        )
        self.upsample, self.decoder = upsampler.upsample, upsampler.decoder

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        transformer = self.pre_transformer
        hidden = transformer.input_proj(self.pre_conv(self.quantizer(codes)).mT)
        hidden = transformer.output_proj(transformer(inputs_embeds=hidden).last_hidden_state).mT
        for block in (block for blocks in self.upsample for block in blocks):
            hidden = block(hidden)
        for block in self.decoder:
            hidden = block(hidden)
        return hidden.clamp(-1, 1)


class _Quantizer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.rvq_first = _Codebooks(config, 1)
        self.rvq_rest = _Codebooks(config, config["num_quantizers"] - 1)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        latent: torch.Tensor = self.rvq_first(codes[:, :1]) + self.rvq_rest(codes[:, 1:])
        return latent


class _Codebooks(nn.Module):
    def __init__(self, config: dict[str, Any], num_codebooks: int) -> None:
        super().__init__()
        width = config["codebook_dim"]
        # Only the published training used the first projection.
        self.input_proj = nn.Conv1d(width, width // 2, 1, bias=False)
        self.output_proj = nn.Conv1d(width // 2, width, 1, bias=False)
        self.vq = nn.Module()
        self.vq.layers = nn.ModuleList(nn.Module() for _ in range(num_codebooks))
        for layer in self.vq.layers:
            layer._codebook = _Codebook(config["codebook_size"], width // 2)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        vectors = [layer._codebook(codes[:, i]) for i, layer in enumerate(self.vq.layers)]
        latent: torch.Tensor = self.output_proj(torch.stack(vectors).sum(0).mT)
        return latent


class _Codebook(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.empty(size))
        self.embedding_sum = nn.Parameter(torch.empty(size, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return (self.embedding_sum / self.cluster_usage[:, None])[codes]


def _audio_encoder(config: dict[str, Any]) -> MimiModel:
    model = MimiModel(MimiConfig(**config))
    del model.upsample, model.decoder_transformer, model.decoder
    return model


def _speaker_encoder(config: dict[str, Any]) -> nn.Module:
    channels, kernels = config["enc_channels"], config["enc_kernel_sizes"]
    scale, squeezed = config["enc_res2net_scale"], config["enc_se_channels"]
    encoder = nn.Module()
    _add_convolution(encoder, "blocks.0.conv", config["mel_dim"], channels[0], kernels[0])
    for i in range(1, len(channels) - 1):
        part = f"blocks.{i}"
        _add_convolution(encoder, f"{part}.tdnn1.conv", channels[i - 1], channels[i])
        for j in range(scale - 1):
            name = f"{part}.res2net_block.blocks.{j}.conv"
            _add_convolution(encoder, name, channels[i] // scale, channels[i] // scale, kernels[i])
        _add_convolution(encoder, f"{part}.tdnn2.conv", channels[i], channels[i])
        _add_convolution(encoder, f"{part}.se_block.conv1", channels[i], squeezed)
        _add_convolution(encoder, f"{part}.se_block.conv2", squeezed, channels[i])
    last, attention = channels[-1], config["enc_attention_channels"]
    _add_convolution(encoder, "mfa.conv", last, last, kernels[-1])
    _add_convolution(encoder, "asp.tdnn.conv", 3 * last, attention)
    _add_convolution(encoder, "asp.conv", attention, last)
    _add_convolution(encoder, "fc", 2 * last, config["enc_dim"])
    return encoder


def _add_convolution(root: nn.Module, name: str, inputs: int, outputs: int, kernel: int = 1) -> None:
    *path, last = name.split(".")
    module = root
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.add_module(last, nn.Conv1d(inputs, outputs, kernel))


def main_tensors(model: Qwen3TTS) -> dict[str, torch.Tensor]:
    """Those of model.safetensors, by their published names."""
    return _named(talker=model.talker, speaker_encoder=model.speaker_encoder)


def codec_tensors(model: Qwen3TTS) -> dict[str, torch.Tensor]:
    """Those of speech_tokenizer/model.safetensors."""
    return _named(decoder=model.code2wav, encoder=model.audio_encoder)


def _named(**parts: nn.Module | None) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": tensor.contiguous()
        for part, module in parts.items()
        if module is not None
        for name, tensor in module.state_dict().items()
    }
