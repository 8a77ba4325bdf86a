"""Which stages of a deployment leave room for the diffusion stages on their GPU, and how."""

from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.protocol.give_way import GiveWaySpec
from omni_server.protocol.local_socket import new_socket_name


def give_way_specs(config: StageConfig) -> dict[str, GiveWaySpec]:
    """By name the autoregressive stages that share a GPU with a diffusion stage and give way to it.

    A stage of low priority pauses for urgent batches of a diffusion stage that is not of low priority itself.
    Each has a socket of its own, a new one at each call. Empty on CPU.
    """
    if config.platform != "cuda":
        return {}
    specs = {}
    for name, stage in config.stages.items():
        if not isinstance(stage, ArStage):
            continue
        beside = [
            other
            for other in config.stages.values()
            if isinstance(other, DiffusionStage) and not set(other.devices).isdisjoint(stage.devices)
        ]
        pauses = stage.gpu_priority == "low" and any(other.gpu_priority == "normal" for other in beside)
        interval_s = stage.step_interval_per_stream_ms / 1000
        if beside and (pauses or interval_s):
            specs[name] = GiveWaySpec(new_socket_name(), pauses, interval_s, stage.max_num_seqs)
    return specs
