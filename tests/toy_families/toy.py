"""Common parts of the toy families: a tiny language model with random weights and its byte tokenizer."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from omni_server.config.pipeline import Pipeline
from omni_server.config.stage_config import StageConfig
from omni_server.errors import InvalidRequestError
from omni_server.family import DefaultConfigs, FamilyModel, NeededFile, ReferenceImplementation
from omni_server.family.footprint import StageFootprint
from omni_server.types import (
    ChatMessage,
    FunctionTool,
    Output,
    Prompt,
    ReadAloud,
    Task,
    TextPart,
)

NUM_BYTES = 256
END = NUM_BYTES
FIRST_CODE = NUM_BYTES + 1
NUM_CODES = 64
HIDDEN_SIZE = 64


def make_checkpoint(folder: Path, architecture: str, *, seed: int = 0) -> Path:
    """Writes a 2-layer Qwen2 with a vocabulary of 256 bytes, an end token and 64 codec tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=FIRST_CODE + NUM_CODES,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.3,  # with small ones, greedy decoding repeats a token
        tie_word_embeddings=False,
        eos_token_id=END,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"<end>": END}
    vocabulary |= {f"<code {number}>": FIRST_CODE + number for number in range(NUM_CODES)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


def text_of(messages: Sequence[ChatMessage]) -> str:
    return " ".join(
        part.text for message in messages for part in message.content if isinstance(part, TextPart)
    )


class ToyModel(FamilyModel):
    """Families override parts of it."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        outputs: Collection[Output],
        tools: Sequence[FunctionTool] = (),
    ) -> Prompt:
        return Prompt(text_of(messages))

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        if not isinstance(task, ReadAloud):
            raise InvalidRequestError("this model does not listen")
        return (ChatMessage("user", (TextPart(task.text),)),)

    def dtype_name(self) -> str:
        return "float32"


class ToyFamily:
    """Implements the part of `omni_server.family.ModelFamily` that all toy families share."""

    reference: ReferenceImplementation | None = None
    engine_modules: tuple[str, ...] = ()
    default_configs: DefaultConfigs | None = None
    pipeline: Pipeline

    def outputs(self, model_dir: Path) -> frozenset[Output]:
        return self.pipeline.outputs

    def needed_files(self) -> tuple[NeededFile, ...]:
        return (NeededFile(("tokenizer.json",), "the tokenizer"),)

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        with torch.device("meta"):
            weights = Qwen2ForCausalLM(Qwen2Config.from_pretrained(model_dir)).state_dict()
        shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        return {
            name: StageFootprint(
                tensors=shapes if stage.engine == "ar" else {},
                dtype="float32",
                loads_float32=True,
                values_per_token=1024,
            )
            for name, stage in config.stages.items()
        }


def with_architecture(config: Any, name: str) -> Any:
    """For a family's `hf_overrides`."""
    config.architectures = [name]
    return config
