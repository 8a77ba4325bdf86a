"""Flags of the command line that decide fields of stages."""

from dataclasses import dataclass

from omni_server.check.placement import Quantization
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage
from omni_server.errors import ConfigError


@dataclass(frozen=True)
class StageFlags:
    """None leaves a field as it is."""

    quantization: Quantization | None = None
    """Only for a config that is made for the model."""
    max_model_len: int | None = None
    """Of the stage that reads the prompt."""
    tensor_parallel_size: int | None = None
    """Of the same stage."""
    gpu_memory_utilization: float | None = None
    """Sum of the shares on the fullest device; all stages keep their proportions."""

    def refuse_cpu(self) -> None:
        """Raises `ConfigError` for flags that need a GPU."""
        if self.quantization is not None:
            raise ConfigError(f"--quantization {self.quantization} needs an NVIDIA GPU")
        if self.gpu_memory_utilization is not None:
            raise ConfigError(
                "--gpu-memory-utilization needs an NVIDIA GPU; on a CPU, set kv_cache_memory_bytes in the "
                "engine_args of each stage in the file that --stage-config names"
            )

    def applied(self, config: StageConfig) -> StageConfig:
        """Returns `config` with the last three. Raises `ConfigError` if its stages cannot have them."""
        if config.platform == "cpu":
            self.refuse_cpu()
        stages, name = dict(config.stages), config.entry
        reader = stages[name]
        ranks = self.tensor_parallel_size
        if isinstance(reader, ArStage):
            ranks = ranks or reader.tensor_parallel_size
            needed = ranks * reader.replicas
            if config.platform == "cuda" and ranks != reader.num_ranks and needed != len(reader.devices):
                raise ConfigError(
                    f"--tensor-parallel-size {ranks} needs {needed} devices for the {name}, which has "
                    f"{list(reader.devices)}: set its 'devices: {[*range(needed)]}', or others, and "
                    f"'tensor_parallel_size: {ranks}' in the file that --stage-config names"
                )
            length = self.max_model_len or reader.max_model_len
            stages[name] = reader.model_copy(update={"tensor_parallel_size": ranks, "max_model_len": length})
        elif self.max_model_len or ranks:
            raise ConfigError(
                f"--max-model-len and --tensor-parallel-size are not for the stage {name}, which samples no "
                "tokens: set its fields in the file that --stage-config names"
            )
        if self.gpu_memory_utilization is not None:
            factor = self.gpu_memory_utilization / max(config.memory_shares().values())
            for name, stage in stages.items():
                share = factor * stage.gpu_memory_utilization
                stages[name] = stage.model_copy(update={"gpu_memory_utilization": share})
        return config.model_copy(update={"stages": stages})


NO_STAGE_FLAGS = StageFlags()
