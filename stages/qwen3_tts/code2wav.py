"""Qwen3-TTS' code2wav stage. Its checkpoint is the folder of the speech tokenizer."""

from collections.abc import Iterable, Iterator

import torch
from vllm.config import VllmConfig

from omni_server.errors import ConfigError
from stages.qwen3_tts.codec_layout import decoder_layout
from stages.qwen3_tts.codec_network import Qwen3TTSNetwork
from stages.qwen3_tts.hf_config import Qwen3TTSDecoderConfig
from stages.qwen_codec.code2wav.model import Code2WavModel

_PREFIX = "decoder."
_QUANTIZER = f"{_PREFIX}quantizer."
_SMALLEST_USAGE = 1e-5

Weight = tuple[str, torch.Tensor]


class Qwen3TTSCode2Wav(Code2WavModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: Qwen3TTSDecoderConfig = vllm_config.model_config.hf_config
        layout = decoder_layout(config.to_dict())
        super().__init__(Qwen3TTSNetwork(config), layout, _PREFIX, vllm_config, prefix)

    def load_weights(self, weights: Iterable[Weight]) -> set[str]:
        return super().load_weights(_with_folded_quantizer(weights, self._num_codebooks))


def _with_folded_quantizer(weights: Iterable[Weight], num_codebooks: int) -> Iterator[Weight]:
    """The weights with one table in place of those of the residual vector quantizers: codes give sums of
    vectors, and the projection of a sum is the sum of the projected vectors."""
    quantizers: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        if name.startswith(_QUANTIZER):
            quantizers[name.removeprefix(_QUANTIZER)] = weight.float()
        else:
            yield name, weight
    places = [("rvq_first", 0), *(("rvq_rest", number) for number in range(num_codebooks - 1))]
    try:
        tables = [_projected_codebook(quantizers, *place) for place in places]
    except KeyError as error:
        raise ConfigError(f"the checkpoint lacks the weight {_QUANTIZER}{error.args[0]}") from None
    yield f"{_PREFIX}code_embedding.weight", torch.cat(tables)


def _projected_codebook(quantizers: dict[str, torch.Tensor], group: str, number: int) -> torch.Tensor:
    """Vectors [codebook_size, codebook_dim]."""
    codebook = f"{group}.vq.layers.{number}._codebook"
    usage = quantizers[f"{codebook}.cluster_usage"].clamp(min=_SMALLEST_USAGE)
    vectors = quantizers[f"{codebook}.embedding_sum"] / usage[:, None]
    return vectors @ quantizers[f"{group}.output_proj.weight"].squeeze(-1).T
