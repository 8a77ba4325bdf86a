"""Which stages of a deployment pause for code2wav's urgent batches."""

from omni_server.config.stage_config import ArStage, DiffusionStage, StageConfig
from omni_server.protocol.give_way import GiveWaySpec
from omni_server.protocol.local_socket import new_socket_name


def give_way_specs(config: StageConfig) -> dict[str, GiveWaySpec]:
    """By name the autoregressive stages of low priority that share a GPU with a code2wav of normal priority.

    Each has a socket of its own, a new one at each call. Empty on CPU.
    """
    if config.platform != "cuda":
        return {}
    devices = {
        device
        for stage in config.stages.values()
        if isinstance(stage, DiffusionStage) and stage.gpu_priority == "normal"
        for device in stage.devices
    }
    return {
        name: GiveWaySpec(new_socket_name())
        for name, stage in config.stages.items()
        if isinstance(stage, ArStage) and stage.gpu_priority == "low" and not devices.isdisjoint(stage.devices)
    }
