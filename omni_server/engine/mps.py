"""NVIDIA's Multi-Process Service, for stages that share a GPU.

Without it, the GPU gives each engine's process the whole chip for a time slice, and the small kernels of one
stage block the other stages. With it, kernels of all engines run side by side. The service is a daemon of the
CUDA driver. Each server runs its own, which ends with the server.
"""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm.platforms import current_platform

from omni_server.config.stage_config import StageConfig
from omni_server.engine.environment import VISIBLE_DEVICES
from omni_server.errors import ConfigError

logger = logging.getLogger(__name__)

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
CONTROL = "nvidia-cuda-mps-control"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
"""prctl(2)"""


@dataclass(frozen=True)
class MpsDaemon:
    """A running control daemon."""

    process: subprocess.Popen[bytes]
    directory: Path
    variables: Mapping[str, str]
    """Environment variables for its clients."""

    def stop(self) -> None:
        """Ends the daemon and removes its files. Its clients should have ended. Harmless if it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_mps(config: StageConfig, folder: Path) -> MpsDaemon | None:
    """Starts the daemon if `config` wants it and it can run here. Its files are in the server's `folder`.

    `mps: auto` wants it if stages share a device, and does without it if the driver does not include it or it
    does not start. A service that the operator runs (CUDA_MPS_PIPE_DIRECTORY is set) is used instead. Raises
    `ConfigError` if `mps: on` cannot be fulfilled. Must be called from the main thread, because the daemon
    ends with that thread.
    """
    if config.mps == "off" or config.platform != "cuda" or PIPE_VARIABLE in os.environ:
        return None
    users: Counter[int] = Counter()
    for stage in config.stages.values():
        users.update({device: stage.uses_of(device) for device in stage.devices})
    if config.mps == "auto" and max(users.values()) < 2:
        return None
    if shutil.which(CONTROL) is None:
        if config.mps == "on":
            raise ConfigError(f"mps is on, but {CONTROL} is not installed; it comes with NVIDIA's driver")
        return None
    directory = folder / "mps"
    directory.mkdir()
    variables = _variables(directory)
    process = subprocess.Popen(
        [CONTROL, "-f"],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C must not end it before the engines
        preexec_fn=_end_with_parent,
    )
    daemon = MpsDaemon(process, directory, variables)
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if (directory / "control").exists():
            return daemon
        time.sleep(0.02)
    daemon.stop()
    if config.mps == "on":
        raise ConfigError(
            f"mps is on, but {CONTROL} did not start; without it stages take turns on the GPU (mps: off)"
        )
    logger.warning("%s did not start; the stages take turns on the GPU", CONTROL)
    return None


def _variables(directory: Path) -> dict[str, str]:
    """Returns the variables of the daemon and of its clients.

    The daemon numbers the devices that it sees from 0, and a client's numbers are relative to that: numbers
    that the operator has set would be applied twice. A UUID means the same device to both.
    """
    variables = {PIPE_VARIABLE: str(directory), LOG_VARIABLE: str(directory)}
    if os.environ.get(VISIBLE_DEVICES, "")[:1].isdecimal():
        uuids = map(current_platform.get_device_uuid, range(current_platform.device_count()))
        variables[VISIBLE_DEVICES] = ",".join(uuids)
    return variables


def _end_with_parent() -> None:
    """Runs in the child before it becomes the daemon: it gets SIGTERM when the server ends or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
