"""Environment variables that configure vLLM in addition to its engine arguments.

They are set from the stage config before vLLM is first imported and do not change afterwards: an engine's
process gets its own environment when it is forked (`EngineBuilder`).
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def set_library_environment() -> None:
    """Sets the variables that no stage config changes, except for those that the operator has set. Must be
    called before torch is imported: it reads the level of its log then.

    Raises `ConfigError` if no temporary file can be created, or if torch's folder for compiled code cannot be
    created, which its import would report with a traceback.
    """
    _check_folders()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Gloo, which connects the ranks, listens on the address of the machine's name, which may be public. All
    # ranks are on this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Each engine process would print dozens of lines that users cannot act on. Set any of these to see them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # The variable takes effect when vLLM is imported; the level of this process's logger is set here as well.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")


def set_engine_environment(config: StageConfig) -> None:
    """Sets all variables in this process, except for those that the operator has set. Must be called before
    vLLM is imported.

    Raises `ConfigError` like `set_library_environment`.
    """
    set_library_environment()
    # V2 on a GPU, where one kernel samples codec tokens. On a CPU V2 needs a Triton that compiles for
    # CPUs, which the one on PyPI does not.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1" if config.platform == "cuda" else "0")
    # NaN among a request's logits fails the request (`stages.runtime.stage_outputs`) instead of becoming a
    # token.
    os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    # vLLM's client waits this long for its engine to be ready. The effective limit is `start_timeout_s`.
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", "86400")
    if config.platform == "cpu":
        # The worker runs in the engine's own process: half the memory, a third of the startup time, and no
        # worker that spins on its queue.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Engines that each bind to the same cores starve each other; small models are fastest on one thread.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not compiles(config):
            # vLLM still compiles helpers of its sampler, such as the one for logprobs, when the first request
            # needs them: the engine would stall for seconds.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        # Workers of several ranks are started by an engine that may already use CUDA.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def compiles(config: StageConfig) -> bool:
    """Whether vLLM compiles a model. It never compiles diffusion stages (`diffusion_engine_args`)."""
    stages = config.stages.values()
    return any(stage.engine == "ar" and not stage.engine_args.get("enforce_eager", False) for stage in stages)


def only_devices(devices: Sequence[int], visible: str | None) -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES for an engine on these devices of the stage config, given the
    server's value.

    To the engine they are 0, 1, and so on, whichever they are: compiled code names its device by that number,
    and vLLM's cache gives the code of one replica to the others. Raises `ConfigError` if one of them is not
    visible.
    """
    if not visible:
        return ",".join(map(str, devices))
    names = visible.split(",")
    if max(devices) >= len(names):
        raise ConfigError(
            f"the stage config uses device {max(devices)}, counted from 0, and {VISIBLE_DEVICES}={visible} "
            f"makes {len(names)} visible"
        )
    if names[0].startswith("MIG-") and tuple(devices) != (0,):
        raise ConfigError(f"a server can use one instance of a partitioned GPU: set {VISIBLE_DEVICES} to it")
    return ",".join(names[device] for device in devices)


def _check_folders() -> None:
    try:
        tempfile.gettempdir()  # for the engines' files, and for compiled code unless the operator says where
    except OSError as error:
        what = f"no folder for temporary files can be written ({error.strerror})"
        raise ConfigError(f"{what}: set TMPDIR to a folder that can be written") from error
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{folder} cannot be made ({error.strerror})"
        raise ConfigError(f"{what}: set TORCHINDUCTOR_CACHE_DIR to a folder that can be written") from error
