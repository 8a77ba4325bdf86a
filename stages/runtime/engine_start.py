"""What every engine of a server does first, in each process that runs a model."""

import os

from omni_server.platform.native_stderr import redirect_native_stderr
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.parent_watch import end_with_parent
from omni_server.protocol.runtime_config import StageRuntimeConfig
from omni_server.protocol.start_report import Phase, PhaseReport, ProgressSpec, send_report

MPS_PRIORITY_VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"
MPS_BELOW_NORMAL = "1"


class ProgressReporter:
    """Reports the start-up progress to the server: one datagram per phase."""

    def __init__(self, spec: ProgressSpec | None) -> None:
        """Without a `spec`, as in a standalone engine, sends nothing."""
        self._spec = spec

    def report(self, phase: Phase, detail: str = "") -> None:
        """Never blocks and never fails: a start does not depend on its reports, and the next one supersedes a
        lost one."""
        if self._spec is not None:
            send_report(PhaseReport(self._spec.stage, phase, detail), self._spec.socket)


def begin(config: object, *, is_first_rank: bool = True) -> ProgressReporter:
    """Makes this process a part of the server that started it. Must be called in the main thread, before
    anything uses the device.

    `config` is vLLM's `additional_config`: that of a stage, or anything else in a standalone engine. The
    first rank reports for the others, too."""
    end_with_parent()
    redirect_native_stderr()
    if not isinstance(config, StageRuntimeConfig | DiffusionRuntimeConfig):
        return ProgressReporter(None)
    if config.has_low_gpu_priority:
        # The Multi-Process Service reads it when the process creates its CUDA context, which has not
        # happened yet.
        os.environ[MPS_PRIORITY_VARIABLE] = MPS_BELOW_NORMAL
    return ProgressReporter(config.progress if is_first_rank else None)
