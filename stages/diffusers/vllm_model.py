"""What vLLM has to know to start an engine on a folder of Diffusers: a configuration and a model class.

vLLM reads `config.json` and looks up its architecture. A pipeline has neither a config.json nor a model of
vLLM's; what these two say of it is what vLLM asks of every model, and has no effect.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedConfig
from vllm import ModelRegistry
from vllm.transformers_utils.config import register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from stages.diffusers.pipeline_folder import CONFIG_FORMAT, read_pipeline_folder

ARCHITECTURE = "DiffusersPipelineStage"
MAX_IMAGE_TOKENS = 1 << 20


class DiffusersConfigParser(ConfigParserBase):
    def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], PreTrainedConfig]:
        folder = read_pipeline_folder(Path(model))
        config = PreTrainedConfig(architectures=[ARCHITECTURE])
        config.pipeline_class = folder.class_name
        config.vocab_size, config.hidden_size, config.num_hidden_layers = 2, 64, 1
        config.num_attention_heads = config.num_key_value_heads = 1
        config.max_position_embeddings = MAX_IMAGE_TOKENS
        return config.to_dict(), config


class DiffusersPipelineStage(torch.nn.Module):
    """Has no instances: `stages.diffusers.pipeline_worker` runs the pipeline."""

    is_pooling_model: ClassVar[Literal[True]] = True
    is_attention_free: ClassVar[Literal[True]] = True
    attn_type: ClassVar[str] = "attention_free"

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> None: ...


def register() -> None:
    """Harmless if called again."""
    register_config_parser(CONFIG_FORMAT)(DiffusersConfigParser)
    ModelRegistry.register_model(ARCHITECTURE, DiffusersPipelineStage)
