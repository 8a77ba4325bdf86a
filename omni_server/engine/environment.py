"""vLLM reads switches from the environment of the process that builds an engine, and its children inherit them.

They are set here, from the stage config, before vLLM is first imported; nothing else reads them.
"""

import logging
import os
import tempfile
from pathlib import Path

from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError


def set_engine_environment(config: StageConfig) -> None:
    """Values that the operator has set win. Raises `ConfigError` where no temporary file can be made, and where torch
    could not be imported: it makes its folder for compiled code then, and ends with a traceback if it cannot. To be
    called before."""
    _check_folders()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Gloo, with which ranks find each other, listens on the address of the machine's name, be it a public one. All
    # ranks are on this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Each engine process would print dozens of lines that no user can act on. Set any of these to see them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # The variable acts when vLLM is imported; the level of this process's logger is set here as well.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    # On a GPU V2, which vLLM would take for these models: the talker's sampler is one kernel there. On a CPU V2 needs a
    # Triton that compiles for CPUs, which the one on PyPI does not.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1" if config.platform == "cuda" else "0")
    # Scores that are not numbers end their request (`stages.runtime.stage_outputs`) instead of becoming a token.
    os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    # vLLM's client of an engine waits for it so long, from the start of its process on. `start_timeout_s` is the limit.
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", "86400")
    if config.platform == "cpu":
        # The worker lives in the engine's own process: half the memory, a third of the start-up time, and no
        # worker that spins on its queue.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Engines that each bind to the same cores starve each other; small models are fastest on one thread.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not compiles(config):
            # vLLM compiles helpers of its sampler all the same, such as the one for logprobs, when the first request
            # needs them: the engine would stand still for seconds.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        # Workers of several ranks are started by an engine that may already use CUDA.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def compiles(config: StageConfig) -> bool:
    """Whether vLLM compiles a model. It leaves code2wav as it is (`diffusion_args`)."""
    stages = config.stages.values()
    return any(stage.engine == "ar" and not stage.engine_args.get("enforce_eager", False) for stage in stages)


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
