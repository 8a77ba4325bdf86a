"""vLLM reads switches from the environment of the process that builds an engine, and its children inherit them.

They are set here, from the stage config, before vLLM is first imported; nothing else reads them.
"""

import logging
import os

from omni_server.config.stage_config import StageConfig


def set_engine_environment(config: StageConfig) -> None:
    """Raises nothing; values that the operator has set win."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Each engine process would print dozens of lines that no user can act on. Set any of these to see them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # The variable acts where vLLM sets up logging, which is in the engine processes only.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    # On a GPU V2, which vLLM would take for these models: the talker's sampler is one kernel there. On a CPU V2 needs a
    # Triton that compiles for CPUs, which the one on PyPI does not.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1" if config.platform == "cuda" else "0")
    # Scores that are not numbers end their request (`stages.runtime.corrupt_requests`) instead of becoming a token.
    os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    if config.platform == "cpu":
        # The worker lives in the engine's own process: half the memory, a third of the start-up time, and no
        # worker that spins on its queue.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Engines that each bind to the same cores starve each other; small models are fastest on one thread.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        # Engines are started from threads of a process that may already use CUDA.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
